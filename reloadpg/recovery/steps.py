"""Retrying: a loop that repeats a step on all ranks after a fault."""

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
from types import FrameType
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
from ..groups.proxy import managed
from ..groups.registry import registry
from ..lifecycle.connect import await_device, further_connections, late_connections
from ..lifecycle.job import Job, Position, jobs
from ..lifecycle.recreate import abort_communicator
from ..lifecycle.run import notify
from ..rendezvous.round import Round
from ..rendezvous.worker_thread import Task
from ..reports import RankFault, Report
from ..settings import as_integer
from ..texts import warn
from .recovering import longest_wait, meet, recovery_requested, seconds_of
from .snapshot import Snapshot

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
"""Errors of this library that mean that ranks are out of step. Its others are never repeated."""

_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between a failed recovery and the next one: a failed link may come back."""


_WATCH_S = 1.0
"""Seconds between two polls of the store, within a step, for a peer's request to recover."""


def retrying(
    items: Iterable[T],
    *,
    attempts: int = 3,
    on: On | None = None,
    timeout: timedelta | float | None = None,
    state: Any = None,
    replicas: Sequence[int] | None = None,
) -> Iterator[Step[T]]:
    """Iterate over the steps of a loop; repeat a step on all ranks after a fault.

    Each step is a context manager, whose block is repeated::

        for step in reloadpg.recovery.retrying(batches, state=(model, optimizer)):
            with step as batch:
                train(batch)

    Collective: all ranks iterate over the same number of items. At the end of its block, each rank
    waits for its device and then for the other ranks, so a step is complete on all ranks or on
    none. If a rank raises an error of ``on``, all ranks call :func:`recover` and repeat the step,
    even if they had finished it. Any other exception ends the loop on all ranks: the communicators
    are recreated, the exception propagates on its rank, and the other ranks raise
    ``PeerFailedError`` with its text. An interrupt (``KeyboardInterrupt``, ``SystemExit``) is
    reported and propagates immediately.

    A loop in the body of another loop, outside of its ``with`` block, has separate steps. If it
    begins within the block, its steps are parts of the outer step. Leave a loop only if
    ``step.complete`` is true: a rank that leaves it at a step to be repeated raises
    ``ReloadpgError`` at its next line, and the other ranks raise ``PeerFailedError``.

    A process that replaces one that has ended (:func:`rejoin`) begins with the step that the other
    ranks repeat. It fast-forwards past completed steps and loops.

    Args:
        items: one item per step; an item is kept until its step is complete.
        attempts: maximum number of attempts at a step. A failed recovery is called again, at most
            four times, after 1, 2, 4 and 8 s, since a link failure of some seconds makes it fail
            immediately. It is not called again after a timeout with missing ranks.
        on: the errors after which a step is repeated: types, or a function that is called with the
            error. None means the communication errors of the backends and of this library. A
            collective that fails because another rank has requested a recovery is always repeated.
        timeout: how long a recovery waits for missing ranks, as for :func:`recover`; then
            the loop ends with the error that names them.
        state: the objects that a step may change, one or several: modules (also DDP and FSDP2),
            optimizers, objects with ``state_dict`` and ``load_state_dict``, random generators,
            tensors, dicts and lists of them. It is copied at the beginning of each step, restored
            in place on all ranks after a fault, with the random generators of Python, NumPy, torch
            and the current device, and sent to replacement processes. With None, the caller
            restores its state if ``step.attempt`` is above 1.
        replicas: the ranks that hold the same ``state`` as this one, for replacement processes;
            None reads them from DDP's groups and the meshes of DTensors.

    Yields:
        The steps; ``with step`` returns the item. ``step.number`` counts from 0, ``step.attempt``
        from 1, also in a process that has rejoined; ``step.replaced`` are the replaced ranks;
        ``step.complete`` is whether the step is complete on all ranks.

    Warns of groups that have had no collective yet, if their backend could not be ended in the
    first one (NCCL; with torch's ``ProcessGroupNCCL`` not in a default group with a ``device_id``).

    Raises:
        PeerFailedError: another rank has raised an error that is not repeated; or the step failed
            ``attempts`` times, not by an error of this rank.
        Exception: the error of this rank, if it is not repeated (any more), or that of
            :func:`recover`.
        ReloadpgError: this rank has left the loop at a step that must be repeated; a step was
            entered twice, or in a step of another loop; or the state of a replaced process is lost.
        InvalidOptionError: ``attempts`` or ``timeout`` is not positive, ``on`` holds no
            exception types, ``replicas`` are not ranks of the job, or an object of ``state`` cannot
            be reset. Nothing was started.
    """
    tries = as_integer(attempts)
    if tries is None or tries < 1:
        raise InvalidOptionError(
            f"retrying(attempts={attempts!r}): not a positive number; nothing was started."
        )
    snapshot = None if state is None else Snapshot(state, replicas)
    rules = _Rules(tries, _read_on(on), seconds_of(timeout), snapshot)
    _warn_of_connections()
    return _steps(iter(items), rules)


