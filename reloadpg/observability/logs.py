"""The rank in every log record of the library.

The library only ever logs to ``reloadpg`` and loggers below it. A filter on a logger does not see
the records of the loggers below, a handler does: so one handler names the rank, and prints warnings
where the program has not configured logging. It comes
before all other handlers of ``reloadpg`` and of the root logger, whose formats may say
``%(rank)s``.
"""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["RankHandler", "current_rank", "name_rank_in_records"]

LOGGER = "reloadpg"
UNKNOWN = "-"


def current_rank() -> int | None:
    """This process's rank, from its default group or else from its launcher. Local, never raises.

    Imports nothing: before torch is loaded only the launcher can know.
    """
    torch = sys.modules.get("torch.distributed")
    try:
        if torch is not None and torch.is_initialized():
            return int(torch.get_rank())
    except Exception:  # a default group that is being made or destroyed in another thread
        pass
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


class RankHandler(logging.Handler):
    """Sets ``record.rank``: the rank, or ``-`` where it is not known yet.

    Where no other handler takes the record, it goes to stderr from the level of warnings on, or
    from that of the logger ``reloadpg`` if it was set: logging's own last resort prints only for
    loggers without any handler.
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
    """Whether a handler of the program gets the records of a logger."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if not all(isinstance(one, (RankHandler, logging.NullHandler)) for one in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def name_rank_in_records() -> None:
    """Give the records of ``reloadpg`` their rank from now on. Local, idempotent."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, RankHandler) for handler in logger.handlers):
        logger.handlers.insert(0, RankHandler())
