"""One operation on one rank: its barriers in order, work between them, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ReloadpgError
from ..threads import CancelToken, Deadline, Interrupt, Task
from .decision import Decision
from .plan import Plan
from .protocol import OK, Ended, GaveUp, Rank
from .rendezvous import REQUESTS_S, Rendezvous
from .waiting import Waiting

BarrierHook = Callable[[str, str, str, int], object]
"""Called at each barrier with a moment, the operation, the phase and this rank. What it raises is
raised there. The moments are ``before`` this rank arrives; ``waiting``, counted there and about to
wait for others; and ``after`` it has read the decision."""

_barrier_hooks: list[BarrierHook] = []


def on_barrier(hook: BarrierHook) -> Callable[[], None]:
    """Call a function at each barrier of this process; for tests. Local, idempotent.

    Returns:
        A function that removes it.
    """
    if hook not in _barrier_hooks:
        _barrier_hooks.append(hook)

    def remove() -> None:
        with suppress(ValueError):
            _barrier_hooks.remove(hook)

    return remove


class Round:
    """One operation on this rank: its remaining barriers, in order.

    As a context manager it notifies the other ranks if its block raises.

    Args:
        rendezvous: the rank on its store.
        operation: its name, for messages.
        phases: the barriers.
        seconds: the timeout of each wait: seconds without progress.
        interrupt: how the caller tells the operation to end.

    Attributes:
        decision: the decision that ended the operation early; None before that.
        since: Unix time at which this rank arrived at the next barrier, or began its work before
            it.
        waiting: whether this rank waits at the next barrier for others.
        notified: set when the other ranks were notified of this rank's failure, or cannot be.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        operation: str,
        phases: Sequence[str],
        seconds: float,
        interrupt: Interrupt | None = None,
    ) -> None:
        self._rendezvous = rendezvous
        self._waits = Waiting(rendezvous, interrupt or Interrupt())
        self._phases, self._passed = tuple(phases), 0
        self._entered = False
        self.operation = operation
        self.seconds = seconds
        self.decision: Decision | None = None
        self.since = time.time()
        self.waiting = False
        self.notified = threading.Event()

    @classmethod
    def open(
        cls, rendezvous: Rendezvous, operation: str, phases: Sequence[str], seconds: float
    ) -> Round:
        """Enter the next operation; see :meth:`enter`."""
        with cls(rendezvous, operation, phases, seconds) as round_:
            round_.enter()
        return round_

    @property
    def _rank(self) -> Rank:
        return self._rendezvous.state

    @property
    def number(self) -> int:
        """Number of the operation, equal on all ranks; 0 if this rank has not entered it."""
        return self._rank.number if self._entered else 0

    @property
    def label(self) -> str:
        """A label that is unique among the rounds on this store, over all jobs."""
        return f"{self._rank.job}.{self.number}"

    @property
    def phase(self) -> str:
        """The next barrier, or the one at which the operation has ended; empty after the last."""
        return self._phases[self._passed] if self._passed < len(self._phases) else ""

    @property
    def _has_ended(self) -> bool:
        """Whether it reaches no further barrier, and the other ranks know that, or cannot."""
        return self.decision is not None or self.notified.is_set()

    def __enter__(self) -> Round:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    def _run_hooks(self, moment: str) -> None:
        for hook in list(_barrier_hooks):
            hook(moment, self.operation, self.phase, self._rendezvous.rank)

    def enter(self, reason: str = "") -> None:
        """Enter the operation. Blocking, with a timeout; all ranks make the same calls.

        ``recover`` requests a recovery of all ranks, or joins the requested one.

        Args:
            reason: of a recovery, for ranks that wait elsewhere.

        Raises:
            PeerFailedError: operations have failed without this rank, or another rank has requested
                a recovery, and this operation does not repair that. Or DisagreementError or
                RendezvousTimeoutError, as on the other ranks.
            ReloadpgError: the store is lost.
        """
        before = self._rank.number
        try:
            self._waits.check()
            steps = self._rank.enter(self.operation, reason)
            self._rendezvous.drive(steps, self._deadline())
        except Ended as ended:
            self.decision = ended.decision
            raise self._error() from None
        finally:  # also if a signal handler raises
            self._entered = self._rank.number != before

    # -- barriers ---------------------------------------------------------------------------

    def barrier(
        self,
        phase: str,
        plan: Plan | None = None,
        said: str = "",
        summary: Callable[[Sequence[str]], str] = "\n".join,
        seconds: float | None = None,
    ) -> str:
        """Wait until all ranks arrive. Collective, blocking, with a timeout.

        Args:
            phase: the next barrier.
            plan: this rank's plan, at the first barrier; it must be equal on all ranks.
            said: what this rank says to all ranks there.
            summary: makes one text of what ranks have said, in their order, on one of them. Pure.
            seconds: the timeout of this wait; None for the operation's.

        Returns:
            The summary, equal on all ranks; empty if no rank has said anything.

        Raises:
            DisagreementError: the plans differ, on all ranks; nothing was changed.
            RendezvousTimeoutError: a rank is missing, and no rank made progress for the timeout.
            PeerFailedError: a rank failed before it arrived.
        """
        if not self._entered or self._has_ended or self.phase != phase:
            raise ReloadpgError(f"barrier {phase!r} is not the next of {self._phases}")
        rendezvous, deadline, share = self._rendezvous, self._deadline(seconds), 0
        if plan is not None and not rendezvous.alone:
            share = plan.contribution(rendezvous.rank, rendezvous.size)
        self.since, confirmed = time.time(), self._rank.confirmed
        self._run_hooks("before")
        self.waiting = True
        steps = self._rank.barrier(share, said, summary, ends=phase == self._phases[-1])
        try:
            self._waits.check()
            decision: Decision = rendezvous.drive(steps, deadline, self._wait)
            self._waits.end(deadline)
        except Ended as error:
            decision = self._leave(error, plan=plan)
        except ReloadpgError:  # it may never know the decision, and assumes that all have passed
            self._passed += 1
            raise
        finally:
            self.waiting, self.since = False, time.time()
        self._run_hooks("after")
        if decision.kind != "ok":
            raise self._error(seconds)
        if not confirmed:
            rendezvous.watch(deadline)  # all are in the list of this host
        self._passed += 1
        deadline.log_end()
        return decision.text

    def _wait(self, key: str, again: bool, deadline: Deadline) -> None:
        if not again:
            self._run_hooks("waiting")
        self._waits.at_barrier(key, again, deadline)

    def refuse(self, decision: Decision) -> None:
        """End the operation, in which this process cannot be counted. Local; waits a limited time.

        The other ranks raise the decision, unless they have passed the barrier.
        """
        self._leave(GaveUp(decision))

    def watch(
        self, tasks: Sequence[Task[Any]], wanted: CancelToken, doing: Callable[[], str]
    ) -> None:
        """Wait for this rank's work before the next barrier, and poll for failures of other ranks.

        Args:
            tasks: the work, which calls :meth:`advance` after progress.
            wanted: the token of its results, cancelled at the end: before the other ranks are
                notified of an error.
            doing: returns the current step of the work, for messages.

        Raises:
            PeerFailedError: another rank failed during the work.
            RendezvousTimeoutError: neither the work nor any other rank made progress for the
                timeout.
        """
        try:
            self._waits.for_tasks(tasks, self._deadline(), doing)
        except Ended as error:
            wanted.cancel()
            self._leave(error, doing())
            raise self._error() from None
        finally:
            wanted.cancel()

    def advance(self) -> None:
        """Count progress of this rank. Local, from any thread."""
        self._waits.advance()

    def _deadline(self, seconds: float | None = None) -> Deadline:
        """The deadline of the next barrier, by default with the timeout of the operation."""
        return Deadline(self.operation, seconds or self.seconds, self.phase)

    # -- the end ----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> str | None:
        """Notify the other ranks that this one has failed. Local; waits a limited time.

        It waits until they have read it, except after an interrupt. The ranks that did not respond
        are appended to a :class:`ReloadpgError`.

        Args:
            error: the cause.

        Returns:
            The phase at which the operation ended on all ranks. It may be later than the phase of
            this rank, if all ranks had just arrived at its barrier. None if all ranks have passed
            the last barrier: the operation is then complete in spite of the error. The first phase
            if this rank cannot enter the operation.
        """
        try:
            if self.phase and not self._has_ended:
                self._notify(error)
            return self.phase or None
        finally:
            self.notified.set()

    def _notify(self, error: BaseException) -> None:
        rank = self._rendezvous.rank
        dead = self._rendezvous.peers.dead()
        told = f"{type(error).__name__}: {error}".removesuffix(": ")[:4000]
        failed = Decision("failed", rank, told, dead=dead)
        try:
            # The groups are aborted next, and a rank that still connects to them would raise that
            # instead of this error. An interrupt does not wait.
            decision = self._leave(GaveUp(failed), waits=isinstance(error, Exception))
        except ReloadpgError as lost:
            same = str(lost) in str(error)
            text = "" if same else f"\nThe other ranks could not be notified: {lost}"
        else:
            if decision.kind == "ok":
                self._passed = len(self._phases)
            text = decision.silence(rank)
            if decision.kind == "failed" and decision.rank != rank:
                text = f"\nRank {decision.rank} failed first: {decision.text}{text}"
        if text and isinstance(error, ReloadpgError):
            error.args = (f"{error}{text}", *error.args[1:])

    def _leave(
        self, error: Ended, doing: str = "", *, plan: Plan | None = None, waits: bool = True
    ) -> Decision:
        """End the operation for all ranks, and exchange the names of ranks.

        Args:
            error: why it ends.
            doing: this rank's work; empty if it waited.
            plan: this rank's plan, for a disagreement.
            waits: whether to wait for the answers of the other ranks.

        Returns:
            How it ended: ``ok`` if all ranks have completed it.
        """
        # A separate deadline: the work's may have passed. The first decision written counts.
        seconds = max(REQUESTS_S, self._rendezvous.grace_s)
        deadline = Deadline(self.operation, seconds, self.phase)
        rendezvous, decision = self._rendezvous, error.decision
        if isinstance(error, GaveUp) and self.number:
            decision = rendezvous.drive(self._rank.end(decision), deadline)
        elif isinstance(error, GaveUp):
            decision = rendezvous.drive(self._rank.refuse(self.operation, decision), deadline)
            self._entered = True
        self._waits.end(deadline)
        if decision.kind == "ok":
            return decision
        self.decision = decision
        if decision.barrier >= 0:
            self._passed = decision.barrier
        if decision.kind == "recover":
            return decision
        # Few ranks look for missing ones at first; the others find what those have written.
        seconds = rendezvous.grace_s + rendezvous.rank.bit_length() * rendezvous.pause_s / 5
        said = plan.to_json() if plan and decision.kind == "disagree" else doing
        steps = self._rank.close(decision, said, waits=waits)
        with suppress(ReloadpgError):  # the decision is known, without the names
            self.decision = rendezvous.drive(steps, Deadline(self.operation, seconds, self.phase))
        return self.decision

    def _error(self, seconds: float | None = None) -> ReloadpgError:
        decision, rendezvous = self.decision or OK, self._rendezvous
        self.notified.set()
        return decision.error(self._deadline(seconds), rendezvous.rank, rendezvous.size)
