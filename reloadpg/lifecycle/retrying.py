"""Retrying: a loop whose steps are repeated, on all ranks alike, after a fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from .. import c10d
from ..c10d import devices
from ..errors import (
    DisagreementError,
    GroupOffloadedError,
    InvalidOptionError,
    PeerFailedError,
    RebuildError,
    ReleaseError,
    ReloadpgError,
    RendezvousTimeoutError,
)
from ..groups.proxy import ReloadableProcessGroup
from ..groups.registry import Position, registry
from .recover import Meeting, longest_wait, meet, seconds_of
from .report import Fault

__all__ = ["Step", "retrying"]

logger = logging.getLogger("reloadpg")

T = TypeVar("T")

On = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]

_OWN = (
    DisagreementError,
    GroupOffloadedError,
    PeerFailedError,
    RebuildError,
    ReleaseError,
    RendezvousTimeoutError,
)
"""Errors of this library that say that ranks are not in step."""

_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between a recovery that failed and the next one: a link that is down comes back."""


def retrying(
    items: Iterable[T],
    *,
    attempts: int = 3,
    on: On | None = None,
    wait_for_ranks: timedelta | float | None = None,
) -> Iterator[Step[T]]:
    """Iterate over the steps of a loop, each of which is repeated on all ranks after a fault.

    Each step is a context manager, which holds all that is to be repeated::

        for step in reloadpg.retrying(batches):
            with step as batch:
                if step.attempt == 1:
                    snapshot = copy_of(model, optimizer)
                else:  # a failed attempt has changed them, on some ranks more than on others
                    restore(model, optimizer, snapshot)
                train(batch)

    The snapshot belongs at the beginning: only there all ranks are known to have completed the
    step before. What keeps the state of half a step is to be made anew after a fault (the wrapper
    ``DistributedDataParallel``, a model sharded by FSDP2, a pipeline schedule); groups and meshes
    stay.

    Collective: all ranks iterate over as many items. At the end of its block each rank waits for
    its device, and then for the others: a step is complete on all ranks or on none. If a rank
    raises an error of ``on``, all ranks call :func:`recover` and repeat the step, those too that
    had finished it. Any other exception ends the loop on all ranks: the communicators are made
    anew, it goes on where it was raised, and the other ranks raise ``PeerFailedError`` with its
    text. An interrupt (``KeyboardInterrupt``, ``SystemExit``) is told and goes on at once.

    A process that replaces one that has ended (:func:`rejoin`) begins with the step that the others
    repeat: it draws the items before it and drops them, and passes over loops that the others have
    completed. ``step.replaced`` says on all ranks alike for which ones the caller has to bring the
    state, before the step can be done.

    Args:
        items: one item a step; an item is kept until its step is complete.
        attempts: how often a step is begun. A recovery that fails itself is called again, four
            times at most, after 1, 2, 4 and 8 s: a link that is down for some seconds fails it at
            once. One to which ranks did not come within its bound is not.
        on: the errors after which a step is repeated: types, or a function that is called with the
            error. None means those that backends and this library raise for a fault of
            communication.
        wait_for_ranks: how long a recovery waits for ranks that do not come, as for
            :func:`recover`; then the loop ends with the error that names them.

    Yields:
        The steps; ``with step`` gives the item. ``step.number`` counts from 0, ``step.attempt``
        from 1, on a process that has rejoined too; ``step.replaced`` are the ranks that have.

    Raises:
        PeerFailedError: another rank has raised what is not to be repeated; or the step has failed
            ``attempts`` times and not by an error of this rank.
        Exception: what this rank raised, if it is not repeated any more, or what
            :func:`recover` raises.
        InvalidOptionError: ``attempts`` or ``wait_for_ranks`` is not positive.
    """
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidOptionError(
            f"retrying(attempts={attempts!r}): not a positive number; nothing was begun."
        )
    rules = _Rules(attempts, on, seconds_of(wait_for_ranks))
    return _steps(iter(items), rules)


class _Rules(NamedTuple):
    """The arguments of :func:`retrying`; ``seconds`` is how long to wait for ranks."""

    attempts: int
    on: On | None
    seconds: float | None


def _steps(items: Iterator[T], rules: _Rules) -> Iterator[Step[T]]:
    job, loop, number = registry.job("retrying"), 0, 0
    if job is not None:
        loop, job.loops = job.loops, job.loops + 1
    while True:
        progress = _Progress(loop, number, rules)
        try:
            item = next(items)
        except StopIteration:
            _note(Position(loop + 1))
            return
        except Exception as error:  # as much this rank's own as one in the block
            progress.fail(error, repeats=False)
            raise
        while not progress.complete:
            step = Step(item, number, progress.failed + 1, progress, _replaced())
            yield step
            if not step.left:
                raise ReloadpgError(
                    "a step of retrying() was not used as a context manager, so nothing says how "
                    "it ended. Write `for step in reloadpg.retrying(...):` and, around all of the "
                    "body, `with step as item:`."
                )
        number += 1


