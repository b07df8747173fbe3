"""How the ranks of a job meet: bounded gates on the store, agreement, and verdicts.

A lifecycle operation is a *round*: a fixed sequence of *gates* that all ranks pass together. A
gate has one verdict, written once and read by all, so every rank of a round ends the same way:

* ``ok``: all ranks arrived (and, at an agreeing gate, asked for the same thing).
* ``failed``: a rank could not go on; it wrote why, and the others do not wait for it. They answer
  a roll call, so that a rank whose death made the first one fail is named too.
* ``timeout``: a rank gave up waiting; the verdict names the ranks that were missing, and a late
  rank that arrives afterwards gets the same verdict at once.
* ``disagree``: the ranks asked for different things; the verdict spells out the first.

A rank that is interrupted just as the last rank arrives does not know how the gate ended until it
tries to write its failure: the verdict that stands says it, see :meth:`Round.fail`.

Cost of a gate: five short store operations a rank, whatever the number of ranks. Agreement adds
one: each group's members add numbers that sum to zero exactly if all of them describe the group
alike. Plans are exchanged in full only after that sum has shown a difference. What a rank has to
say about a group is an offer, kept under the group's name for those who ask; a rank asks only
where somebody has offered something, and only about its own groups. After a time-out one rank
looks for the missing ones, and the others read what it found.

Keys are retired: when a gate is passed, all ranks have read the gate before it, and its keys are
deleted (each rank its own, rank 0 the shared ones). At most two gates' keys are in the store, and
those of rounds that failed since the last gate that was passed.

Rounds never use a collective of any process group, and they use a store connection of their own,
since a blocked wait of torch's own code would hold up every other user of the same connection.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from . import c10d
from .connection import Connection
from .errors import RebuildError, ReleaseError, ReloadpgError, RendezvousTimeoutError
from .gates import GRACE_S, Gate, Keys, LongWait
from .plans import Offer, Plan
from .supervised import Attempt, Task
from .verdicts import Verdict

__all__ = ["Rendezvous", "Round"]

logger = logging.getLogger("reloadpg")

T = TypeVar("T")

_NEXT_S = 0.2
"""How long a rank that was given up on looks whether the others call again at this moment."""

_TELL_S = 5.0
"""How long a rank that fails tries to tell the others."""


class Rendezvous:
    """The meeting place of one job's ranks.

    Args:
        root: the job's store; None for a rank that has no peers.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, root: Store | None, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.keys = Keys()
        self._connection = Connection(root) if root is not None else None
        self._instance: int | None = None
        self._counting = threading.Lock()
        self._sequence = 0

    @classmethod
    def of_world(cls, world: ProcessGroup) -> Rendezvous:
        """The rendezvous of the job that ``world`` is the default group of. Local."""
        root = c10d.root_store(world) if c10d.has_peers() else None
        rendezvous = cls(root, world.rank(), world.size())
        if rendezvous._connection is not None:
            # Counted by all ranks alike: an operation that only some call must not be the one to.
            rendezvous._connection.connect_ahead(rendezvous._part)
        return rendezvous

    @property
    def instance(self) -> int:
        """Number of this job among those on its store, equal on all ranks; 0 before they met."""
        return self._instance or 0

    @property
    def alone(self) -> bool:
        """Whether this rank has no peers to meet."""
        return self._connection is None

    def open(self, operation: str, gates: Sequence[str], seconds: float) -> Round:
        """Begin a round. Local; all ranks must open their rounds in the same order."""
        self._sequence += 1
        return Round(self, operation, self._sequence, gates, seconds)

    def skip(self, sequence: int) -> int:
        """Count a round that the others have ended without this rank; the number of the next."""
        self._sequence = max(self._sequence, sequence + 1)
        return sequence + 1

    def again(self, ended: Round, gates: Sequence[str]) -> Round:
        """Begin the second round of an operation, with the number of the first.

        A rank that leaves before it hears of it stays in step with the others: no round is
        counted on some ranks only.
        """
        return Round(self, ended.operation, ended.sequence, gates, ended.seconds, again=True)

    def ask(self, question: Callable[[Store], T], seconds: float, purpose: str) -> T:
        """Ask this rendezvous' own part of the store; see :meth:`Connection.ask`."""
        return self.ask_root(lambda root: question(self._part(root)), seconds, purpose)

    def ask_root(self, question: Callable[[Store], T], seconds: float, purpose: str) -> T:
        """Ask the job's store; see :meth:`Connection.ask`."""
        if self._connection is None:
            raise ReloadpgError(f"{purpose}: this rank has no peers and no store")
        return self._connection.ask(question, seconds, purpose)

    def _part(self, root: Store) -> Store:
        # A second job on the same store gets keys of its own: each rank counts its jobs there.
        with self._counting:
            if self._instance is None:
                self._instance = root.add(f"reloadpg/instance/{self.rank}", 1)
        return PrefixStore(f"reloadpg/{self._instance}", root)


