"""The rank in every log record of the library.

The library only ever logs to ``reloadpg`` and loggers below it. A filter on a logger does not see
the records of the loggers below, a handler does: so the handler that keeps an unconfigured program
silent (``NullHandler``, as the logging howto asks of a library) also names the rank. It comes
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


class RankHandler(logging.NullHandler):
    """Prints nothing, and sets ``record.rank``: the rank, or ``-`` where it is not known yet."""

    def handle(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "rank"):
            rank = current_rank()
            record.rank = UNKNOWN if rank is None else rank
        return True


def name_rank_in_records() -> None:
    """Give the records of ``reloadpg`` their rank from now on. Local, idempotent."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, RankHandler) for handler in logger.handlers):
        logger.handlers.insert(0, RankHandler())