class Step(Generic[T]):
    """One attempt at a step of :func:`retrying`; a context manager that gives the item.

    Attributes:
        value: the item.
        number: number of the step, from 0.
        attempt: number of this attempt, from 1.
        left: whether its block has ended.
        replaced: the ranks that were replaced since the last complete step, the same on all ranks:
            they have the state of a program that begins.
    """

    def __init__(
        self,
        value: T,
        number: int,
        attempt: int,
        progress: _Progress,
        replaced: tuple[int, ...] = (),
    ) -> None:
        self.value = value
        self.number = number
        self.attempt = attempt
        self.left = False
        self.replaced = replaced
        self._progress = progress

    def __enter__(self) -> T:
        return self.value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.left = True
        if error is not None and not isinstance(error, Exception):
            self._progress.tell(error)
            return False
        if error is None:
            try:
                self._progress.commit()
            except Exception as failed:
                self._progress.fail(failed)
            return False
        self._progress.fail(error)
        return True


class _Progress:
    """The attempts at one step on this rank.

    Attributes:
        complete: whether the step is complete on all ranks.
        failed: how many attempts have failed, on all ranks alike.
    """

    def __init__(self, loop: int, number: int, rules: _Rules) -> None:
        self.failed = 0
        self._loop = loop
        self._number = number
        self._attempts = rules.attempts
        self._rules = rules
        self._ended = False
        job = registry.job("retrying")
        # Of a process that has rejoined: complete before it came.
        self.complete = job is not None and (loop, number) < job.position[:2]
        if not self.complete:
            _note(Position(loop, number))

    def commit(self) -> None:
        """Wait until all ranks have finished the step. Collective, blocking, bounded."""
        devices.synchronize()  # a collective that fails on the device fails in this step
        job = registry.job("retrying")
        if job is not None:
            round_ = job.rendezvous.open("step", ["enter"], _seconds())
            try:
                round_.barrier("enter")
            finally:  # a rank that was interrupted takes no part in a recovery
                self._ended = round_.outcome is not None and round_.outcome.kind == "failed"
            job.replaced = ()
        self.complete = True

    def tell(self, error: BaseException) -> None:
        """Tell ranks that wait for this one that it was interrupted. Local, bounded."""
        job = registry.job("retrying")
        if job is not None:
            job.rendezvous.open("step", ["enter"], _seconds()).fail(error)

    def fail(self, error: Exception, *, repeats: bool | None = None) -> None:
        """Recover, and return if the step is to be repeated, or is complete on other ranks.

        Raises:
            Exception: ``error``, or what another rank has raised, if it is not.
        """
        if self._ended:
            raise error
        if repeats is None:
            repeats = self._is_fault(error)
        self.failed += 1
        report, furthest = self._recover(error, repeats)
        if furthest[:2] > (self._loop, self._number):
            self.complete = True
            return
        self.failed = furthest.attempt
        fatal = next((fault for fault in report.faults if not fault.repeats), None)
        if not repeats:
            raise error
        if fatal is not None:
            raise self._peer_failed([fatal]) from error
        if self.failed >= self._attempts:
            if isinstance(error, PeerFailedError):
                raise self._peer_failed(report.faults) from error
            raise error

    def _recover(self, error: Exception, repeats: bool) -> Meeting:
        """Recover, again if that fails: on all ranks alike, since it has failed on all of them."""
        _note(Position(self._loop, self._number, self.failed))
        pauses = iter(_PAUSES_S)
        while True:
            try:
                return meet(error, seconds=self._rules.seconds, repeats=repeats)
            except DisagreementError:  # raised on all ranks, now and in any further attempt
                raise
            except Exception as failed:
                pause = next(pauses, None)
                gone = isinstance(failed, RendezvousTimeoutError) and failed.missing
                if pause is None or gone:
                    raise
                logger.warning("step %d: recovering again in %g s: %s", self._number, pause, failed)
                time.sleep(pause)

    def _is_fault(self, error: Exception) -> bool:
        if isinstance(error, _OWN):
            return True
        on = self._rules.on
        if on is None:
            return c10d.is_communication_error(error)
        if isinstance(on, (type, tuple)):
            return isinstance(error, on)
        return on(error)

    def _peer_failed(self, faults: list[Fault] | tuple[Fault, ...]) -> PeerFailedError:
        causes = "; ".join(map(str, faults)) or "no rank said why"
        return PeerFailedError(
            f"step {self._number} failed in attempt {self.failed} of {self._attempts}: {causes}. "
            "All groups are live again; nothing of the step is to be relied on.",
            rank=faults[0].rank if faults else -1,
            phase="step",
        )


def _note(position: Position) -> None:
    """Note where this rank is, for recoveries; it never goes back."""
    job = registry.job("retrying")
    if job is not None:
        job.position = max(job.position, position)


def _replaced() -> tuple[int, ...]:
    job = registry.job("retrying")
    return () if job is None else job.replaced


def _seconds() -> float:
    """How long a rank may be in a step that others have finished: as long as in a collective."""
    options, world = registry.options, c10d.world()
    bound = options.timeout.total_seconds() if options is not None else 0.0
    return max(bound, longest_wait(world) if isinstance(world, ReloadableProcessGroup) else 0.0)
