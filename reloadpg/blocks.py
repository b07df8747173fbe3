"""Blocks of code within which a job's groups are offloaded: ``offloaded()``, ``colocated()``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from .lifecycle import offload_noting, reload
from .registry import registry
from .report import Report

__all__ = ["Block", "offloaded"]

logger = logging.getLogger("reloadpg")


@contextmanager
def offloaded() -> Iterator[Report]:
    """Within this block the groups are offloaded; afterwards, whatever happens, reloaded.

    Collective, like :func:`offload` and :func:`reload`. Blocks nest, those of ``colocated()``
    too: the outermost one reloads. If its body raises, the groups are reloaded (the other ranks
    wait for it) and the body's exception goes on. If the reload then fails too, its error is
    logged and the body's exception still goes on.

    Yields:
        The report of the offload.
    """
    block = Block()
    report = block.enter()
    try:
        yield report
    except BaseException:
        if not block.nested:
            _reload_logged()
        raise
    else:
        if not block.nested:
            reload()
    finally:
        block.close()


class Block:
    """One block on this rank.

    Attributes:
        nested: whether it stands in another one, which reloads.
    """

    def __init__(self) -> None:
        job = registry.known_job
        self.nested = job is not None and bool(job.blocks) and job.released
        # The job's set, and not the job, whose store ends with the default group.
        self._open: set[object] = set()

    def enter(self) -> Report:
        """Offload. Collective and blocking; see :func:`offload`.

        Raises:
            Exception: what :func:`offload` raises; the groups are as it says. An interrupt at the
                very end of an offload that is complete is raised after a reload: the other ranks
                are in their blocks, and reload at their ends.
        """
        completed: list[bool] = []
        try:
            report = offload_noting(completed)
        except BaseException:
            if completed and not self.nested:
                _reload_logged()
            raise
        self._open = registry.blocks
        self._open.add(self)
        return report

    def close(self) -> None:
        """Count no more. Local, idempotent."""
        self._open.discard(self)


def _reload_logged() -> None:
    try:
        reload()
    except Exception as error:  # an accelerator's own, too: the first exception must be seen
        logger.error("reload after an exception in the offloaded block failed: %s", error)
