"""Blocks of code during which groups are offloaded: ``offloaded()``, ``swapped()``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import ContextDecorator
from functools import partial

from ..errors import InvalidOptionError
from ..groups.registry import registry
from ..groups.sets import SetState, named_sets
from ..reports import Report
from ..threads import exiting
from .connect import Connect, validate
from .job import jobs
from .offload import release
from .operation import Operation
from .pending import run
from .reload import restore

logger = logging.getLogger("reloadpg")


class offloaded(ContextDecorator):  # noqa: N801 - used like a function
    """Offload groups for a block of code, and reload them afterwards, also after an exception.

    Collective, like :func:`offload` and :func:`reload`. Blocks nest, also with ``colocated()``, and
    several asyncio tasks or threads may have a block of the same set: the last one to leave reloads
    it. Blocks are counted on each rank, and every entry, and every end that reloads, is an
    operation of all ranks. So all ranks enter and leave their blocks in the same order, one at a
    time. If the body raises, the groups are reloaded (the other ranks wait for it) and the body's
    exception is raised. If this reload fails, its error is logged.
    ``with reloadpg.offloaded() as report`` returns the report of the offload.

    It decorates functions whose body runs in the call. In a generator or a coroutine use ``with``
    in the body, which blocks the event loop while an operation runs. For other tasks to continue,
    use ``await reloadpg.offload(wait=False)`` and ``await reloadpg.reload(wait=False)``.

    A block that is left while the interpreter exits, such as that of a suspended generator, reloads
    nothing, and neither does one that is left in a forked child.

    Args:
        sets: as for :func:`offload`; none for all.
        connect: as for :func:`reload`.

    Raises:
        InvalidOptionError: an argument cannot be used; nothing was changed.
    """

    def __init__(self, *sets: str, connect: Connect | None = None) -> None:
        self._named = named_sets(sets, "offloaded")
        validate(connect)
        self._connect = connect
        self._blocks: list[Block] = []  # a decorated function may call itself

    def __enter__(self) -> Report:
        block = Block(self._named)
        report = block.enter(self._connect)
        self._blocks.append(block)
        return report

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._blocks.pop().leave(error, self._connect)


class swapped(ContextDecorator):  # noqa: N801 - used like a function
    """Offload one set and reload another one for a block of code, and swap back afterwards.

    ::

        with reloadpg.swapped(out="trainer", into="engine"):
            samples = llm.generate(prompts)

    Collective over all ranks of the job, and blocking, like :func:`offload` and :func:`reload`.
    ``out`` is released on all ranks before ``into`` is reloaded, and vice versa at the end. Sets
    already in the wanted state are unchanged; both may be live before the first block. After the
    block, ``into`` is offloaded and ``out`` is live, also if the body raised. If swapping back then
    fails, that error is logged and the body's exception is raised. If ``into`` cannot be reloaded,
    ``out`` is reloaded and the body does not run. ``with reloadpg.swapped(...) as reports`` returns
    the reports of the first offload and reload. Blocks nest, are counted and decorate as those of
    :class:`offloaded` do: the last one to leave swaps back.

    Args:
        out: the set, or the sets, to offload.
        into: the set, or the sets, that are live in the block.
        connect: as for :func:`reload`; for both reloads.

    Raises:
        InvalidOptionError: an argument cannot be used, or a set is in both; nothing was changed.
    """

    def __init__(
        self,
        *,
        out: Iterable[str] | str,
        into: Iterable[str] | str,
        connect: Connect | None = None,
    ) -> None:
        self._out, self._into = (named_sets(sets, "swapped") for sets in (out, into))
        if not self._out or not self._into or self._out & self._into:  # none chooses all sets
            raise InvalidOptionError(
                f"swapped(out={out!r}, into={into!r}): the sets must differ; nothing was "
                'changed. Pass for example out="trainer", into="engine".'
            )
        validate(connect)
        self._connect = connect
        self._blocks: list[Block] = []

    def __enter__(self) -> tuple[Report, Report]:
        block = Block(self._out)
        offload = block.enter(self._connect)
        try:
            reload = run(Operation("reload", self._into), partial(restore, how=self._connect))
        except BaseException as error:
            block.leave(error, self._connect)
            raise
        self._blocks.append(block)
        return offload, reload

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        block = self._blocks.pop()
        try:
            if block.due and not block.is_void:
                run(Operation("offload", self._into), release)
        except BaseException as failed:
            block.leave(error or failed, self._connect)
            if error is None:
                raise
            logger.error("offload at the end of the swapped block failed: %s", failed)
        else:
            block.leave(error, self._connect)


class Block:
    """One block on this rank.

    Each set has a counter of the blocks that keep it offloaded. A block whose end makes it zero
    reloads the set.

    Args:
        sets: the sets to offload; empty for all.
    """

    def __init__(self, sets: frozenset[str]) -> None:
        self._sets = sets or registry.sets
        self._counted: dict[str, SetState] = {}
        self._pid = os.getpid()

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
        op = Operation("offload", self._sets)
        try:
            report = run(op, release)
        except BaseException as error:
            if op.committed:
                self._count()
                self.leave(error, connect)
            raise
        self._count()
        return report

    def _count(self) -> None:
        """Count this block."""
        job = jobs.known
        if job is not None:
            self._counted = {name: job.sets[name] for name in self._sets}
            for state in self._counted.values():
                state.depth += 1

    @property
    def is_void(self) -> bool:
        """Whether its end changes nothing: in a forked child, or while the interpreter exits."""
        return self._pid != os.getpid() or exiting()

    def leave(self, error: BaseException | None, connect: Connect | None) -> None:
        with registry.lock:  # of two threads, one is the last
            due = self.due
            self.close()
        if self.is_void or not due:
            return
        try:
            run(Operation("reload", due), partial(restore, how=connect))
        except Exception as failed:  # of any kind: the body's exception must be raised
            if error is None:
                raise
            logger.error("reload after an exception in the offloaded block failed: %s", failed)

    def close(self) -> None:
        counted, self._counted = self._counted, {}
        for state in counted.values():
            state.depth -= 1