def _warn_of_connections() -> None:
    """Warn of groups that a fault would leave connecting, without an end. Local."""
    text = late_connections(registry.managed())
    if text and "unused groups" not in registry.warned:
        registry.warned.add("unused groups")
        warn(
            f"retrying(): {text} Run a collective, such as an all-reduce, on each group before the "
            "loop."
        )
    text = further_connections(registry.managed())
    if text and "further connections" not in registry.warned:
        registry.warned.add("further connections")
        warn(
            f"retrying(): {text} Set TORCH_DIST_USE_NCCL2=0: torch's older NCCL engine can be "
            "aborted there.",
            of_host=True,
        )


def _read_on(on: On | None) -> _On | None:
    if on is None or (callable(on) and not isinstance(on, type)):
        return on
    types = tuple(on) if isinstance(on, Collection) and not isinstance(on, str) else (on,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in types):
        raise InvalidOptionError(
            f"retrying(on={on!r}): neither exception types nor a function; nothing was started. "
            "Pass one or several types, or a function that returns whether to repeat the step."
        )
    return types


class _Rules(NamedTuple):
    """The arguments of :func:`retrying`; ``seconds`` is ``timeout``."""

    attempts: int
    on: _On | None
    seconds: float | None
    state: Snapshot | None


@dataclass(eq=False)
class _Loop:
    """An open loop: the index of its outermost loop, and whether it is inside another one."""

    number: int
    nested: bool


@dataclass
class _Loops:
    """The loops of one job on this rank.

    Attributes:
        steps: number of completed steps, over all loops; equal on all ranks between two steps.
        begun: number of outermost loops that have begun.
        resumes: in a process that has rejoined, the other ranks' step; None once it is reached.
    """

    steps: int = 0
    begun: int = 0
    open: list[_Loop] = field(default_factory=list)
    step: Step[Any] | None = None
    resumes: Position | None = None

    @classmethod
    def of_job(cls) -> _Loops:
        job = jobs.current("retrying")
        if job is None:
            return _without_job
        if job.loops is None:
            job.loops = cls(resumes=job.position if job.position != Position() else None)
        loops: _Loops = job.loops
        return loops

    def begin(self) -> _Loop:
        nested = bool(self.open)
        loop = _Loop(self.open[0].number if nested else self.begun, nested)
        self.begun += not nested
        self.open.append(loop)
        return loop

    def is_passed(self, loop: _Loop) -> bool:
        """Whether the other ranks completed a loop before this process rejoined. Local."""
        if self.resumes is None:
            return False
        if self.resumes.nested:
            raise _cannot_be_replaced()
        return loop.number < self.resumes.loop

    def reached(self, loop: _Loop, number: int) -> bool:
        """Begin a step; False if the other ranks completed it before this process rejoined."""
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
        "loop. The new process cannot resume there, because the body does not run again. All "
        "groups are live, but the step's results are unreliable. Restore a checkpoint."
    )


