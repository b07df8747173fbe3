"""Blocks of code within which a job's groups are offloaded: ``offloaded()``, ``colocated()``."""

from __future__ import annotations

import logging
from contextlib import ContextDecorator
from types import TracebackType

from ..groups.registry import registry
from .offload import offload
from .reload import reload
from .report import Report

__all__ = ["Block", "offloaded"]

logger = logging.getLogger("reloadpg")


class offloaded(ContextDecorator):  # noqa: N801 - used like a function
    """Offload the groups for a block of code, and reload them afterwards, whatever happens.

    Collective, like :func:`offload` and :func:`reload`. Blocks nest, those of ``colocated()``
    too: the outermost one reloads. If its body raises, the groups are reloaded (the other ranks
    wait for it) and the body's exception goes on. If the reload then fails too, its error is
    logged and the body's exception still goes on. ``with reloadpg.offloaded() as report`` gives
    the report of the offload.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []  # as a decorator it is entered again and again

    def __enter__(self) -> Report:
        block = Block()
        report = block.enter()
        self._blocks.append(block)
        return report

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = self._blocks.pop()
        try:
            if not block.nested:
                if error is None:
                    reload()
                else:
                    _reload_logged()
        finally:
            block.close()


class Block:
    """One block on this rank.

    Attributes:
        nested: whether it is inside another one, which reloads.
    """

    def __init__(self) -> None:
        job = registry.known_job
        self.nested = job is not None and bool(job.blocks) and job.offloaded
        # The job's set, and not the job, whose store ends with the default group.
        self._open: set[object] = set()

    def enter(self) -> Report:
        """Offload. Collective and blocking; see :func:`offload`.

        Raises:
            Exception: what :func:`offload` raises; the groups are as it says. An interrupt at the
                very end of an offload that is complete is raised after a reload: the other ranks
                are in their blocks, and reload at their ends.
        """
        before = _cycles()
        try:
            report = offload()
        except BaseException:
            if _cycles() != before and not self.nested:
                _reload_logged()
            raise
        self._open = registry.blocks
        self._open.add(self)
        return report

    def close(self) -> None:
        """Count no more. Local, idempotent."""
        self._open.discard(self)


def _cycles() -> int:
    """The number of offloads that all ranks of the present job have completed."""
    job = registry.known_job
    return 0 if job is None else job.cycles


def _reload_logged() -> None:
    try:
        reload()
    except Exception as error:  # an accelerator's own, too: the first exception must be seen
        logger.error("reload after an exception in the offloaded block failed: %s", error)