class Round:
    """One lifecycle operation on this rank: the gates it still has to pass, in order.

    Attributes:
        operation: its name, for messages.
        sequence: number of the round, equal on all ranks that meet in it.
        waited_ms: time spent waiting for other ranks, by gate.
        left_work: whether work was given up that has not ended: it may hold a store client.
        lost: whether the store has failed this round.
        verdict: what ended the round early, as all ranks read it; None before that.
    """

    def __init__(
        self,
        rdv: Rendezvous,
        operation: str,
        sequence: int,
        gates: Sequence[str],
        seconds: float,
        *,
        again: bool = False,
    ) -> None:
        self.operation = operation
        self.sequence = sequence
        self.waited_ms: dict[str, float] = {}
        self._rdv = rdv
        self._phases = list(gates)  # still to pass
        self._gates: dict[str, Gate] = {}
        self.seconds = seconds
        self._mark = "+" if again else ""
        self._arrived = ""  # the last gate at which this rank may have been counted
        self._ended: str | None = None  # the gate whose verdict ended the round
        self.lost = False
        self.left_work = False
        self.verdict: Verdict | None = None

    @property
    def label(self) -> str:
        """What no other round on the same store has, of this job or one before it."""
        return f"{self._rdv.instance}.{self.sequence}{self._mark}"

    # -- what the lifecycle calls -----------------------------------------------------------

    def agree(
        self, phase: str, plan: Plan, offers: Sequence[Offer] = (), asks: Sequence[str] = ()
    ) -> dict[str, str]:
        """Pass a gate at which all ranks must ask for the same. Collective, blocking, bounded.

        Args:
            phase: the gate.
            plan: what this rank is about to do.
            offers: what this rank makes known.
            asks: the subjects of which it wants to know what any rank has offered.

        Returns:
            The texts offered, by subject; those asked for, where there is one.

        Raises:
            DisagreementError: on all ranks; nothing was touched.
            RendezvousTimeoutError, PeerFailedError: as :meth:`gate`.
        """
        verdict = self._meet_in_step(phase, plan, offers)
        if not verdict.offered or not asks:
            return {}
        if self._rdv.alone:
            return {offer.subject: offer.text for offer in offers if offer.subject in asks}
        gate = self._gate(phase)
        return self._ask(lambda store: gate.hear(store, asks), self.seconds, phase)

    def gate(self, phase: str) -> None:
        """Wait until all ranks are here. Collective, blocking, bounded.

        Raises:
            RendezvousTimeoutError: not all ranks came within the bound.
            PeerFailedError: a rank failed on its way here.
        """
        self._pass(phase)

    def run(self, phase: str, work: Callable[[Attempt], object], doing: Callable[[], str]) -> None:
        """Do this rank's own part on the way to a gate; hear of failures elsewhere meanwhile.

        Args:
            phase: the gate that comes after the work.
            work: runs in a thread of its own, and is abandoned when this raises.
            doing: says what the work is at now, for messages.

        Raises:
            PeerFailedError: another rank failed meanwhile.
            RendezvousTimeoutError: the work did not end within the bound.
        """
        attempt = Attempt()
        try:
            self.left_work = True
            task = Task(work, self.operation, attempt)
            self._attend(phase, task, doing)
            self.left_work = False
            task.result()
        except BaseException:
            attempt.abandon()
            raise

    def fail(self, error: BaseException) -> str | None:
        """Tell the other ranks that this one cannot go on. Local, bounded.

        A :class:`ReloadpgError` gets the names of the ranks that did not answer.

        Returns:
            The gate at which the round ended, on all ranks alike. It may be a later one than this
            rank knows of: all had arrived at the gate just before. None: all ranks have passed
            the last gate, so the operation is complete in spite of the error.
        """
        if self._ended is not None or not self._phases:
            return self._ended
        at_group = isinstance(error, (ReleaseError, RebuildError))
        phases = list(self._phases)
        if self._rdv.alone or self.lost:
            self._ended = self.supposed_end
            if self._rdv.alone:
                self.verdict = Verdict("failed", self._rdv.rank, at_group=at_group)
            return self._ended
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        failed = Verdict("failed", self._rdv.rank, text[:4000], at_group=at_group)

        def tell(store: Store) -> tuple[str | None, Verdict]:
            stands = failed
            for phase in phases:
                stands = self._gate(phase).fail(
                    store, failed, waits=isinstance(error, ReloadpgError)
                )
                if not stands.ok:
                    return phase, stands
            return None, stands

        try:
            self._ended, stands = self._ask(tell, _TELL_S, phases[0])
            self._phases.clear()
            self.verdict = stands
            _add_to(error, stands.silence())
        except ReloadpgError as lost:
            logger.warning("could not tell the other ranks of a failure: %s", lost)
            _add_to(error, f"\nThe other ranks could not be told: {lost}")
            self._ended = self.supposed_end
        return self._ended

    @property
    def supposed_end(self) -> str | None:
        """The gate at which the round ends for a rank that cannot ask the store.

        How a gate ended at which it was counted it does not know: suppose that the others have
        gone on.
        """
        if self._ended is not None or not self._phases:
            return self._ended
        counted = self._phases[0] == self._arrived and len(self._phases) > 1
        return self._phases[1 if counted else 0]

    # -- gates ------------------------------------------------------------------------------

    def _gate(self, phase: str) -> Gate:
        gate = self._gates.get(phase)
        if gate is None:
            name = f"{self.sequence}{self._mark}/{phase}"
            gate = Gate(name, self._rdv.keys, self._rdv.rank, self._rdv.size)
            self._gates[phase] = gate
        return gate

    def _pass(self, phase: str, plan: Plan | None = None, offers: Sequence[Offer] = ()) -> Verdict:
        if self._phases[:1] != [phase]:
            raise ReloadpgError(f"gate {phase!r} is not the next of {self._phases}")
        log = self._long_wait(phase)
        verdict = Verdict("ok", offered=bool(offers))
        if not self._rdv.alone:
            gate = self._gate(phase)
            self._arrived = phase
            verdict = self._ask(
                lambda store: gate.meet(store, plan, offers, log),
                self.seconds + 2 * GRACE_S + 0.5,
                phase,
            )
        self.waited_ms[phase] = log.waited * 1e3
        self._conclude(phase, verdict)
        log.over()
        return verdict

    def _meet_in_step(self, phase: str, plan: Plan, offers: Sequence[Offer]) -> Verdict:
        """Pass the first gate, in the round that the others are in.

        A rank that did not call at all must not stay one behind for ever. Nothing was touched.
        """
        while True:
            try:
                return self._pass(phase, plan, offers)
            except RendezvousTimeoutError:
                ended = self.verdict
                if ended is None or self._rdv.rank not in ended.missing:
                    raise
                if not self._ask(self._next_has_begun, 2 * GRACE_S, phase):
                    raise
                self.sequence = self._rdv.skip(self.sequence)
                self._gates.clear()
                self._ended = self.verdict = None

    def _next_has_begun(self, store: Store) -> bool:
        key = f"{self.sequence + 1}/{self._phases[0]}/count"
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=_NEXT_S))
        return bool(store.check([key]))

    def _conclude(self, phase: str, verdict: Verdict) -> None:
        if verdict.ok:
            self._phases.pop(0)
            return
        self._ended = phase
        self.verdict = verdict
        raise verdict.error(
            self.operation, phase, seconds=self.seconds, rank=self._rdv.rank, size=self._rdv.size
        )

    def _attend(self, phase: str, task: Task[object], doing: Callable[[], str]) -> None:
        """Wait until the work has ended; raise if it takes too long or another rank fails."""
        log = self._long_wait(phase)
        # Most work ends at once and then nobody asks the store; later, all ranks together ask it
        # some thousand times a second at most.
        pause = max(0.1, self._rdv.size / 2000)
        if task.wait(min(0.2, self.seconds)):
            return
        while not task.wait(min(pause, log.end - time.monotonic())):
            if not self._rdv.alone:
                verdict = self._ask(self._gate(phase).look, 2 * GRACE_S, phase)
                if verdict is not None:
                    self._conclude(phase, verdict)
            log.maybe(doing)
            if time.monotonic() >= log.end:
                self._stuck(phase, doing())

    def _stuck(self, phase: str, doing: str) -> None:
        rank = self._rdv.rank
        verdict = Verdict("timeout", rank, stuck=(rank,), doing=doing)
        if not self._rdv.alone:
            gate = self._gate(phase)
            verdict = self._ask(lambda store: gate.stuck(store, doing), 4 * GRACE_S, phase)
        self._conclude(phase, verdict)

    def _ask(self, question: Callable[[Store], T], seconds: float, phase: str) -> T:
        try:
            return self._rdv.ask(question, seconds, f"{self.operation}, phase {phase!r}")
        except ReloadpgError as error:
            self.lost = True
            if isinstance(error, RendezvousTimeoutError):
                error.phase = phase
            raise

    def _long_wait(self, phase: str) -> LongWait:
        return LongWait(f"{self.operation}, phase {phase}", self.seconds)


def _add_to(error: BaseException, text: str) -> None:
    """Lengthen the message of an error of ours."""
    if text and isinstance(error, ReloadpgError):
        error.args = (f"{error}{text}", *error.args[1:])