def _steps(items: Iterator[T], rules: _Rules) -> Iterator[Step[T]]:
    loops = _Loops.of_job()
    if loops.step is not None:  # inside a step: its steps are parts of that step
        if rules.state is not None:
            raise InvalidOptionError(
                "retrying(state=...) was called in a step of another loop. A fault repeats the "
                "outer step. Nothing was started. Pass `state` to the outer loop."
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
                    f"this process replaces another one, but its items end at {number}, and the "
                    f"other ranks are at step {loops.resumes.number} of that loop. Nothing was "
                    "done. Pass the same items to retrying() in a restarted process."
                )
                progress.fail(error, repeats=False)
                raise error from None
            except Exception as error:  # handled like an error in the block
                progress.fail(error, repeats=False)
                raise
            except BaseException as error:
                progress.notify_interrupt(error)
                raise
            progress.complete = not loops.reached(loop, number)
            while not progress.complete:
                if not progress.run(progress.prepare):
                    continue
                step = Step(item, number, progress.failed + 1, progress, _replaced())
                try:
                    yield step
                except GeneratorExit:
                    progress.leave(sys._getframe().f_back)
                    raise
                if not step.left:
                    raise ReloadpgError(
                        "a step of retrying() was not used as a context manager, so its result is "
                        "unknown. Write `for step in reloadpg.recovery.retrying(...):`, and "
                        "put the whole body in `with step as item:`."
                    )
            number += 1
    finally:
        loops.open.remove(loop)
        if loops.resumes is None and not loops.open:
            _note(Position(loops.steps, loops.begun))


@dataclass(eq=False, repr=False)
class Step(Generic[T]):
    """One attempt at a step of :func:`retrying`; a context manager that returns the item.

    Attributes:
        number: number of the step, from 0.
        attempt: number of this attempt, from 1.
        left: whether its block has ended.
        complete: whether the step is complete on all ranks. Check it in code after the block, which
            also runs after a failed attempt.
        replaced: the ranks that were replaced since the last completed step, equal on all ranks.
            Their processes have the initial state of the program.
    """

    value: T
    number: int
    attempt: int
    _progress: _Progress | None = None
    replaced: tuple[int, ...] = ()
    left: bool = False
    complete: bool = False
    _block_ended: threading.Event = field(default_factory=threading.Event)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "ended" if self.left else "open"
        return f"<Step {self.number}, attempt {self.attempt}, {state}>"

    def __enter__(self) -> T:
        if self._progress is not None:
            self._refuse_second(self._progress.loops)
            self._progress.loops.step = self
            job = jobs.current("retrying")
            if job is not None and devices.runtime() is not None:
                Task(partial(_abort_on_request, job, self._block_ended), "step")
        return self.value

    def _refuse_second(self, loops: _Loops) -> None:
        """Refuse to enter a step whose block a fault could not repeat. Local."""
        if self.left:
            raise ReloadpgError(
                "a step of retrying() was entered a second time. The second block was not run, "
                "and the groups are live. Put the whole body in one `with step as item:`."
            )
        if loops.step is not None:
            raise ReloadpgError(
                "a step of retrying() was entered in a step of another loop. A fault could not "
                "repeat both. Its block was not run. End the other step first, or call retrying() "
                "within it, which makes the inner steps parts of that step."
            )

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> bool:
        self.left = True
        self._block_ended.set()
        progress = self._progress
        if progress is None:
            self.complete = error is None
            return False
        try:
            if error is not None and not isinstance(error, Exception):
                progress.notify_interrupt(error)
                return False
            if error is None:
                progress.run(progress.commit)
                return False
            progress.fail(error)
            return True
        finally:
            self.complete = progress.complete
            progress.loops.step = None


