"""A callback for reports that cannot break the job, whatever goes wrong in it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from reloadpg.lifecycle.callbacks import on_report
from reloadpg.lifecycle.report import Report

__all__ = ["subscribe"]

logger = logging.getLogger("reloadpg")


def subscribe(what: str, callback: Callable[[Report], object]) -> Callable[[], None]:
    """Call something with each report from now on; its first failure is its last call.

    Local. The failure is one warning: an exporter that is broken would be broken at every report
    to come.

    Args:
        what: what the callback is, for the warning.
        callback: called in the thread of the operation.

    Returns:
        A function that ends it; idempotent.
    """

    def guarded(report: Report) -> None:
        try:
            callback(report)
        except Exception as error:
            remove()
            logger.warning(
                "%s failed and is off from now on; the job is not affected: %s: %s",
                what,
                type(error).__name__,
                error,
            )

    remove = on_report(guarded)
    return remove
