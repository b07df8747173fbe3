"""Retrying: a loop that repeats its steps, on all ranks, after a fault."""

from __future__ import annotations

import dis
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist

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
from ..groups.registry import Job, Position, registry
from ..rendezvous.worker_thread import Task
from .connect import await_device
from .recover import Meeting, fault_pending, longest_wait, meet, seconds_of
from .report import Fault
from .snapshot import Snapshot

__all__ = ["Step", "retrying"]

logger = logging.getLogger("reloadpg")

T = TypeVar("T")

On = type[Exception] | Collection[type[Exception]] | Callable[[Exception], bool]
_On = tuple[type[Exception], ...] | Callable[[Exception], bool]

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


_WATCH_S = 1.0
"""Seconds between two requests to the store for a peer's call to recover, within a step."""


def retrying(
    items: Iterable[T],
    *,
    attempts: int = 3,
    on: On | None = None,
    wait_for_ranks: timedelta | float | None = None,
    state: Any = None,
    replicas: Sequence[int] | None = None,
) -> Iterator[Step[T]]:
    """Iterate over the steps of a loop, each of which is repeated on all ranks after a fault.

    Each step is a context manager; its block is repeated::

        for step in reloadpg.retrying(batches, state=(model, optimizer)):
            with step as batch:
                train(batch)

    Collective: all ranks iterate over as many items. At the end of its block each rank waits for
    its device, and then for the others: a step is complete on all ranks or on none. If a rank
    raises an error of ``on``, all ranks call :func:`recover` and repeat the step, those too that
    had finished it. Any other exception ends the loop on all ranks: the communicators are
    recreated, it goes on where it was raised, and the other ranks raise ``PeerFailedError`` with
    its text. An interrupt (``KeyboardInterrupt``, ``SystemExit``) is reported and goes on at once.

    A loop in the body of another loop, outside of its ``with`` block, has separate steps. Within
    the block its steps are parts of the outer step. A rank that leaves a loop at a step that is to
    be repeated raises ``ReloadpgError`` at its next line, and the others ``PeerFailedError``: leave
    it only where ``step.complete`` is true.

    A process that replaces one that has ended (:func:`rejoin`) begins with the step that the others
    repeat: it draws the items before it and drops them, and passes over loops that the others have
    completed without drawing any.

    Args:
        items: one item a step; an item is kept until its step is complete.
        attempts: how often a step is begun. A recovery that fails itself is called again, four
            times at most, after 1, 2, 4 and 8 s: a link that is down for some seconds fails it at
            once. One to which ranks did not come within its timeout is not.
        on: the errors after which a step is repeated: types, or a function that is called with the
            error. None means those that backends and this library raise for a fault of
            communication. A collective that fails since another rank has called to recover is
            repeated in any case.
        wait_for_ranks: how long a recovery waits for ranks that do not come, as for
            :func:`recover`; then the loop ends with the error that names them.
        state: the objects that a step may change, one or several: modules (also DDP and FSDP2),
            optimizers, objects with ``state_dict`` and ``load_state_dict``, random generators,
            tensors, dicts and lists of them. It is copied at the beginning of each step, restored
            in place on all ranks after a fault, with the random generators of Python, NumPy, torch
            and the current device, and sent to replaced processes. With None the caller restores
            its state where ``step.attempt`` is above 1.
        replicas: the ranks that hold the same ``state`` as this one, for replaced processes; None
            asks DDP's groups and the meshes of DTensors.

    Yields:
        The steps; ``with step`` gives the item. ``step.number`` counts from 0, ``step.attempt``
        from 1, on a process that has rejoined too; ``step.replaced`` are the ranks that have;
        ``step.complete`` is whether the step is complete, on all ranks.

    Raises:
        PeerFailedError: another rank has raised an error that is not repeated; or the step failed
            ``attempts`` times and not by an error of this rank.
        Exception: the error of this rank, if it is not repeated (any more), or that of
            :func:`recover`.
        ReloadpgError: this rank has left the loop at a step that was to be repeated; or the state
            of a replaced process is lost.
        InvalidOptionError: ``attempts`` or ``wait_for_ranks`` is not positive, ``on`` holds no
            types of exceptions, or an object of ``state`` cannot be reset. Nothing was begun.
    """
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidOptionError(
            f"retrying(attempts={attempts!r}): not a positive number; nothing was begun."
        )
    snapshot = None if state is None else Snapshot(state, replicas)
    rules = _Rules(attempts, _read_on(on), seconds_of(wait_for_ranks), snapshot)
    return _steps(iter(items), rules)


