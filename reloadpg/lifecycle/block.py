"""Blocks of code during which groups are offloaded."""

from __future__ import annotations

import logging
import os
from contextlib import ContextDecorator
from datetime import timedelta
from functools import partial

from ..groups.registry import registry
from ..groups.sets import named_sets
from ..reports import Report
from ..settings import checked_attempts, seconds_or_none
from ..threads import exiting
from .connect import Connect, validate
from .installation import installation
from .job import SetState, jobs
from .kinds import OFFLOAD, RELOAD
from .offload import release
from .pending import Call
from .reload import restore

logger = logging.getLogger("reloadpg")

_ROLLOUT_S = 3600.0
"""Default timeout, in seconds, of the wait at the end of a block: rollouts differ in length."""


class offloaded(ContextDecorator):  # noqa: N801 - used like a function
    """Offload groups for a block of code, and reload them afterwards, also after an exception.

    Collective, like :func:`offload` and :func:`reload`. Blocks nest, also with ``colocated()``, and
    several asyncio tasks or threads may have a block of the same set: the last one to leave reloads
    it. Blocks are counted on each rank. Every entry is an operation of all ranks, and so is every
    end that reloads. So all ranks enter and leave their blocks in the same order, one at a time. If
    the body raises, the groups are reloaded (the other ranks wait for it) and the body's exception
    is raised. If this reload fails, its error is logged. ``with reloadpg.offloaded() as report``
    returns the report of the offload.

    It decorates functions whose body runs in the call. In a generator or a coroutine use ``with``
    in the body, which blocks the event loop while an operation runs. For other tasks to continue,
    use ``await reloadpg.offload(wait=False)`` and ``await reloadpg.reload(wait=False)``.

    The end of a block reloads nothing while the interpreter exits (a suspended generator), in a
    forked child, or after :func:`uninstall`.

    Args:
        sets: as for :func:`offload`; none for all.
        connect: as for :func:`reload`.
        attempts: as for :func:`reload`, at the end of the block.
        timeout: how long the end of the block waits for ranks that are still in the block, without
            progress on any rank. A number is in seconds. None means one hour, or the timeout of
            :func:`install` if that is longer: rollouts differ in length. The wait ends at once if a
            rank fails, or if a process of this host has ended. After an exception in the body, and
            for all other waits, the timeout of ``install`` holds.

    Raises:
        InvalidOptionError: an argument cannot be used; nothing was changed.
    """

    def __init__(
        self,
        *sets: str,
        connect: Connect | None = None,
        attempts: int = 1,
        timeout: timedelta | float | None = None,
    ) -> None:
        self._named = named_sets(sets, "offloaded")
        self._attempts = checked_attempts(attempts)
        validate(connect)
        self._connect = connect
        self._timeout = seconds_or_none(timeout, "timeout")
        self._blocks: list[Block] = []  # a decorated function may call itself

    def __enter__(self) -> Report:
        block = Block(self._named, self._timeout, self._attempts)
        self._blocks.append(block)
        try:
            return block.enter(self._connect)
        except BaseException:
            self._blocks.remove(block)
            raise

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._blocks.pop().leave(error, self._connect)


class Block:
    """One block on this rank.

    Each set has a counter of the blocks that keep it offloaded. A block whose end makes it zero
    reloads the set.

    Args:
        sets: the sets to offload; empty for all.
        seconds: the timeout of the wait for ranks that are in the block; None for the default.
        attempts: of the reload.
    """

    def __init__(
        self, sets: frozenset[str], seconds: float | None = None, attempts: int = 1
    ) -> None:
        self._sets = sets or registry.sets
        self._seconds, self._attempts = seconds, attempts
        self._counted: dict[str, SetState] = {}
        self._due: frozenset[str] | None = None  # known when it has ended
        self._pid = os.getpid()

    def seconds(self, error: BaseException | None = None) -> float | None:
        """The timeout at its end, after an exception in its body or without one. Local.

        None is the timeout of the installation: the program of an exception often ends next.
        """
        if error is not None or installation.options is None:
            return None
        return self._seconds or max(_ROLLOUT_S, installation.options.timeout.total_seconds())

    @property
    def due(self) -> frozenset[str]:
        """The sets that the end of this block reloads: no other block needs them offloaded."""
        counted = self._counted
        return frozenset(n for n in self._sets if n not in counted or counted[n].depth == 1)

    @property
    def is_offloaded(self) -> bool:
        """Whether groups of these sets are offloaded. Local."""
        job = jobs.current("an offloaded() block")
        return job is not None and any(job.sets[name].offloaded for name in self.due)

    def enter(self, connect: Connect | None = None) -> Report:
        """Offload. An interrupt at the end of a completed offload is raised after a reload.

        The other ranks are in their blocks then, and reload at their ends, with the same
        ``connect``.
        """
        call = Call(OFFLOAD, release, self._sets)
        try:
            report = call.run().result()
            self._count()
        except BaseException as error:
            if call.committed:
                self._count()
                self.leave(error, connect)
            raise
        return report

    def _count(self) -> None:
        """Count this block. Idempotent."""
        job = jobs.known
        if job is not None and not self._counted:
            self._counted = {name: job.sets[name] for name in self._sets}
            for state in self._counted.values():
                state.open_block()

    @property
    def is_void(self) -> bool:
        """Whether its end changes nothing.

        In a forked child, while the interpreter exits, and after ``uninstall()`` in the block,
        which refuses while groups are offloaded.
        """
        return self._pid != os.getpid() or exiting() or registry.selection is None

    def leave(self, error: BaseException | None, connect: Connect | None) -> None:
        early = None
        try:
            due = self._end()
        except BaseException as interrupt:  # the other ranks reload, and wait for this one
            due, early = self._end(), interrupt
        if due and not self.is_void:
            self._reload(due, error or early, connect)
        if early is not None:
            raise early

    def _end(self) -> frozenset[str]:
        """Close the block, and return the sets that its end reloads. Idempotent."""
        with registry.lock:  # of two threads, one is the last
            if self._due is None:
                self._due = self.due
            self.close()
        return self._due

    def _reload(
        self, due: frozenset[str], error: BaseException | None, connect: Connect | None
    ) -> None:
        try:
            steps = partial(restore, how=connect, attempts=self._attempts)
            Call(RELOAD, steps, due, self.seconds(error)).run().result()
        except Exception as failed:  # of any kind: the body's exception must be raised
            if error is None:
                raise
            logger.error("reload after an exception in the offloaded block failed: %s", failed)

    def close(self) -> None:
        """Count this block no longer. Local, idempotent."""
        counted, self._counted = self._counted, {}
        for state in counted.values():
            state.close_block()
