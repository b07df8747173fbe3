"""Rounds: a lifecycle operation as a sequence of barriers that all ranks reach together.

A barrier has one outcome, written to the store once and read by all ranks, so all ranks of a round
end it alike:

* ``ok``: all ranks arrived, and, where they were to agree, have equal plans.
* ``fall_back``: a rank could not suspend or resume a communicator. All ranks go on in this round
  and recreate these communicators instead.
* ``failed``: a rank cannot go on and wrote why. The others do not wait for it; they answer a roll
  call, so that a rank whose death made the first one fail is named too.
* ``timeout``: a rank waited for the bound without progress anywhere. The outcome names the ranks
  that are missing; a rank that arrives later reads the same outcome at once.
* ``disagree``: the ranks asked for different things; the outcome says what the first is.

The bound is on waiting, not on working: whenever a rank has released or rebuilt a group it counts
that on the store, and every rank that sees the count change starts its bound again.

A rank that is interrupted just as the last rank arrives does not know how the barrier ended until
it tries to write its failure: the outcome that was written first says it, see :meth:`Round.fail`.

A recovery (:meth:`Rendezvous.recover`) begins an era: a count of rounds of its own, with a number
that the store gives. So ranks that have ended different rounds, or hang in one, meet in it.

A barrier costs each rank five short store operations, whatever the number of ranks. Agreement adds
one: each group's members add numbers whose sum is zero exactly if all of them describe the group
alike; plans are exchanged in full only after that sum has shown a difference. A proposal is kept
under its subject for the ranks that look it up, which they do only if some rank made one.

When all ranks are at a barrier, all have read the outcome of the one before, and its keys are
deleted (each rank its own, rank 0 the shared ones).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import PeerFailedError, ReloadpgError, RendezvousTimeoutError
from .barrier import Barrier, Keys
from .outcome import Outcome, store_lost, store_silent
from .plan import Plan, Proposal
from .predecessor import (
    RECOVERY,
    Predecessor,
    job_keys,
    mark_begun,
    mark_ended,
    next_instance,
)
from .store_client import GRACE_S, Root, StoreClient, StoreLost, StoreSilent
from .worker_thread import Attempt, Task, Wait, logger

__all__ = ["Rendezvous", "Round"]

T = TypeVar("T")

_NEXT_S = 0.2
"""Seconds in which a rank that was late looks whether the others call again at this moment."""

_TELL_S = 5.0
"""Seconds in which a rank that fails tries to tell the others."""

_CALL_S = 10.0
"""Seconds in which a rank tries to call the others to a recovery."""

_FLAG_S = 0.5
"""Seconds in which the store is to answer whether a recovery has begun."""

_SILENT_S = 2.0, 60.0
"""Seconds for which a store that did not answer that is not asked again, at first and at most."""


class Rendezvous:
    """The place on the store where the ranks of a job, or of a group, find each other.

    Args:
        root: finds the store; None for a rank that has no peers.
        rank: this rank.
        size: number of ranks.
        predecessor: the place that this process takes in a job that goes on; None otherwise.
        marks: whether to leave marks by which a process that takes this one's place knows it.

    Attributes:
        era: number of the recovery that this rank took part in last; 0 before the first.
        recovered: number of the last recovery that is complete; 0 before the first.
        replaces: whether this process takes another one's place, and no recovery has let it in yet.
    """

    def __init__(
        self,
        root: Root | None,
        rank: int,
        size: int,
        *,
        predecessor: Predecessor | None = None,
        marks: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self._keys = Keys()
        self._root = root
        self._client = StoreClient(root) if root is not None else None
        self._instance = None if predecessor is None else predecessor.instance
        self._counting = threading.Lock()
        self._marks = marks
        self.era = 0 if predecessor is None else predecessor.era
        self.recovered = 0
        self.replaces = predecessor is not None
        self._sequence = 0
        self._last = 0
        self._ask_again = 0.0
        self._silent_s = 0.0

    @classmethod
    def of_world(
        cls, world: ProcessGroup, *, predecessor: Predecessor | None = None, marks: bool = False
    ) -> Rendezvous:
        """Return the rendezvous of the job that ``world`` is the default group of. Local."""
        root = c10d.root_store_of_job(world) if c10d.has_peers() else None
        return cls(root, world.rank(), world.size(), predecessor=predecessor, marks=marks)

    def count_job(self, root: Store) -> None:
        """Count this job on its store, which must be the same on all ranks. One store operation.

        Called by all ranks when the job begins: the first operation may be one that only some
        call, and at a later time the port of the store may be another job's.
        """
        with suppress(RuntimeError):  # lost already: the first operation says it
            self._own_keys(root)

    def connect_ahead(self) -> list[Task[Store]]:
        """Connect to the store in the background, and count this job if it is not counted. Local.

        Returns:
            The tasks that connect.
        """
        return [] if self._client is None else [self._client.connect_ahead(self._own_keys)]

    def end(self) -> None:
        """Note that this rank has ended the job: nothing is left to replace. Local, bounded."""
        if self._marks and not self.alone:
            with suppress(StoreLost, StoreSilent, RuntimeError):
                self.ask(lambda store: mark_ended(store, self.rank), Wait("end", _FLAG_S))

    @property
    def instance(self) -> int:
        """Number of this job among those on its store, equal on all ranks; 0 before they met."""
        return self._instance or 0

    @property
    def alone(self) -> bool:
        """Whether this rank has no peers."""
        return self._client is None

    def is_host(self) -> bool:
        """Whether the store's server is in this process. Local."""
        if self._root is None:
            return False
        try:
            return c10d.is_store_host(self._root(), self.rank)
        except RuntimeError:
            return False  # the job has ended

    def open(self, operation: str, phases: Sequence[str], seconds: float) -> Round:
        """Begin a round. Local; all ranks must open their rounds in the same order.

        Args:
            operation: its name, for messages.
            phases: its barriers, in order.
            seconds: how long to wait for a rank that makes no progress.

        Raises:
            ReloadpgError: this process has to rejoin the job first.
        """
        self.check_rejoined(operation)
        self._sequence += 1
        return Round(self, operation, self._sequence, phases, seconds)

    def check_rejoined(self, operation: str) -> None:
        """Raise if this process replaces another one, and the other ranks do not know it. Local."""
        if self.replaces:
            raise ReloadpgError(
                f"{operation}: this process replaces one of rank {self.rank} that has ended, and "
                "the other ranks do not know it yet; nothing was changed. Call reloadpg.rejoin() "
                "first, once its groups are created."
            )

    def complete_recovery(self) -> None:
        """Note that the recovery that was begun last is complete, on all ranks. Local."""
        self.recovered, self.replaces = self.era, False

    def recover(self, phases: Sequence[str], reason: str, report: str, seconds: float) -> Round:
        """Call all ranks to a recovery, and begin its round. Local, bounded.

        From then on :meth:`called` is true on ranks that have not begun it, and those that wait at
        a barrier of an earlier round learn of it there: at once at the first one of the round that
        this rank would begin next, and at those of a recovery that cannot end since the process
        that this one replaces took part in it.

        Args:
            phases: its barriers, in order.
            reason: why, for ranks that are called in.
            report: what this rank has to say to :meth:`gather`.
            seconds: how long to wait for a rank that makes no progress.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: it does not answer.
        """
        era, ends = self.era, [f"{self.era}.{self._sequence + 1}/{phases[0]}"]
        if self.replaces:
            ends += [f"{era}.0/{phase}" for phase in phases]
        outcome = Outcome("recover", self.rank, reason)

        def call(store: Store) -> int:
            while True:
                number = store.add(RECOVERY, 0)
                ended = f"{number}.0/{phases[0]}/outcome"
                if number > era and not store.check([ended]):
                    break
                store.compare_set(RECOVERY, str(number), str(number + 1))
            own = f"{RECOVERY}/{number}"
            store.set(self._keys.add(f"{own}/{self.rank}"), report)
            store.compare_set(self._keys.add(f"{own}/call"), "", outcome.to_json())
            for name in ends:
                self._keys.add(f"{name}/outcome")
                self.barrier(name).settle(store, outcome)
            return number

        if self.alone:
            self.era += 1
        else:
            self.era = self._ask("recover", "flag", call, min(seconds, _CALL_S))
        self._sequence = 0
        return Round(self, "recover", 0, phases, seconds)

    def called(self, every: float) -> bool:
        """Whether a recovery has begun in which this rank takes no part yet. Local, bounded.

        Asks the store if it was last asked so many seconds ago, and else answers as then; False
        while the store does not answer, and then it is left alone for 2 s, and for twice as long
        each time that it does not answer again, up to a minute.
        """
        if self.alone or time.monotonic() < self._ask_again:
            return self._last > self.era
        self._ask_again = time.monotonic() + every
        try:
            self._last = self.ask(lambda store: store.add(RECOVERY, 0), Wait("flag", _FLAG_S))
            self._silent_s = 0.0
        except (StoreLost, StoreSilent):
            least, most = _SILENT_S
            self._silent_s = min(most, max(least, 2 * self._silent_s))
            self._ask_again = time.monotonic() + self._silent_s
        return self._last > self.era

    def gather(self, store: Store, summary: Callable[[list[str]], str]) -> None:
        """Read what all ranks report to this recovery, and leave a summary for them. Blocking.

        Called on one rank, between two barriers of the recovery.
        """
        own = f"{RECOVERY}/{self.era}"
        reports = [store.get(f"{own}/{rank}").decode() for rank in range(self.size)]
        store.set(self._keys.add(f"{own}/summary"), summary(reports))

    def summary(self, store: Store) -> str:
        """Read the summary, once all ranks have reached the barrier after :meth:`gather`."""
        return store.get(f"{RECOVERY}/{self.era}/summary").decode()

    def skip(self, sequence: int) -> int:
        """Count a round that the others have ended without this rank; the number of the next."""
        self._sequence = max(self._sequence, sequence + 1)
        return sequence + 1

    def barrier(self, name: str) -> Barrier:
        """Return a barrier of that name for this rank."""
        return Barrier(
            name, self._keys, self.rank, self.size, self.is_host, partial(self._call, self.era)
        )

    def _call(self, era: int, store: Store) -> Outcome | None:
        """The outcome of a barrier of an era that a recovery has ended; None if none has."""
        if not store.check([RECOVERY]):  # to add nothing to it would make the key
            return None
        number = store.add(RECOVERY, 0)
        key = f"{RECOVERY}/{number}/call"
        if number <= era or not store.check([key]):
            return None
        return Outcome.from_json(store.get(key))

    def ask(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Ask this rendezvous' own part of the store; see :meth:`StoreClient.ask`."""
        return self.ask_root(lambda root: question(self._own_keys(root)), wait)

    def _ask(self, operation: str, phase: str, question: Callable[[Store], T], seconds: float) -> T:
        """Ask this rendezvous' own part of the store, and raise what the user is to read."""
        try:
            return self.ask(question, Wait(f"{operation}, {phase}", seconds))
        except StoreLost as error:
            raise store_lost(operation, phase, error) from error
        except StoreSilent:
            raise store_silent(
                operation, phase, seconds=seconds, rank=self.rank, size=self.size
            ) from None

    def ask_root(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Ask the whole store; see :meth:`StoreClient.ask`."""
        if self._client is None:
            raise ReloadpgError(f"{wait.what}: this rank has no peers and no store")
        return self._client.ask(question, wait)

    def _own_keys(self, root: Store) -> Store:
        # A second job on the same store gets keys of its own: each rank counts its jobs there.
        with self._counting:
            if self._instance is None:
                self._instance = next_instance(root, self.rank)
                if self._marks:
                    mark_begun(job_keys(root, self._instance), self.rank)
        return job_keys(root, self._instance)


class Round:
    """One operation on this rank: the barriers that it still has to reach, in order.

    Attributes:
        operation: its name, for messages.
        sequence: number of the round, equal on all ranks.
        seconds: the bound of each wait.
        waited_ms: time spent waiting for other ranks, by phase.
        wait: the wait that is going on, or None.
        unfinished: the tasks of abandoned work that had not ended when it was abandoned, with the
            numbers of their threads.
        store_failed: whether the store has failed this round.
        outcome: the outcome that ended the round early; None before that.
        since: Unix time at which this rank arrived at the next barrier, or else began to work
            towards it.
        told: set when the others know of this rank's failure, or cannot be told.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        operation: str,
        sequence: int,
        phases: Sequence[str],
        seconds: float,
    ) -> None:
        self.operation = operation
        self.sequence = sequence
        self.seconds = seconds
        self.waited_ms: dict[str, float] = {}
        self.wait: Wait | None = None
        self.unfinished: list[tuple[int, Task[object]]] = []
        self.store_failed = False
        self.outcome: Outcome | None = None
        self.since = time.time()
        self.told = threading.Event()
        self._rendezvous = rendezvous
        self._era = rendezvous.era
        self._phases = list(phases)  # still to pass
        self._barriers: dict[str, Barrier] = {}
        self._arrived = ""  # the last phase at which this rank may have been counted
        self._ended: str | None = None  # the phase whose outcome ended the round
        self._advanced = 0

    @property
    def label(self) -> str:
        """A label that no other round on the same store has, of this job or of one before it."""
        return f"{self._rendezvous.instance}.{self._era}.{self.sequence}"

    @property
    def phase(self) -> str:
        """The next barrier; empty after the last."""
        return self._phases[0] if self._phases else ""

    @property
    def waiting(self) -> bool:
        """Whether this rank has arrived at the next barrier and not all others have. Local."""
        return self._ended is None and self.phase == self._arrived != ""

    # -- barriers ---------------------------------------------------------------------------

    def agree(
        self,
        phase: str,
        plan: Plan,
        proposals: Sequence[Proposal] = (),
        subjects: Sequence[str] = (),
    ) -> dict[str, str]:
        """Reach a barrier at which all ranks must have equal plans. Collective, blocking, bounded.

        Args:
            phase: the barrier.
            plan: what this rank is about to do.
            proposals: what this rank proposes.
            subjects: the subjects of which it must know what any rank has proposed.

        Returns:
            The proposals on these subjects, where there are any.

        Raises:
            DisagreementError: on all ranks; nothing was touched.
            RendezvousTimeoutError, PeerFailedError: see :meth:`barrier`.
        """
        outcome = self._agree_in_step(phase, plan, proposals)
        if not outcome.proposed or not subjects:
            return {}
        if self._rendezvous.alone:
            return {one.subject: one.text for one in proposals if one.subject in subjects}
        barrier = self._barrier(phase)
        return self._ask(lambda store: barrier.lookup(store, subjects), phase, self.seconds)

    def barrier(self, phase: str) -> Outcome:
        """Wait until all ranks are here. Collective, blocking, bounded.

        Returns:
            The outcome: ``ok`` or ``fall_back``.

        Raises:
            RendezvousTimeoutError: not all ranks arrived, and none made progress, for the bound.
            PeerFailedError: a rank failed on its way here.
        """
        return self._reach(phase)

    def fall_back(self, phase: str, error: ReloadpgError) -> Outcome:
        """Let all ranks pass a barrier and recreate what could not be suspended or resumed.

        Args:
            phase: the barrier.
            error: what this rank could not do; it gets the names of ranks that do not answer.

        Returns:
            The outcome that was written first: this one, or another rank's of the same kind.

        Raises:
            RendezvousTimeoutError, PeerFailedError: the round has ended at this barrier.
            ReloadpgError: ``error``, if it has ended since another rank does not answer.
        """
        rank = self._rendezvous.rank
        outcome = Outcome("fall_back", rank, f"{type(error).__name__}: {error}".splitlines()[0])
        if not self._rendezvous.alone:
            barrier, mine = self._barrier(phase), outcome
            outcome = self._ask(lambda store: barrier.settle(store, mine), phase, self.seconds)
        try:
            return self._pass(phase, outcome)
        except PeerFailedError:
            if self.outcome is None or self.outcome.rank != rank:
                raise
            _append(error, self.outcome.silence())
            raise error from error.__cause__

    def run(
        self,
        phase: str,
        work: Callable[[Attempt, int], object],
        doing: Callable[[], str],
        threads: int = 1,
    ) -> Outcome | None:
        """Do this rank's own part before a barrier, while reading what happens on other ranks.

        Args:
            phase: the barrier that comes after the work.
            work: runs in so many threads, with the thread's number; abandoned when this raises or
                falls back. It calls :meth:`advance` when it has made progress.
            doing: says what the work is at now, for messages.
            threads: number of threads.

        Returns:
            None when the work is done; an outcome ``fall_back`` of another rank, which has passed
            the barrier, if the work was abandoned for it.

        Raises:
            PeerFailedError: another rank failed meanwhile.
            RendezvousTimeoutError: neither the work nor any other rank made progress for the bound.
        """
        attempt = Attempt()
        tasks: list[Task[object]] = []
        done = False
        try:  # from before the first thread runs: an interrupt can end the start of a thread
            for index in range(threads):
                call = partial(work, attempt, index)
                tasks.append(Task(call, self.operation))
            outcome = self._attend(phase, tasks, doing)
            done = outcome is None
        finally:
            if not done:
                attempt.abandon()
                self.unfinished += [one for one in enumerate(tasks) if not one[1].ended]
        return outcome

    def advance(self) -> None:
        """Count progress of this rank. Local, from any thread."""
        self._advanced += 1

    # -- failures ---------------------------------------------------------------------------

    def fail(self, error: BaseException) -> str | None:
        """Tell the other ranks that this one cannot go on. Local, bounded.

        A :class:`ReloadpgError` gets the names of the ranks that did not answer.

        Returns:
            The phase at which the round ended, on all ranks alike. It may be a later one than this
            rank knows of: all had arrived at the barrier just before. None: all ranks have passed
            the last barrier, so the operation is complete in spite of the error.
        """
        try:
            return self._fail(error)
        finally:
            self.told.set()

    def _fail(self, error: BaseException) -> str | None:
        if self._ended is not None or not self._phases:
            return self._ended
        if self._rendezvous.alone or self.store_failed:
            self._ended = self.supposed_end
            return self._ended
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        failed = Outcome("failed", self._rendezvous.rank, text[:4000])
        phases, waits = list(self._phases), isinstance(error, ReloadpgError)

        def tell(store: Store) -> tuple[str | None, Outcome]:
            written = failed
            for phase in phases:
                barrier = self._barrier(phase)
                written = barrier.settle(store, failed)
                if not written.goes_on:
                    return phase, barrier.handle(store, written, None, waits=waits)
                if not written.ok:
                    barrier.roll_call(store, written, waits=False)
            return None, written

        try:
            self._ended, written = self._ask(tell, phases[0], _TELL_S)
            self._phases.clear()
            self.outcome = written
            _append(error, written.earlier_failure(self._rendezvous.rank) + written.silence())
        except ReloadpgError as lost:
            logger.warning("could not tell the other ranks of a failure: %s", lost)
            _append(error, f"\nThe other ranks could not be told: {lost}")
            self._ended = self.supposed_end
        return self._ended

    @property
    def supposed_end(self) -> str | None:
        """The phase at which the round ends for a rank that cannot ask the store.

        It does not know the outcome of a barrier at which it was counted: it supposes that the
        others have gone on.
        """
        if self._ended is not None or not self._phases:
            return self._ended
        counted = self._phases[0] == self._arrived and len(self._phases) > 1
        return self._phases[1 if counted else 0]

    # -- one barrier ------------------------------------------------------------------------

    def _barrier(self, phase: str) -> Barrier:
        barrier = self._barriers.get(phase)
        if barrier is None:
            barrier = self._barriers[phase] = self._rendezvous.barrier(
                f"{self._era}.{self.sequence}/{phase}"
            )
        return barrier

    def _reach(
        self, phase: str, plan: Plan | None = None, proposals: Sequence[Proposal] = ()
    ) -> Outcome:
        if self._phases[:1] != [phase]:
            raise ReloadpgError(f"barrier {phase!r} is not the next of {self._phases}")
        wait = self.wait = Wait(f"{self.operation}, phase {phase}", self.seconds)
        outcome: Outcome | None = Outcome("ok", proposed=bool(proposals))
        if not self._rendezvous.alone:
            barrier = self._barrier(phase)
            self._arrived, self.since = phase, time.time()
            outcome = self._ask_within(
                lambda store: barrier.arrive(store, plan, proposals, wait), phase, wait
            )
            if outcome is None:
                outcome = self._ask(barrier.judge, phase, 3 * GRACE_S)
        self.wait = None
        self.waited_ms[phase] = wait.waited * 1e3
        passed = self._pass(phase, outcome, plan)
        wait.log_end()
        return passed

    def _pass(self, phase: str, outcome: Outcome | None, plan: Plan | None = None) -> Outcome:
        """Go on to the next phase, or raise what the outcome says."""
        if outcome is None:
            raise ReloadpgError(f"barrier {phase!r} has no outcome; this is a bug")
        barrier, read = self._barrier(phase), outcome
        if outcome.kind == "fall_back" and not self._rendezvous.alone:
            # A communicator can fail since a peer is gone: then nobody goes on.
            outcome = self._ask(
                lambda store: barrier.roll_call(store, read, waits=True), phase, 2 * barrier.grace_s
            )
            if outcome.silent:
                outcome = replace(outcome, kind="failed")
        if outcome.goes_on:
            self._phases.pop(0)
            self.since = time.time()
            return outcome
        self._ended = phase
        self.outcome = outcome
        if not self._rendezvous.alone:
            ended = outcome
            self.outcome = outcome = self._ask(
                lambda store: barrier.handle(store, ended, plan, waits=not ended.silent),
                phase,
                3 * barrier.grace_s,
            )
        raise outcome.error(
            self.operation,
            phase,
            seconds=self.seconds,
            rank=self._rendezvous.rank,
            size=self._rendezvous.size,
        )

    def _agree_in_step(self, phase: str, plan: Plan, proposals: Sequence[Proposal]) -> Outcome:
        """Reach the first barrier, in the round that the others are in.

        A rank that did not call at all must not stay one behind for ever. Nothing was touched.
        """
        while True:
            try:
                return self._reach(phase, plan, proposals)
            except RendezvousTimeoutError:
                ended = self.outcome
                if ended is None or self._rendezvous.rank not in ended.missing:
                    raise
                if not self._ask(self._next_has_begun, phase, GRACE_S):
                    raise
                self.sequence = self._rendezvous.skip(self.sequence)
                self._barriers.clear()
                self._ended = self.outcome = None

    def _next_has_begun(self, store: Store) -> bool:
        key = f"{self._era}.{self.sequence + 1}/{self._phases[0]}/count"
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=_NEXT_S))
        return bool(store.check([key]))

    def _attend(
        self, phase: str, tasks: Sequence[Task[object]], doing: Callable[[], str]
    ) -> Outcome | None:
        """Wait until the tasks have ended, and raise what the first that failed has raised."""
        wait = self.wait = Wait(f"{self.operation}, phase {phase}", self.seconds)
        barrier = None if self._rendezvous.alone else self._barrier(phase)
        # Most work ends at once, and the store is not asked.
        pause, seen, reported = min(0.2, self.seconds), self._advanced, self._advanced
        while not wait.pause(pause, partial(_all_ended, tasks)):
            pause = 0.1 if barrier is None else barrier.pause_s
            if self._advanced != seen:
                seen = self._advanced
                wait.extend()
            if barrier is not None:
                # The question is asked before the next pass changes ``reported``.
                news = seen - reported
                outcome = self._ask_within(
                    lambda store, n=news: barrier.poll(store, n, wait),  # type: ignore[misc]
                    phase,
                    wait,
                )
                reported = seen
                if outcome is not None:
                    self.wait = None
                    return self._pass(phase, outcome)
            wait.log(doing)
            if wait.left == 0 and self._advanced == seen:
                return self._fail_stuck(phase, doing())
        self.wait = None
        return None

    def _fail_stuck(self, phase: str, doing: str) -> Outcome:
        """Find out which ranks hang, since this rank's own part makes no progress, and raise."""
        rank = self._rendezvous.rank
        outcome = Outcome("timeout", rank, stuck=(rank,), doing=doing)
        if not self._rendezvous.alone:
            barrier = self._barrier(phase)
            outcome = self._ask(
                lambda store: barrier.judge(store, working=True, doing=doing), phase, 3 * GRACE_S
            )
        self.wait = None
        return self._pass(phase, outcome)

    def _ask(self, question: Callable[[Store], T], phase: str, seconds: float) -> T:
        return self._ask_within(question, phase, Wait(f"{self.operation}, {phase}", seconds))

    def _ask_within(self, question: Callable[[Store], T], phase: str, wait: Wait) -> T:
        try:
            return self._rendezvous.ask(question, wait)
        except StoreLost as error:
            self.store_failed = True
            raise store_lost(self.operation, phase, error) from error
        except StoreSilent:
            self.store_failed = True
            raise store_silent(
                self.operation,
                phase,
                seconds=wait.seconds,
                rank=self._rendezvous.rank,
                size=self._rendezvous.size,
            ) from None


def _all_ended(tasks: Sequence[Task[object]], seconds: float) -> bool:
    """Wait up to so many seconds; whether all tasks have ended. Raises what one has raised."""
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
        running[0].wait(left if len(tasks) == 1 else min(left, 0.01))


def _append(error: BaseException, text: str) -> None:
    """Lengthen the message of an error of ours."""
    if text and isinstance(error, ReloadpgError):
        error.args = (f"{error}{text}", *error.args[1:])
