"""One operation on one rank: its barriers on the store, and its work between them.

A :class:`Rendezvous` opens the operations of a job, one after the other; a :class:`Round` is one of
them, with its remaining barriers in order.

The timeout limits waiting, not work. A rank that has released or rebuilt a group increments a
counter on the store, and every rank that sees a change restarts its timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from torch.distributed import Store

from ..errors import PeerFailedError, ReloadpgError, RendezvousTimeoutError
from ..settings import GRACE
from .decision import Decision
from .plan import Plan, Proposal
from .protocol import ENTER, Arrive, Close, Decide, Fail, Next, Poll, Recover, State
from .session import NOTIFY_S, Session, run_hooks, text_of
from .store_client import read
from .worker_thread import Attempt, Task, Wait, wait_seconds

T = TypeVar("T")

_NEXT_S = 1.0
"""Seconds in which a late rank checks whether the others have begun the next operation."""

_REQUEST_S = 10.0
"""Seconds in which a rank tries to request a recovery."""


class Round:
    """One operation on this rank: its remaining barriers, in order.

    Attributes:
        operation: its name, for messages.
        sequence: number of the operation, equal on all ranks.
        seconds: the timeout of each wait.
        unfinished: abandoned tasks that were still running, with the numbers of their threads.
        decision: the decision that ended the operation early; None before that.
        since: Unix time at which this rank arrived at the next barrier, or began its work before
            it.
        notified: set when the other ranks were notified of this rank's failure, or cannot be.
    """

    def __init__(self, rendezvous: Rendezvous, operation: str, seconds: float) -> None:
        self._rendezvous = rendezvous
        self._epoch = rendezvous.state.epoch
        self._ended = False
        self._advanced = 0
        self.operation = operation
        self.sequence = rendezvous.state.sequence
        self.seconds = seconds
        self.unfinished: list[tuple[int, Task[object]]] = []
        self._work: tuple[Attempt, list[Task[object]]] | None = None
        self.decision: Decision | None = None
        self.since = time.time()
        self.notified = threading.Event()

    @property
    def _state(self) -> State:
        return self._rendezvous.state

    @property
    def label(self) -> str:
        """A label that is unique among the rounds on this store, over all jobs."""
        return f"{self._state.instance}.{self._epoch}.{self.sequence}"

    @property
    def phase(self) -> str:
        """The next barrier; empty after the last."""
        return (self._state.phases or ("",))[0]

    @property
    def waiting(self) -> bool:
        """Whether this rank waits at the next barrier for others. Local."""
        return not self._ended and self._state.arrived

    @property
    def supposed_end(self) -> str | None:
        """The phase at which the operation ends for a rank that has lost the store."""
        return self._state.supposed_end

    # -- barriers ---------------------------------------------------------------------------

    def agree(
        self,
        phase: str,
        plan: Plan,
        proposals: Sequence[Proposal] = (),
        subjects: Sequence[str] = (),
        *,
        extends: bool = False,
    ) -> dict[str, str]:
        """Reach a barrier at which all plans must be equal. Collective, blocking, with a timeout.

        Args:
            phase: the barrier.
            plan: this rank's plan.
            proposals: this rank's proposals.
            subjects: the subjects whose proposals this rank needs.
            extends: whether this rank requests the optional barriers.

        Returns:
            The proposals on these subjects, if any.

        Raises:
            DisagreementError: on all ranks; nothing was changed.
            RendezvousTimeoutError, PeerFailedError: see :meth:`barrier`.
        """
        rendezvous = self._rendezvous
        share = 0 if rendezvous.alone else plan.contribution(rendezvous.rank, rendezvous.size)
        arrival = Arrive(plan.to_json(), share, tuple(proposals), extends)
        barrier = self._state
        if barrier.strayed and self._can_align(phase):
            self._align(barrier)
        while True:
            try:
                decision = self.barrier(phase, arrival)
                break
            except (RendezvousTimeoutError, PeerFailedError):
                if not self._catch_up(barrier):
                    raise
        if not decision.proposed or not subjects:
            return {}

        def look_up(store: Store) -> dict[str, str]:
            stem = f"{self._epoch}.{self.sequence}/{phase}/proposal"
            texts = {subject: read(store, f"{stem}/{subject}") for subject in subjects}
            return {subject: text for subject, text in texts.items() if text is not None}

        return rendezvous.ask(look_up, Wait(self.operation, self.seconds, phase))

    def disagree(self, phase: str, text: str) -> NoReturn:
        """End the operation at a barrier at which this process cannot be counted. Local.

        Waits a limited time for the other ranks, which raise the same error unless they have passed
        the barrier.

        Raises:
            DisagreementError: with this text.
        """
        rank, size = self._rendezvous.rank, self._rendezvous.size
        decision = Decision("disagree", rank, text)
        self._decide(decision, phase, "")
        raise decision.error(self.operation, phase, seconds=self.seconds, rank=rank, size=size)

    def barrier(self, phase: str, arrival: Arrive = Arrive()) -> Decision:  # noqa: B008 - immutable
        """Wait until all ranks arrive. Collective, blocking, with a timeout.

        Raises:
            RendezvousTimeoutError: a rank is missing, and no rank made progress for the timeout.
            PeerFailedError: a rank failed before it arrived.
        """
        if not self._is_current or self.phase != phase:
            raise ReloadpgError(f"barrier {phase!r} is not the next of {self._state.phases}")
        wait = Wait(self.operation, self.seconds, phase)
        self.since = time.time()
        run_hooks("before", self.operation, phase, self._rendezvous.rank)
        self._rendezvous.drive(arrival, wait)
        passed = self._conclude(phase)
        wait.log_end()
        return passed

    def run(
        self,
        phase: str,
        work: Callable[[Attempt, int], object],
        doing: Callable[[], str],
        threads: int = 1,
    ) -> None:
        """Do this rank's work before a barrier, while polling for failures of other ranks.

        Args:
            phase: the barrier after the work.
            work: called in each thread with the thread's number; abandoned if this method raises.
                It calls :meth:`advance` after progress.
            doing: returns the current step of the work, for messages.
            threads: number of threads.

        Raises:
            PeerFailedError: another rank failed during the work.
            RendezvousTimeoutError: neither the work nor any other rank made progress for the
                timeout.
        """
        rendezvous, wait = self._rendezvous, Wait(self.operation, self.seconds, phase)
        attempt = Attempt()
        tasks: list[Task[object]] = []
        self._work = attempt, tasks  # before the first thread starts, where interrupts can occur
        done = False
        try:
            for index in range(threads):
                tasks.append(Task(partial(work, attempt, index), self.operation))
            # Most work ends immediately, without a request to the store.
            pause, seen, reported = min(0.2, self.seconds), self._advanced, self._advanced
            while True:
                # The process may have been stopped in this pause: that time does not count.
                with wait.pause(pause) as seconds:
                    done = _all_ended(tasks, seconds)
                if done:
                    return
                pause = rendezvous.pause_s
                if self._advanced != seen:
                    seen = self._advanced
                    wait.extend()
                if rendezvous.peers.dead():  # the work may wait for them until a long timeout
                    self._decide(rendezvous.death(), phase, doing())
                if not rendezvous.alone:
                    rendezvous.drive(Poll(seen - reported), wait)
                    reported = seen
                    # A new epoch for an operation ends no work: `agree` joins it at the barrier.
                    if self._state.decision.kind and not self._state.decision.aligns:
                        self._conclude(phase, doing())
                wait.log(doing)
                # Progress since the last look restarts the timeout in the next pass.
                if wait.left == 0 and self._advanced == seen:
                    self._decide(Decision("timeout", rendezvous.rank), phase, doing())
        finally:
            if done:
                self._work = None
            self._abandon()  # after an error of a thread, of a peer, or of a signal handler

    def _abandon(self) -> None:
        """Abandon the work, if it has not ended. Idempotent; an interrupt may end it anywhere."""
        if self._work is not None:
            attempt, tasks = self._work
            attempt.abandon()
            # No thread changes a group from here on: a result is committed within the attempt.
            running = [(index, task) for index, task in enumerate(tasks) if not task.ended]
            self.unfinished += [entry for entry in running if entry not in self.unfinished]
            self._work = None

    def advance(self) -> None:
        """Count progress of this rank. Local, from any thread."""
        self._advanced += 1

    # -- failures ---------------------------------------------------------------------------

    def fail(self, error: BaseException, *, cancels: bool = False) -> str | None:
        """Notify the other ranks that this one has failed. Local; waits a limited time.

        It waits until they have read it, except after an interrupt. The ranks that did not respond
        are appended to a :class:`ReloadpgError`.

        Args:
            error: the cause.
            cancels: whether this rank will not take part in the next recovery.

        Returns:
            The phase at which the operation ended on all ranks. It may be later than the phase of
            this rank, if all ranks had just arrived at its barrier. None if all ranks have passed
            the last barrier: the operation is then complete in spite of the error.
        """
        run_hooks("failing", self.operation, self.phase, self._rendezvous.rank)
        try:
            self._abandon()  # a second interrupt may have prevented it
            open_ = self._is_current and (self.phase or cancels)
            if open_ and not (self._ended or self._state.lost):
                self._notify(error, "cancelled" if cancels else "failed")
            self._ended = True  # an interrupt before this line lets the caller try again
            return self.supposed_end
        finally:
            self.notified.set()

    def _notify(self, error: BaseException, kind: str) -> None:
        rank, dead = self._rendezvous.rank, self._rendezvous.peers.dead()
        event = Fail(Decision(kind, rank, text_of(error), dead=dead))
        try:
            seconds = max(NOTIFY_S, self._rendezvous.grace_s)
            self._rendezvous.drive(event, Wait(self.operation, seconds, self.phase))
            # The groups are aborted next, and a rank that still connects to them would raise that
            # instead of this error. An interrupt does not wait.
            self._close("", waits=isinstance(error, Exception))
        except ReloadpgError as lost:
            _append(error, f"\nThe other ranks could not be notified: {lost}")
            return
        decision = self._state.decision
        if decision.kind:
            self.decision = decision
            _append(error, decision.earlier_failure(rank) + decision.silence(rank))

    # -- one barrier ------------------------------------------------------------------------

    @property
    def _is_current(self) -> bool:
        state = self._state
        return (state.epoch, state.sequence) == (self._epoch, self.sequence)

    def _decide(self, decision: Decision, phase: str, doing: str) -> None:
        # A separate deadline: that of the work may have passed. The first decision written counts.
        self._rendezvous.drive(Decide(decision), Wait(self.operation, wait_seconds(GRACE), phase))
        self._conclude(phase, doing)

    def _conclude(self, phase: str, doing: str = "") -> Decision:
        """Continue to the next barrier, or raise the error of the decision."""
        run_hooks("after", self.operation, phase, self._rendezvous.rank)
        self._close(doing, waits=True)
        self.since = time.time()
        decision = self._state.decision
        if not decision.kind:
            return self._state.passed
        self._ended, self.decision = True, decision
        rank, size = self._rendezvous.rank, self._rendezvous.size
        raise decision.error(self.operation, phase, seconds=self.seconds, rank=rank, size=size)

    def _close(self, doing: str, *, waits: bool) -> None:
        """Respond to a decision that ends the operation, if there is one. Idempotent."""
        rendezvous = self._rendezvous
        if self._state.decision.kind and not self._state.ended:
            event = Close(doing, waits, rendezvous.is_host())
            # Few ranks look for missing ones at first; the others find what those have written.
            seconds = rendezvous.grace_s + rendezvous.rank.bit_length() * rendezvous.pause_s / 5
            rendezvous.drive(event, Wait(self.operation, seconds, self.phase))

    def _can_align(self, phase: str) -> bool:
        """Whether this barrier can be reached in a new epoch. A recovery begins one itself."""
        return phase == ENTER and self.operation != "recover"

    def _align(self, barrier: State) -> bool:
        """Begin this operation in a new epoch, in which all ranks count from the same number.

        Returns False if other ranks wait for this one in a recovery.
        """
        event = Recover(
            self.operation,
            "",
            barrier.phases,
            False,
            aligns=True,
            insists=barrier.strayed and self._epoch == barrier.epoch,  # once
            optional=barrier.optional,
        )
        wait = Wait(self.operation, min(self.seconds, _REQUEST_S), ENTER)
        try:
            self._rendezvous.drive(event, wait)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._rendezvous.cancel_recovery(error)
            raise
        if self._state.epoch == self._epoch:
            return False
        self._rendezvous.peers.forget()
        self._move()
        return True

    def _move(self) -> None:
        """Continue in the operation to which the state has moved."""
        self._epoch, self.sequence = self._state.epoch, self._state.sequence
        self._ended, self.decision = False, None

    def _catch_up(self, barrier: State) -> bool:
        """Move to the operation that the others have begun, if this rank missed this one.

        Otherwise it would stay one behind. Nothing was changed. Returns whether it has moved.
        """
        decision = self.decision
        ends = decision is not None and decision.kind == "recover"
        if ends and self._can_align(barrier.phases[0]):
            return self._align(barrier)  # unless that recovery goes on, it has ended
        if decision is None or self._rendezvous.rank not in decision.missing:
            return False
        event = Next(barrier.phases, barrier.optional)
        self._rendezvous.drive(event, Wait(self.operation, _NEXT_S, self.phase))
        if self._state.sequence == self.sequence:
            return self._state.strayed and self._align(barrier)
        self._move()
        return True


class Rendezvous(Session):
    """The rendezvous of the ranks of a job, or of a group, on a store: it opens their rounds."""

    def open(
        self,
        operation: str,
        phases: Sequence[str],
        seconds: float,
        optional: Sequence[str] = (),
    ) -> Round:
        """Begin an operation. Local; all ranks must begin their operations in the same order.

        Its barriers are ``phases``. Those in ``optional`` are omitted unless a rank requests them
        at the first one. ``seconds`` is the timeout: seconds without progress.
        """
        self._client.reserve()
        with self._stepping:
            self.state = self.state.open(tuple(phases), tuple(optional))
        return Round(self, operation, seconds)

    def recover(self, phases: Sequence[str], reason: str, report: str, seconds: float) -> Round:
        """Request a recovery of all ranks, or join the requested one. Local, with a timeout.

        From then on, :meth:`recovery_requested` is true on ranks that have not joined it. Ranks
        that wait at a barrier of an earlier epoch read the request there. The first barrier of the
        operation that this rank would begin next ends immediately. ``reason`` is for ranks that
        wait elsewhere, and ``report`` for :meth:`gather`.

        Raises:
            PeerFailedError: a rank was interrupted before it took part in a recovery, of which this
                one has not known. It takes part in no recovery yet.
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
        """
        event, epoch = Recover(reason, report, tuple(phases), False), self.state.epoch
        self.drive(event, Wait("recover", min(seconds, _REQUEST_S), "flag"))
        if self.state.epoch == epoch and not self.alone:
            noted, size = self.state.noted, self.size
            raise noted.error("recover", ENTER, seconds=seconds, rank=self.rank, size=size)
        self.peers.forget()
        return Round(self, "recover", seconds)


def _all_ended(tasks: Sequence[Task[object]], seconds: float) -> bool:
    """Wait for at most this many seconds; return whether all have ended. Raises their errors."""
    end = time.monotonic() + seconds
    while True:
        running = [task for task in tasks if not task.ended]
        for task in tasks:
            if task.ended:
                task.result()
        if not running:
            return True
        left = end - time.monotonic()
        if left <= 0:
            return False
        # Any of several threads may fail first, and its error must not wait for the others.
        running[0].wait(left if len(tasks) == 1 else min(left, 0.01))


def _append(error: BaseException, text: str) -> None:
    """Append text to the message of an error."""
    if text and isinstance(error, ReloadpgError):
        error.args = (f"{error}{text}", *error.args[1:])
