"""Blocks of code during which groups are offloaded: ``offloaded()``, ``swapped()``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ContextDecorator

from ..errors import InvalidOptionError
from ..groups.registry import registry
from ..groups.sets import Chosen, SetState, SetStates
from .connect import Connect, validate
from .offload import release
from .operation import Operation
from .reload import restore
from .report import Report

logger = logging.getLogger("reloadpg")


class offloaded(ContextDecorator):  # noqa: N801 - used like a function
    """Offload groups for a block of code, and reload them afterwards, also after an exception.

    Collective, like :func:`offload` and :func:`reload`. Blocks nest, also with ``colocated()``:
    the outermost block of a set reloads it. If the body raises, the groups are reloaded (the other
    ranks wait for it) and the body's exception is raised. If this reload fails, its error is
    logged. ``with reloadpg.offloaded() as report`` returns the report of the offload.

    Args:
        sets: as for :func:`offload`; none for all.
        collect: as for :func:`offload`.
        connect: as for :func:`reload`.

    Raises:
        InvalidOptionError: an argument cannot be used; nothing was changed.
    """

    def __init__(self, *sets: str, collect: bool = False, connect: Connect | None = None) -> None:
        self._chosen = Chosen.of(sets, "offloaded")
        validate(connect)
        self._collect, self._connect = collect, connect
        self._blocks: list[Block] = []  # a decorator is entered repeatedly

    def __enter__(self) -> Report:
        block = Block(self._chosen)
        report = block.enter(self._collect)
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
    the reports of the first offload and reload.

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
        self._out, self._into = (Chosen.of(sets, "swapped") for sets in (out, into))
        if self._out.overlaps(self._into):  # no name at all chooses all sets
            raise InvalidOptionError(
                f"swapped(out={out!r}, into={into!r}): the sets must differ; nothing was "
                'changed. Pass for example out="trainer", into="engine".'
            )
        validate(connect)
        self._connect = connect
        self._blocks: list[Block] = []

    def __enter__(self) -> tuple[Report, Report]:
        block = Block(self._out)
        offload = block.enter()
        try:
            reload = restore(Operation("reload", self._into), self._connect)
        except BaseException as error:
            block.leave(error, self._connect)
            raise
        self._blocks.append(block)
        return offload, reload

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        block = self._blocks.pop()
        try:
            release(Operation("offload", self._into))
        except BaseException as failed:
            block.leave(error or failed, self._connect)
            if error is None:
                raise
            logger.error("offload at the end of the swapped block failed: %s", failed)
        else:
            block.leave(error, self._connect)


class Block:
    """One block on this rank; ``outermost`` are the sets that no enclosing block has offloaded."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        job = registry.known_job
        around = None if job is None else job.sets.where(chosen, SetState.in_block)
        self.outermost = chosen if around is None else chosen.without(around)
        self._sets: SetStates | None = None

    def enter(self, collect: bool = False) -> Report:
        """Offload. An interrupt at the end of a completed offload is raised after a reload.

        The other ranks are in their blocks then, and reload at their ends.
        """
        before = _cycles()
        try:
            report = release(Operation("offload", self._chosen), collect)
        except BaseException:
            if _cycles() != before:
                self._reload_logged("none")
            raise
        job = registry.known_job
        if job is not None:
            self._sets = job.sets
            for state in job.sets.separate(self._chosen):
                state.blocks.add(self)
        return report

    def leave(self, error: BaseException | None, connect: Connect | None) -> None:
        try:
            if error is not None:
                self._reload_logged(connect)
            elif self.outermost:
                restore(Operation("reload", self.outermost), connect)
        finally:
            self.close()

    def close(self) -> None:
        for state in self._sets.all() if self._sets is not None else ():
            state.blocks.discard(self)

    def _reload_logged(self, connect: Connect | None) -> None:
        if not self.outermost:
            return
        try:
            restore(Operation("reload", self.outermost), connect)
        except Exception as error:  # of any kind: the body's exception must be raised
            logger.error("reload after an exception in the offloaded block failed: %s", error)


def _cycles() -> int:
    """The number of offloads that all ranks of the current job have completed."""
    job = registry.known_job
    return 0 if job is None else job.cycles