def _read_on(on: On | None) -> _On | None:
    """Read the argument ``on``. Raises InvalidOptionError."""
    if on is None or (callable(on) and not isinstance(on, type)):
        return on
    types = tuple(on) if isinstance(on, Collection) and not isinstance(on, str) else (on,)
    if not all(isinstance(one, type) and issubclass(one, Exception) for one in types):
        raise InvalidOptionError(
            f"retrying(on={on!r}): neither exception types nor a function; nothing was begun. Pass "
            "a type, several, or a function that says of an error whether the step is repeated."
        )
    return types


class _Rules(NamedTuple):
    """The arguments of :func:`retrying`; ``seconds`` is how long to wait for ranks."""

    attempts: int
    on: _On | None
    seconds: float | None
    state: Snapshot | None


@dataclass(eq=False)
class _Loop:
    """One loop that is open.

    Attributes:
        number: its number among those in no other loop; of one in another loop, that one's.
        nested: whether another loop was open when it began.
    """

    number: int
    nested: bool


@dataclass
class _Loops:
    """The loops of one job on this rank.

    Attributes:
        steps: number of complete steps, of all loops: equal on all ranks between two steps.
        begun: number of loops that have begun in no other loop.
        open: the loops that have begun and not ended.
        step: the step whose block this rank is in.
        resumes: in a process that has rejoined, the step at which the others are; None from there.
    """

    steps: int = 0
    begun: int = 0
    open: list[_Loop] = field(default_factory=list)
    step: Step[Any] | None = None
    resumes: Position | None = None

    @classmethod
    def of_job(cls) -> _Loops:
        job = registry.job("retrying")
        if job is None:
            return _without_job
        if job.loops is None:
            job.loops = cls(resumes=job.position if job.position != Position() else None)
        found: _Loops = job.loops
        return found

    def begin(self) -> _Loop:
        nested = bool(self.open)
        loop = _Loop(self.open[0].number if nested else self.begun, nested)
        self.begun += not nested
        self.open.append(loop)
        return loop

    def is_passed(self, loop: _Loop) -> bool:
        """Whether the other ranks have completed a loop before this process came. Local."""
        if self.resumes is None:
            return False
        if self.resumes.nested:
            raise _cannot_be_replaced()
        return loop.number < self.resumes.loop

    def reached(self, loop: _Loop, number: int) -> bool:
        """Note that a step begins; False if the others completed it before this process came."""
        if self.resumes is not None:
            if number < self.resumes.number:
                return False
            self.steps, self.resumes = self.resumes.steps, None
        _note(Position(self.steps, loop.number, 0, number, loop.nested))
        return True


_without_job = _Loops()
"""The loops of a process that has no job."""


def _cannot_be_replaced() -> ReloadpgError:
    return ReloadpgError(
        "a process was replaced while the job was in a loop of retrying() in the body of another "
        "loop, and the new process cannot get there: the body is not run again. All groups are "
        "live; nothing of the step is to be relied on. Go back to a checkpoint."
    )


def _steps(items: Iterator[T], rules: _Rules) -> Iterator[Step[T]]:
    loops = _Loops.of_job()
    if loops.step is not None:  # in a step: its own are parts of that one
        if rules.state is not None:
            raise InvalidOptionError(
                "retrying(state=...) was called in a step of another loop, whose state it is part "
                "of: a fault repeats that step. Nothing was begun. Pass it to the other loop."
            )
        for number, item in enumerate(items):
            yield Step(item, number, loops.step.attempt)
        return
    loop, number = loops.begin(), 0
    try:
        while not loops.is_passed(loop):
            progress = _Progress(loops, loop, number, rules)
            try:
                item = next(items)
            except StopIteration:
                if loops.resumes is None:
                    return
                error = ReloadpgError(
                    f"this process replaces another one, and its items end at {number}: the other "
                    f"ranks are at step {loops.resumes.number} of that loop. Nothing was done. "
                    "Give retrying() the same items in a process that is started again."
                )
                progress.fail(error, repeats=False)
                raise error from None
            except Exception as error:  # as much this rank's own as one in the block
                progress.fail(error, repeats=False)
                raise
            progress.complete = not loops.reached(loop, number)
            while not progress.complete:
                if not progress.prepare():
                    continue
                step = Step(item, number, progress.failed + 1, progress, _replaced())
                try:
                    yield step
                except GeneratorExit:
                    progress.leave(sys._getframe().f_back)
                    raise
                if not step.left:
                    raise ReloadpgError(
                        "a step of retrying() was not used as a context manager, so nothing says "
                        "how it ended. Write `for step in reloadpg.retrying(...):` and, around all "
                        "of the body, `with step as item:`."
                    )
            number += 1
    finally:
        loops.open.remove(loop)
        if loops.resumes is None and not loops.open:
            _note(Position(loops.steps, loops.begun))