class _Progress:
    """The attempts at one step on this rank; ``failed`` counts them, equal on all ranks."""

    def __init__(self, loops: _Loops, loop: _Loop, number: int, rules: _Rules) -> None:
        self.loops = loops
        self.complete = False
        self.failed = 0
        self._loop = loop
        self._number = number
        self._rules = rules
        self._round: Round | None = None  # whose barrier this rank has not passed
        self._repeat_reason = ""  # why this rank must repeat the step; empty if it need not
        self._thread = threading.get_ident()

    def run(self, part: Callable[[], object]) -> bool:
        """Run a part of the step that is outside of its block. Collective.

        An error is handled like one in the block, and an interrupt is notified to the other ranks.
        Returns False if this attempt has failed on all ranks.
        """
        try:
            part()
        except Exception as error:
            self.fail(error)
            return False
        except BaseException as error:
            self.notify_interrupt(error)
            raise
        return True

    def prepare(self) -> None:
        """Restore the state from the beginning of the step, or take a snapshot. Collective."""
        snapshot, replaced = self._rules.state, _replaced()
        if snapshot is None:
            return
        new = bool(replaced) and dist.get_rank() in replaced
        if self.failed and not new:
            snapshot.restore()
        elif not new:
            snapshot.take()
        if replaced:
            snapshot.transfer(replaced)
        if new:
            snapshot.take()
        if replaced:  # a state that is lost ends the loop before any rank repeats the step
            self._barrier()

    def commit(self) -> None:
        """Wait until all ranks have finished the step. Collective, blocking, with a timeout."""
        # A collective that fails on the device belongs to this step.
        await_device(recovery_requested)
        job = jobs.current("retrying")
        if job is not None:
            self._barrier()
            job.replaced = ()
        self._complete()

    def _barrier(self) -> None:
        job = jobs.current("retrying")
        if job is None:
            return
        round_ = self._round = job.rendezvous.open("step", ["enter"], _seconds())
        round_.barrier("enter")
        self._round = None

    def notify_interrupt(self, error: BaseException) -> None:
        """Notify the waiting ranks of this rank's interrupt. Local; waits a limited time."""
        self._repeat_reason = ""
        job = jobs.current("retrying")
        if job is not None:
            round_ = self._round or job.rendezvous.open("step", ["enter"], _seconds())
            notify(round_, error, cancels=True)

    def leave(self, frame: FrameType | None) -> None:
        """Handle the exit from the loop: an error on all ranks if the step must be repeated.

        A generator that is closed cannot raise in the function that leaves the loop, so the error
        is raised at that function's next line.
        """
        if not self._repeat_reason or threading.get_ident() != self._thread or sys.is_finalizing():
            return
        error: Exception = ReloadpgError(
            f"the loop of retrying() was left (break, return or an error) at step {self._number}, "
            f"which must be repeated: {self._repeat_reason}. All groups are live, but the results "
            "of the step are unreliable. Leave the loop only if `step.complete` is true after it."
        )
        try:
            self.fail(error, repeats=False)
        except Exception as raised:
            error = raised
        if frame is not None:
            _raise_in(frame, error)

    def fail(self, error: Exception, *, repeats: bool | None = None) -> None:
        """Recover. Return if the step must be repeated, or is complete elsewhere; else raise."""
        self._repeat_reason = ""
        self._round = None
        if _says_interrupted(error):  # that rank takes no part in a recovery
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
        if self.failed >= self._rules.attempts:
            if isinstance(error, PeerFailedError):
                raise self._peer_failed(faults) from error
            raise error
        self._repeat_reason = "; ".join(map(str, faults)) or f"{type(error).__name__}: {error}"
        if self._rules.state is None:
            c10d.refuse_unfinished()

    def _complete(self) -> None:
        self.complete = True
        self.loops.steps += 1

    def _recover(self, error: Exception, repeats: bool) -> tuple[Report, Position] | None:
        """Recover; try again if that fails. A recovery fails on all ranks or on none."""
        loop = self._loop
        _note(Position(self.loops.steps, loop.number, self.failed, self._number, loop.nested))
        if jobs.current("retrying") is None:
            return None
        pauses = iter(_PAUSES_S)
        while True:
            try:
                return meet(error, seconds=self._rules.seconds, repeats=repeats)
            except DisagreementError:  # further attempts would raise it, too
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
        on = self._rules.on
        if isinstance(error, ReloadpgError):
            repeats = isinstance(error, _OWN)
        elif isinstance(on, tuple):
            repeats = isinstance(error, on)
        else:
            repeats = on(error) if on is not None else c10d.is_communication_error(error)
        return repeats or self._follows(error)

    @staticmethod
    def _follows(error: BaseException) -> bool:
        """Whether a collective failed because a peer requested a recovery. Local; may wait."""
        job = jobs.current("retrying")
        if job is None or not job.rendezvous.recovery_requested(0.0):
            return False
        errors: list[BaseException] = [error]
        for cause in errors:
            if c10d.is_communication_error(cause) or isinstance(cause, GroupOffloadedError):
                return True
            errors += [e for e in (cause.__cause__, cause.__context__) if e and e not in errors]
        return False

    def _peer_failed(self, faults: Sequence[RankFault]) -> PeerFailedError:
        causes = "; ".join(map(str, faults)).rstrip(".") or "no rank reported a reason"
        return PeerFailedError(
            f"step {self._number} failed in attempt {self.failed} of {self._rules.attempts}: "
            f"{causes}. All groups are live again, but the step's results are unreliable.",
            rank=faults[0].rank if faults else -1,
            phase="step",
        )


