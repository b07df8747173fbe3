"""Performs the commands of :mod:`.protocol` on the store, for one rank.

:class:`Rendezvous` owns this rank's connection and protocol state (epoch, operation, keys). A
:class:`Round` is one operation: its remaining barriers, in order.

The timeout limits waiting, not work. A rank that has released or rebuilt a group increments a
counter on the store, and every rank that sees a change restarts its timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn, TypeVar

from torch.distributed import PrefixStore, ProcessGroup, Store

from .. import c10d
from ..errors import PeerFailedError, ReloadpgError, RendezvousTimeoutError
from ..settings import GRACE
from ..texts import named_ranks
from .decision import Decision, store_lost, store_silent
from .peers import Peers
from .plan import Plan, Proposal
from .predecessor import LOST, Predecessor, process_mark
from .protocol import (
    ENTER,
    Arrive,
    Close,
    Command,
    Decide,
    Event,
    Fail,
    Join,
    Lost,
    Next,
    Poll,
    Recover,
    Reply,
    State,
    base,
    step,
)
from .store_client import (
    PeerDied,
    Root,
    StoreClient,
    StoreLost,
    StoreSilent,
    absent,
    execute,
    read,
)
from .worker_thread import Attempt, Task, Wait, wait_seconds

T = TypeVar("T")

_NEXT_S = 1.0
"""Seconds in which a late rank checks whether the others have begun the next operation."""

_NOTIFY_S = 5.0
"""Shortest time, in seconds, that a failing rank has to notify the others."""

_REQUEST_S = 10.0
"""Seconds in which a rank tries to request a recovery."""

_COUNT_S = 5.0
"""Timeout for counting a new job on the store, in seconds."""

_FLAG_S = 0.5
"""Timeout for reading whether a recovery was requested, in seconds."""

_SILENT_S = 2.0, 60.0
"""Back-off for an unresponsive store: initial and maximum, in seconds."""

_NAMED = 16
"""Maximum number of missing ranks that the log of a long wait names."""

_LOOKING = 8
"""Ranks below this one, and powers of two, look for missing ranks during a long wait."""

barrier_hooks: list[Callable[[str, str, str, int], object]] = []
"""For ``reloadpg.testing``: called at each barrier with a moment, the operation, the phase and this
rank. What a hook raises is raised there. The moments are ``before`` this rank arrives; ``waiting``,
counted there and about to wait, in the thread that asks the store; ``after`` it has read the
decision; and ``failing``, before it notifies the others of a failure."""


class Rendezvous:
    """The rendezvous of the ranks of a job, or of a group, on a store.

    Args:
        root: returns the store; None for a rank without peers.
        rank: this rank.
        size: number of ranks.
        predecessor: the process that this one replaces in a running job, if any.
        marks: whether to write the marks by which a later process can replace this one.
        watches: whether to watch the processes on this host.
        counts: whether this process will count the job; one that is refused while it starts takes
            it for the first one on its store.

    Attributes:
        alone: whether this rank has no peers.
        recovered: number of the last completed recovery; 0 before the first.
        replaces: whether this process replaces another one and has not rejoined the job.
        peers: the ranks of this host.
        state: this rank's state of the protocol. Its ``instance`` is the number of this job on its
            store, equal on all ranks and 0 before the job is counted.
    """

    def __init__(
        self,
        root: Root | None,
        rank: int,
        size: int,
        *,
        predecessor: Predecessor | None = None,
        marks: bool = False,
        watches: bool = False,
        counts: bool = True,
    ) -> None:
        self.rank = rank
        self.size = size
        self.alone = root is None
        self.recovered = 0
        self.replaces = predecessor is not None
        self._root = root
        self._client = StoreClient(root, self._join)
        self._stepping = threading.Lock()  # held for one protocol step, never during I/O
        self._joining: threading.Event | None = None
        self.peers = Peers(rank, watches=watches and root is not None)
        members = tuple(range(size)) if root is not None else (rank,)
        mark = process_mark() if marks else ""
        instance = 0 if counts else 1
        self.state = State(rank, members, host=self.peers.host, mark=mark, instance=instance)
        if predecessor is not None:
            self.state = self.state._replace(
                instance=predecessor.instance, confirmed=True, epoch=predecessor.epoch
            )
        self._last = 0
        self._ask_again = 0.0
        self._silent_s = 0.0
        # Limits the requests of all ranks of a large job to some thousand per second.
        self.pause_s = max(0.1, size / 2000)

    @property
    def grace_s(self) -> float:
        """Seconds within which ranks must respond after a failure."""
        return wait_seconds(GRACE) + 2 * self.pause_s

    @classmethod
    def of_world(
        cls, world: ProcessGroup, *, predecessor: Predecessor | None = None, marks: bool = False
    ) -> Rendezvous:
        """Return the rendezvous of the job with the default group ``world``. Local."""
        root = c10d.root_store_of_job(world) if c10d.has_peers() else None
        rank, size = world.rank(), world.size()
        return cls(root, rank, size, predecessor=predecessor, marks=marks, watches=True)

    # -- the job ----------------------------------------------------------------------------

    def count_job(self, root: Store, seconds: float = _COUNT_S) -> None:
        """Count this job on its store. Blocking, for at most ``seconds``; idempotent.

        All ranks call this when the job begins: the first operation may be called by some ranks
        only, and later another job may use the store's port. If it fails, the first operation
        raises.
        """
        if not Task(partial(self._join, root), "count").wait(seconds):
            self._give_up_joining()

    def connect_ahead(self) -> list[Task[Store]]:
        """Connect to the store in the background, and count this job if needed. Local.

        Also starts the thread with which this rank notifies the others if it can start no other.
        """
        self._client.reserve()
        return [] if self.alone else [self._client.connect()]

    def end(self) -> None:
        """Write to the store that this rank has ended the job. Waits a limited time."""
        self.peers.forget()
        if self.state.mark and not self.alone:
            with suppress(RuntimeError):
                self.ask(lambda store: store.set(f"ended/{self.rank}", "1"), Wait("end", _FLAG_S))

    def lose_state(self, reason: str) -> None:
        """Write that the job cannot continue, for its launcher. Waits a limited time."""
        with suppress(RuntimeError):
            self.ask(lambda store: store.set(LOST, reason), Wait("lost", _NOTIFY_S))

    def _join(self, root: Store) -> None:
        """Count this job, unless that is done, by one thread at a time. Blocking."""
        while True:
            mine = threading.Event()
            with self._stepping:
                if self.state.instance:
                    return
                joining = self._joining = self._joining or mine
            if joining is not mine:
                joining.wait()  # in a thread that can be abandoned
                continue
            try:
                self._count(root, mine)
            finally:
                if self._joining is mine:
                    self._give_up_joining()

    def _count(self, root: Store, mine: threading.Event) -> None:
        # A separate state machine, since an operation may begin while this runs.
        state, wait = self.state._replace(asked=0), Wait("join", _COUNT_S)
        state, command = step(state, Join())
        # A thread that was abandoned here would publish this process again.
        while command is not None and self._joining is mine:
            reply = execute(root, command, wait, self.pause_s, self.peers)
            state, command = step(state, Reply(state.asked, reply))
        with self._stepping:
            if not self.state.instance and self._joining is mine:
                self.state = self.state._replace(instance=state.instance, published=state.published)

    def _give_up_joining(self) -> None:
        """Let another thread count this job: the one that does it has ended, or may hang."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.set()

    def is_host(self) -> bool:
        """Whether the store's server is in this process. Local."""
        if self._root is None:
            return False
        try:
            return c10d.is_store_host(self._root(), self.rank)
        except RuntimeError:
            return False  # the job has ended

    # -- operations -------------------------------------------------------------------------

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

        Raises:
            ReloadpgError: this process has to rejoin the job first.
        """
        self.check_rejoined(operation)
        self._client.reserve()
        with self._stepping:
            self.state = self.state.open(tuple(phases), tuple(optional))
        return Round(self, operation, seconds)

    def check_rejoined(self, operation: str) -> None:
        """Raise if this process replaces another one and has not rejoined. Local."""
        if self.replaces:
            raise ReloadpgError(
                f"{operation}: this process replaces one of rank {self.rank} that has ended, and "
                "has not rejoined the job; nothing was changed. Call "
                "reloadpg.recovery.rejoin() first, once all groups are created."
            )

    def recover(self, phases: Sequence[str], reason: str, report: str, seconds: float) -> Round:
        """Request a recovery of all ranks, or join the requested one. Local, with a timeout.

        From then on, :meth:`recovery_requested` is true on ranks that have not joined it. Ranks
        that wait at a barrier of an earlier epoch read the request there. Two kinds of barriers
        end immediately: the first one of the operation that this rank would begin next, and those
        of a recovery in which this process' predecessor took part. ``reason`` is for ranks that
        wait elsewhere, and ``report`` for :meth:`gather`.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
        """
        event = Recover(reason, report, tuple(phases), self.replaces)
        self.drive(event, Wait("recover", min(seconds, _REQUEST_S), "flag"))
        self.peers.forget()  # a process that has ended may be replaced
        return Round(self, "recover", seconds)

    def cancel_recovery(self, error: BaseException) -> None:
        """Notify the ranks in a recovery that this one will not take part. Waits a limited time.

        Call it if this rank was interrupted before :meth:`recover` returned.
        """
        event = Fail(Decision("cancelled", self.rank, _text(error)))
        with suppress(ReloadpgError):
            self.drive(event, Wait("recover", _NOTIFY_S, "flag"))

    def complete_recovery(self) -> None:
        """Mark the current recovery as complete on all ranks. Local."""
        self.recovered, self.replaces = self.state.epoch, False

    def recovery_requested(self, every: float) -> bool:
        """Whether a recovery was requested that this rank has not joined. Local, with a timeout.

        Polls at most once per ``every`` seconds; otherwise returns the cached answer. False while
        the store does not respond, with a back-off of 2 s that doubles up to a minute.
        """
        if self.alone or time.monotonic() < self._ask_again:
            return self._last > self.state.epoch
        self._ask_again = time.monotonic() + every
        try:
            text = self.ask(lambda store: read(store, "recovery"), Wait("flag", _FLAG_S))
            self._last, self._silent_s = int(text or 0), 0.0
        except ReloadpgError:
            least, most = _SILENT_S
            self._silent_s = min(most, max(least, 2 * self._silent_s))
            self._ask_again = time.monotonic() + self._silent_s
        return self._last > self.state.epoch

    def gather(self, summary: Callable[[list[str]], str], seconds: float) -> None:
        """Read all ranks' reports to this recovery and write a summary. Blocking, with a timeout.

        One rank calls this, between two barriers of the recovery.
        """
        own = f"recovery/{self.state.epoch}"

        def question(store: Store) -> None:
            reports = [read(store, f"{own}/{rank}") or "{}" for rank in self.state.members]
            store.set(f"{own}/summary", summary(reports))

        with self._stepping:
            self.state = self.state.owning(f"{base(self.state.instance)}/{own}/summary")
        self.ask(question, Wait("recover", seconds, "agreed"))

    def summary(self, seconds: float) -> str:
        """Read the summary. Call it after the barrier that follows :meth:`gather`."""
        key, wait = f"recovery/{self.state.epoch}/summary", Wait("recover", seconds, "agreed")
        return self.ask(lambda store: store.get(key).decode(), wait)

    # -- the store --------------------------------------------------------------------------

    def ask(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Send requests to this job's part of the store; see :meth:`ask_root`."""
        return self.ask_root(
            lambda root: question(PrefixStore(base(self.state.instance), root)), wait
        )

    def ask_root(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Send requests to the whole store. Blocking, with a timeout; see :meth:`StoreClient.ask`.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
        """
        with self._errors(wait):
            return self._client.ask(question, wait)

    @contextmanager
    def _errors(self, wait: Wait) -> Iterator[None]:
        """Raise errors for the user in place of those of the store."""
        try:
            yield
        except StoreLost as error:
            raise store_lost(wait.operation, wait.phase, error) from error
        except StoreSilent:
            raise store_silent(
                wait.operation, wait.phase, seconds=wait.seconds, rank=self.rank, size=self.size
            ) from None
        finally:
            if not self.state.instance:  # the thread that counts this job may hang
                self._give_up_joining()

    def drive(self, event: Event, wait: Wait) -> State:
        """Pass an event to the protocol and perform its commands. Blocking, with a timeout.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
        """
        # While closing, all ranks respond now, so no wait is long.
        closes = isinstance(event, Close)
        pause_s = self.pause_s / 5 if closes else self.pause_s
        detail = None if closes else self._missing

        def perform_all(root: Store) -> None:
            number, command = self._step(event)
            hooks = barrier_hooks if isinstance(event, Arrive) else ()
            while command is not None:
                if hooks and self.state.is_waiting:
                    _run_hooks("waiting", wait.operation, wait.phase, self.rank)
                    hooks = ()
                reply = execute(root, command, wait, pause_s, self.peers, detail)
                number, command = self._step(Reply(number, reply))

        died = self.peers.dead if isinstance(event, Arrive) else None
        try:
            with self._errors(wait):
                self._client.ask(perform_all, wait, died)
        except PeerDied:
            seconds = wait_seconds(GRACE)
            return self.drive(Decide(self.death()), Wait(wait.operation, seconds, wait.phase))
        except ReloadpgError:
            self._step(Lost())
            raise
        return self.state

    def death(self) -> Decision:
        """The decision to write after processes of other ranks have ended. Local."""
        dead = self.peers.dead()
        text = f"its process on the host of rank {self.rank} has ended"
        return Decision("failed", dead[0], text, by=self.rank, dead=dead)

    def _step(self, event: Event) -> tuple[int, Command | None]:
        with self._stepping:
            self.state, command = step(self.state, event)
            return self.state.asked, command

    def _missing(self, root: Store) -> str:
        """Name the missing ranks, for the log of a long wait. Empty on most ranks of a large job.

        The answer costs the store's server as much as a barrier, so few ranks may ask for it.
        """
        state, rank = self.state, self.rank
        if not state.phases or (rank >= _LOOKING and rank & (rank - 1)):
            return ""
        late = absent(root, state.key("here"), state.members, _NAMED + 1)
        more = " and others" if len(late) > _NAMED else ""
        return f"missing: {named_ranks(late[:_NAMED])}{more}" if late else ""


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
            found = {subject: read(store, f"{stem}/{subject}") for subject in subjects}
            return {subject: text for subject, text in found.items() if text is not None}

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
        _run_hooks("before", self.operation, phase, self._rendezvous.rank)
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
                with wait.pause(pause) as seconds:
                    done = _all_ended(tasks, seconds)
                if done:
                    return
                pause = rendezvous.pause_s
                if self._advanced != seen:
                    seen = self._advanced
                    wait.extend()
                if rendezvous.peers.dead():
                    self._decide(rendezvous.death(), phase, doing())
                if not rendezvous.alone:
                    rendezvous.drive(Poll(seen - reported), wait)
                    reported = seen
                    if self._state.decision.kind and not self._state.decision.aligns:
                        self._conclude(phase, doing())
                wait.log(doing)
                if wait.left == 0 and self._advanced == seen:
                    self._decide(Decision("timeout", rendezvous.rank), phase, doing())
        finally:
            if done:
                self._work = None
            self._abandon()

    def _abandon(self) -> None:
        """Abandon the work, if it has not ended. Idempotent; an interrupt may end it anywhere."""
        if self._work is not None:
            attempt, tasks = self._work
            attempt.abandon()
            running = [one for one in enumerate(tasks) if not one[1].ended]
            self.unfinished += [one for one in running if one not in self.unfinished]
            self._work = None

    def advance(self) -> None:
        """Count progress of this rank. Local, from any thread."""
        self._advanced += 1

    # -- failures ---------------------------------------------------------------------------

    def fail(self, error: BaseException, *, cancels: bool = False) -> str | None:
        """Notify the other ranks that this one has failed. Local; waits a limited time.

        The ranks that did not respond are appended to a :class:`ReloadpgError`.

        Args:
            error: the cause.
            cancels: whether this rank will not take part in the next recovery.

        Returns:
            The phase at which the operation ended on all ranks. It may be later than the phase of
            this rank, if all ranks had just arrived at its barrier. None if all ranks have passed
            the last barrier: the operation is then complete in spite of the error.
        """
        _run_hooks("failing", self.operation, self.phase, self._rendezvous.rank)
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
        event = Fail(Decision(kind, rank, _text(error), dead=dead))
        try:
            seconds = max(_NOTIFY_S, self._rendezvous.grace_s)
            self._rendezvous.drive(event, Wait(self.operation, seconds, self.phase))
            self._close("", waits=isinstance(error, ReloadpgError))
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
        self._rendezvous.drive(Decide(decision), Wait(self.operation, wait_seconds(GRACE), phase))
        self._conclude(phase, doing)

    def _conclude(self, phase: str, doing: str = "") -> Decision:
        """Continue to the next barrier, or raise the error of the decision."""
        _run_hooks("after", self.operation, phase, self._rendezvous.rank)
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
        running[0].wait(left if len(tasks) == 1 else min(left, 0.01))


def _text(error: BaseException) -> str:
    """The type and message of an error, for the other ranks."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:4000]


def _run_hooks(moment: str, operation: str, phase: str, rank: int) -> None:
    for hook in barrier_hooks:
        hook(moment, operation, phase, rank)


def _append(error: BaseException, text: str) -> None:
    """Append text to the message of an error."""
    if text and isinstance(error, ReloadpgError):
        error.args = (f"{error}{text}", *error.args[1:])