class Step(Generic[T]):
    """One attempt at a step of :func:`retrying`; a context manager that gives the item.

    Attributes:
        value: the item.
        number: number of the step, from 0.
        attempt: number of this attempt, from 1.
        left: whether its block has ended.
        complete: whether the step is complete, on all ranks. Code that stands after the block runs
            after a failed attempt too, and asks this.
        replaced: the ranks that were replaced since the last complete step, the same on all ranks:
            they have the state of a program that begins.
    """

    def __init__(
        self,
        value: T,
        number: int,
        attempt: int,
        progress: _Progress | None = None,
        replaced: tuple[int, ...] = (),
    ) -> None:
        self.value = value
        self.number = number
        self.attempt = attempt
        self.left = False
        self.complete = False
        self.replaced = replaced
        self._progress = progress
        self._block_ended = threading.Event()

    def __enter__(self) -> T:
        if self._progress is not None:
            self._progress.loops.step = self
            job = registry.job("retrying")
            if job is not None and devices.runtime() is not None:
                Task(partial(_abort_if_called, job, self._block_ended), "step")
        return self.value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.left = True
        self._block_ended.set()
        progress = self._progress
        if progress is None:
            self.complete = error is None
            return False
        try:
            if error is not None and not isinstance(error, Exception):
                progress.tell(error)
                return False
            if error is None:
                try:
                    progress.commit()
                except Exception as failed:
                    progress.fail(failed)
                return False
            progress.fail(error)
            return True
        finally:
            self.complete = progress.complete
            progress.loops.step = None


