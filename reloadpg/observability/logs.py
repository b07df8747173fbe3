"""The rank in every log record of the library.

The library logs only to ``reloadpg`` and its child loggers. A filter on a logger does not see the
records of child loggers, but a handler does. So one handler sets the rank, and prints warnings if
the program has not configured logging. It comes before all other handlers of ``reloadpg`` and of
the root logger, whose formats may contain ``%(rank)s``.
"""

from __future__ import annotations

import logging
import os
import sys

LOGGER = "reloadpg"
UNKNOWN = "-"


def current_rank() -> int | None:
    """This process's rank, from its default group or its launcher. Local, never raises.

    Imports nothing: before torch is loaded, the rank comes from the launcher.
    """
    torch = sys.modules.get("torch.distributed")
    try:
        if torch is not None and torch.is_initialized():
            return int(torch.get_rank())
    except Exception:  # another thread is creating or destroying the default group
        pass
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


class RankHandler(logging.Handler):
    """Sets ``record.rank``: the rank, or ``-`` if it is unknown.

    A record without another handler is printed to stderr from the level of warnings on, or from the
    level of the logger ``reloadpg`` if it was set. Logging's default does so only for loggers
    without any handler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s [rank %(rank)s]: %(message)s"))

    def handle(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "rank"):
            rank = current_rank()
            record.rank = UNKNOWN if rank is None else rank
        least = logging.getLogger(LOGGER).level or logging.WARNING
        if record.levelno >= least and not _is_taken(record.name):
            return bool(super().handle(record))
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


def _is_taken(name: str) -> bool:
    """Whether the program has a handler for the records of a logger."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if not all(isinstance(one, (RankHandler, logging.NullHandler)) for one in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def name_rank_in_records() -> None:
    """Add the rank to the records of ``reloadpg`` from now on. Local, idempotent."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, RankHandler) for handler in logger.handlers):
        logger.handlers.insert(0, RankHandler())