def _says_interrupted(error: Exception) -> bool:
    """Whether another rank was interrupted in the step, according to an error of an operation."""
    job = jobs.current("retrying")
    if job is None or not isinstance(error, PeerFailedError) or error.phase != "step":
        return False
    noted = job.rendezvous.state.noted
    return noted.kind == "cancelled" and noted.rank == error.rank


def _abort_on_request(job: Job, block_ended: threading.Event) -> None:
    """Abort this rank's communicators if a peer requests a recovery during a step. Blocking.

    A collective whose peer has aborted stays on the device until its own timeout, and a program
    that waits for the device, as in ``loss.item()``, waits as long.
    """
    every = max(_WATCH_S, job.rendezvous.pause_s)
    while not block_ended.wait(every):
        # Listed before the poll, so that groups rebuilt by a recovery are never aborted.
        communicators = [group.communicator for group in registry.managed()]
        if job.rendezvous.recovery_requested(every / 2) and not block_ended.is_set():
            for communicator in filter(None, communicators):
                Task(partial(abort_communicator, communicator), "abort")
            return


def _raise_in(frame: FrameType, error: Exception) -> None:
    """Raise an error in a running function, at its next line or when it returns.

    Uses a trace function, like debuggers. Raises nothing if the function ends with an error.
    """
    before, before_here = sys.gettrace(), frame.f_trace

    def trace(current: FrameType, event: str, _: object) -> Any:
        if current is not frame:
            return None
        if event == "exception":  # handled there, and a line follows; or it ends the function
            return trace
        sys.settrace(before)
        frame.f_trace = before_here
        # A function that ends with an error has a return event, too: its last instruction tells,
        # and an error that is raised here would replace its error.
        operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "line" or operation.startswith("RETURN"):
            raise error
        return None

    frame.f_trace = trace  # for a frame that runs already; without the next line it has no effect
    sys.settrace(trace)


def _note(position: Position) -> None:
    """Record this rank's position for recoveries; it never decreases."""
    job = jobs.current("retrying")
    if job is not None:
        job.position = max(job.position, position)


def _replaced() -> tuple[int, ...]:
    job = jobs.current("retrying")
    return () if job is None else job.replaced


def _seconds() -> float:
    """Timeout of a rank in a step that others have finished: the timeout of a collective."""
    options, world = registry.options, c10d.world()
    bound = options.timeout.total_seconds() if options is not None else 0.0
    group = managed(world)
    return max(bound, 0.0 if group is None else longest_wait(group))