class _Progress:
    """The attempts at one step on this rank.

    Attributes:
        loops: the loops of the job.
        complete: whether the step is complete on all ranks.
        failed: how many attempts have failed, on all ranks alike.
    """

    def __init__(self, loops: _Loops, loop: _Loop, number: int, rules: _Rules) -> None:
        self.loops = loops
        self.complete = False
        self.failed = 0
        self._loop = loop
        self._number = number
        self._attempts = rules.attempts
        self._rules = rules
        self._ended = False
        self._owed = ""  # why this rank has to repeat the step
        self._thread = threading.get_ident()

    def prepare(self) -> bool:
        """Restore the state of the beginning of the step, or take it. Collective.

        Returns:
            Whether that succeeded; if not, this attempt has failed on all ranks.
        """
        snapshot, replaced = self._rules.state, _replaced()
        if snapshot is None:
            return True
        try:
            new = bool(replaced) and dist.get_rank() in replaced
            if self.failed and not new:
                snapshot.restore()
            elif not new:
                snapshot.take()
            if replaced:
                snapshot.hand_over(replaced)
            if new:
                snapshot.take()
            if replaced:  # a state that is lost ends the loop before any rank repeats the step
                self._barrier()
        except Exception as error:
            self.fail(error)
            return False
        return True

    def commit(self) -> None:
        """Wait until all ranks have finished the step. Collective, blocking, bounded."""
        await_device(fault_pending)  # a collective that fails on the device fails in this step
        job = registry.job("retrying")
        if job is not None:
            self._barrier()
            job.replaced = ()
        self._complete()

    def _barrier(self) -> None:
        """Wait for the other ranks on the store. Collective, blocking, bounded."""
        job = registry.job("retrying")
        if job is None:
            return
        round_ = job.rendezvous.open("step", ["enter"], _seconds())
        try:
            round_.barrier("enter")
        finally:  # a rank that was interrupted takes no part in a recovery
            self._ended = round_.decision is not None and round_.decision.kind == "cancelled"

    def tell(self, error: BaseException) -> None:
        """Notify the ranks that wait for this one of its interrupt. Local, bounded."""
        self._owed = ""
        job = registry.job("retrying")
        if job is not None:
            job.rendezvous.open("step", ["enter"], _seconds()).fail(error, cancels=True)

    def leave(self, frame: FrameType | None) -> None:
        """Note that the loop is left: an error on all ranks if this one was to repeat the step.

        Collective then, blocking, bounded. The loop is left by a function that no error can be
        raised in from here, so it is raised at that function's next line.

        Args:
            frame: of the function that leaves the loop.
        """
        if not self._owed or threading.get_ident() != self._thread or sys.is_finalizing():
            return
        error: Exception = ReloadpgError(
            f"the loop of retrying() was left (break, return or an error) at step {self._number}, "
            f"which is to be repeated: {self._owed}. All groups are live; nothing of the step is "
            "to be relied on. Leave the loop only if `step.complete` is true after the block."
        )
        try:
            self.fail(error, repeats=False)
        except Exception as raised:
            error = raised
        if frame is not None:
            _raise_in(frame, error)

    def fail(self, error: Exception, *, repeats: bool | None = None) -> None:
        """Recover, and return if the step is to be repeated, or is complete on other ranks.

        Raises:
            Exception: ``error``, or that of another rank, if the step is not repeated.
        """
        self._owed = ""
        if self._ended:
            raise error
        if registry.options is None:
            logger.warning("a step of retrying() is not repeated: reloadpg is not installed")
            raise error
        if repeats is None:
            repeats = self._is_fault(error)
        self.failed += 1
        met = self._recover(error, repeats)
        if met is not None:
            report, furthest = met
            if furthest.steps > self.loops.steps:
                self._complete()
                return
            self.failed = furthest.attempt
            if report.replaced and furthest.nested:
                raise _cannot_be_replaced() from error
        faults = report.faults if met is not None else ()
        fatal = next((fault for fault in faults if not fault.repeats), None)
        if not repeats:
            raise error
        if fatal is not None:
            raise self._peer_failed([fatal]) from error
        if self.failed >= self._attempts:
            if isinstance(error, PeerFailedError):
                raise self._peer_failed(faults) from error
            raise error
        self._owed = "; ".join(map(str, faults)) or f"{type(error).__name__}: {error}"
        if self._rules.state is None:
            c10d.refuse_unfinished()

    def _complete(self) -> None:
        self.complete = True
        self.loops.steps += 1

    def _recover(self, error: Exception, repeats: bool) -> Meeting | None:
        """Recover, again if that fails: on all ranks alike, since it has failed on all of them.

        Returns:
            What came of it; None without a job.
        """
        loop = self._loop
        _note(Position(self.loops.steps, loop.number, self.failed, self._number, loop.nested))
        if registry.job("retrying") is None:
            return None
        pauses = iter(_PAUSES_S)
        while True:
            try:
                return meet(error, seconds=self._rules.seconds, repeats=repeats)
            except DisagreementError:  # raised on all ranks, now and in any further attempt
                raise
            except Exception as failed:
                pause = next(pauses, None)
                gone = isinstance(failed, RendezvousTimeoutError) and failed.missing
                interrupted = isinstance(failed, PeerFailedError) and failed.phase == "step"
                if pause is None or gone or interrupted:
                    raise
                logger.warning("step %d: recovering again in %g s: %s", self._number, pause, failed)
                time.sleep(pause)

    def _is_fault(self, error: Exception) -> bool:
        if isinstance(error, _OWN):
            return True
        on = self._rules.on
        if isinstance(on, tuple):
            found = isinstance(error, on)
        else:
            found = on(error) if on is not None else c10d.is_communication_error(error)
        return found or self._follows(error)

    @staticmethod
    def _follows(error: BaseException) -> bool:
        """Whether a collective has failed since a peer has called to recover. Local, bounded."""
        job = registry.job("retrying")
        if job is None or not job.rendezvous.called(0.0):
            return False
        found: list[BaseException] = [error]
        for one in found:
            if c10d.is_communication_error(one) or isinstance(one, GroupOffloadedError):
                return True
            found += [e for e in (one.__cause__, one.__context__) if e and e not in found]
        return False

    def _peer_failed(self, faults: Sequence[Fault]) -> PeerFailedError:
        causes = "; ".join(map(str, faults)).rstrip(".") or "no rank said why"
        return PeerFailedError(
            f"step {self._number} failed in attempt {self.failed} of {self._attempts}: {causes}. "
            "All groups are live again; nothing of the step is to be relied on.",
            rank=faults[0].rank if faults else -1,
            phase="step",
        )


def _abort_if_called(job: Job, block_ended: threading.Event) -> None:
    """Abort this rank's communicators if a peer calls to recover during a step. Blocking.

    A collective whose peer has aborted stays on the device until its own timeout, and a program
    that waits for the device, as in ``loss.item()``, waits as long. The step fails in any case: the
    peer does not come to its end.
    """
    every = max(_WATCH_S, job.rendezvous.pause_s)
    while not block_ended.wait(every):
        # Before the request: never those that a recovery has built since.
        communicators = [group.communicator for group in registry.managed()]
        if job.rendezvous.called(every / 2) and not block_ended.is_set():
            for one in filter(None, communicators):
                Task(one.abort, "abort")
            return


def _raise_in(frame: FrameType, error: Exception) -> None:
    """Raise an error in a function that is running, at its next line or as it returns. Local.

    As debuggers do: a generator that is closed cannot raise in the function that closes it.
    Nothing is raised if the function itself ends by an error.
    """
    before, before_here = sys.gettrace(), frame.f_trace

    def trace(current: FrameType, event: str, _: object) -> Any:
        if current is not frame:
            return None
        if event == "exception":
            return trace
        sys.settrace(before)
        frame.f_trace = before_here
        operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "line" or operation.startswith("RETURN"):
            raise error
        return None

    frame.f_trace = trace
    sys.settrace(trace)


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
