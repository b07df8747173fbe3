"""One offload, reload or recovery on this rank: a transaction over its groups.

It is begun (no other one can begin in this process), opened (its barriers are known), and either
committed by :meth:`Operation.complete`, or left to ``failure``, which leaves all groups failed or
as they were, on all ranks alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby

from ..errors import NotInstalledError, RebuildError, ReleaseError, ReloadpgError, did_you_mean
from ..groups.creation import HANDED_OVER
from ..groups.offloaded import UnderWay
from ..groups.proxy import GroupState, ReloadableProcessGroup
from ..groups.registry import Callback, Job, Options, registry
from ..groups.sets import ALL, TRAINER, Chosen
from ..rendezvous.plan import GroupPlan, Plan, Proposal
from ..rendezvous.round import Round
from ..rendezvous.store_client import StorePool
from ..rendezvous.worker_thread import Attempt
from .record import Record, Took, publish
from .report import OperationStatus, Report
from .strategy import Strategy

__all__ = ["Operation"]

PHASES = {
    "offload": ("enter", "quiesced", "suspended", "released"),
    "reload": ("enter", "room", "resumed", "rebuilt", "done"),
    "recover": ("enter", "agreed", "rebuilt", "done"),
}
SUSPENDING = ("suspended", "room", "resumed")
"""The phases of jobs that may suspend groups; others do without."""

OPTIONAL = {"offload": ("quiesced",), "reload": ("rebuilt",)}
"""The phases that are left out where no rank has callbacks and the job may not suspend groups."""

TOUCHING = ("suspended", "released", "resumed", "agreed", "rebuilt", "done")
"""The phases in which groups are touched: a round that ends there leaves them failed."""

Action = Callable[[ReloadableProcessGroup, Attempt, int], object]


class Operation:
    """One lifecycle operation on this rank.

    Args:
        name: ``offload``, ``reload`` or ``recover``.
        chosen: the sets that it is called for.

    Attributes:
        is_running: whether this operation is the one that runs in this process: see
            :meth:`Registry.begin`.
        job: the job; None if torch.distributed is not initialised.
        concerned: those of the chosen sets that it has something to do for.
        groups: their managed groups, in the order that all ranks share.
        opened: whether its barriers are known.
        round: the barriers to reach.
        strategy: what is done with each group.
        record: times, memory and warnings, for the report.
        activity: what this rank is doing, other than with groups, in words.
        was_offloaded: whether these sets were offloaded when it began.
        generations: of each group when it began.
        all_replaced: of a recovery, the ranks that were replaced since the last complete step.
        position: where this rank is in the loops of ``retrying`` once this is complete.
        generation: the job's generation once this operation is complete.
        report: what was done on this rank; there once the operation has ended.

    Raises:
        NotInstalledError: nothing is installed.
    """

    def __init__(self, name: str, chosen: Chosen = ALL) -> None:
        if registry.options is None:
            raise NotInstalledError(
                f"{name}() was called and nothing is installed; nothing was changed. Call "
                "reloadpg.install() before the process groups are created."
            )
        self.name = name
        self.options: Options = registry.options
        self.chosen = self.concerned = chosen
        self.record = Record(name, str(chosen))
        self.report = Report(name, False, 0, note="torch.distributed is not initialized")
        self.groups: list[ReloadableProcessGroup] = []
        self.activity = ""
        self.opened = False
        self.job: Job | None = None
        self.is_running = False
        self._completed = False
        self._current: dict[int, str] = {}
        self._took: list[Took] = []
        self._to_do = 0
        self._reserved: list[ReloadableProcessGroup] = []

    def begin(self) -> None:
        """Begin, unless that is done; all but a recovery also open their barriers. Local.

        Raises:
            ReloadpgError: another operation runs, or the groups are a parent process's.
        """
        if self.is_running:
            return
        self.is_running = True
        registry.begin(self)
        job = self.job = registry.job(self.name)
        if job is None:
            return
        self.world = job.world
        job.sets.separate(self.chosen)
        offloads = self.name == "offload"
        due = job.sets.where(self.chosen, lambda state: state.offloaded != offloads)
        self.was_offloaded = bool(due) != offloads
        if self.name == "reload" and due:
            self.concerned = due
        self.groups = [g for g in registry.managed() if g.set_name in self.concerned]
        if offloads:
            self.concerned = due.joined(group.set_name for group in self.groups if group.is_live)
        self._before = [(s, s.offloaded, s.cycles) for s in job.sets.separate(self.concerned)]
        self.generations = {group: group.generation for group in self.groups}
        self.generation = job.generation + (self.name == "reload" and self.was_offloaded)
        self._cycles = job.cycles + (not self.was_offloaded)
        self.record.warnings += self._unknown_sets()
        self.all_replaced, self.position = job.replaced, job.position
        self.strategy = Strategy(self.options.strategy, job)
        if self.name == "recover":  # it asks the store for its round
            return
        phases = [p for p in PHASES[self.name] if self.may_suspend or p not in SUSPENDING]
        if self.name == "reload" and not self.was_offloaded:
            phases = phases[:1]  # with nothing offloaded it ends when all ranks agree on that
        optional = () if self.may_suspend else OPTIONAL[self.name]
        seconds = self.options.timeout.total_seconds()
        self.open(job.rendezvous.open(self.name, phases, seconds, optional))

    def open(self, round_: Round) -> None:
        """Open the barriers of this operation. Local."""
        if self.job is not None:
            self.job.round, self.job.last_error = round_, ""
        self.round = round_
        self.opened = True
        self.record.measure("before")
        for callback in list(registry.callbacks.begin):
            callback()

    def reserve(self, under_way: UnderWay) -> None:
        """Let only this operation's threads use the groups that it touches, until it ends."""
        if self.opened:
            touched = [g for g in self.groups if self.name == "offload" or not g.is_live]
            self._reserved += touched
            for group in touched:
                group.reserve(under_way)

    @property
    def doing(self) -> str:
        """The groups that work is at now, for messages."""
        return ", ".join(self._current.values())

    def current(self, index: int) -> str:
        """The group that a thread works at, or worked at last, for messages."""
        return self._current.get(index, self.doing)

    def status(self) -> OperationStatus:
        """Return how far this operation is on this rank. Local, from any thread."""
        begun = self.record.started_at
        if not self.opened:
            return OperationStatus(self.name, 0, "", False, begun, begun)
        waiting = self.round.waiting
        return OperationStatus(
            self.name,
            self.round.sequence,
            self.round.phase,
            waiting,
            begun,
            self.round.since,
            "" if waiting else self.activity or self.doing,
            len(self._took),
            self._to_do,
        )

    @property
    def may_suspend(self) -> bool:
        """Whether this job may suspend groups: equal on all ranks with equal options."""
        return self.options.strategy.may_suspend

    @property
    def creators(self) -> int:
        """How many threads create groups: each has a store client of its own."""
        return min(self.options.parallelism, StorePool.clients_of_a_rank(self.world.size()))

    # -- barriers ---------------------------------------------------------------------------

    def agree(
        self,
        proposals: Sequence[Proposal] = (),
        subjects: Sequence[str] = (),
        *,
        extends: bool = False,
        **settings: str,
    ) -> dict[str, str]:
        """Agree with all ranks on what is about to be done; see :meth:`Round.agree`."""
        plan = self._plan(settings)
        with self.record.timed("wait.enter", measure=False):
            return self.round.agree("enter", plan, proposals, subjects, extends=extends)

    def barrier(self, phase: str) -> None:
        """Wait until all ranks are here; see :meth:`Round.barrier`.

        One of the optional barriers that no rank has asked for is passed at once.
        """
        if phase not in OPTIONAL.get(self.name, ()) or self.round.phase == phase:
            with self.record.timed(f"wait.{phase}", measure=False):
                self.round.barrier(phase)

    def _plan(self, settings: dict[str, str]) -> Plan:
        """What all ranks must have alike; for a recovery not what they have done with groups."""
        recovers = self.name == "recover"
        if self.job is not None and not recovers:
            sets = {"chosen sets": str(self.chosen), "state": self.job.sets.plan()}
            settings = {"generation": str(self.job.generation), **sets, **settings}
        options = {name: str(value) for name, value in self.options.settings().items()}
        groups = tuple(
            GroupPlan(
                group.group_name,
                made.ranks,
                0 if recovers else group.generation,
                "recreate" if recovers else self.strategy.planned(group),
                made.digest,
                group.set_name,
                made.summary,
            )
            for group in self.groups
            if not (made := group.construction).is_handed_over
            and not (recovers and group.state is GroupState.DESTROYED)
        )
        return Plan(self.name, settings, groups, options)

    # -- steps ------------------------------------------------------------------------------

    def do(self, phase: str, work: Callable[[], object], doing: str) -> None:
        """Do one blocking thing before a barrier; see :meth:`Round.run`."""
        with self._activity(doing):
            self.round.run(phase, lambda attempt, index: work(), lambda: doing)

    def each(
        self,
        phase: str,
        groups: Sequence[ReloadableProcessGroup],
        action: Action,
        parallelism: int | None = None,
    ) -> None:
        """Do something with each group, in this order, before a barrier.

        With a parallelism of N, each of N threads takes the next group when it has finished one:
        the rank works at its first N unfinished groups. All ranks share one order, so the first
        unfinished group of the job is being worked at by all of its members, and no topology can
        deadlock. The default group goes alone, and groups that users rebuild one after the other.

        Args:
            phase: the barrier after it.
            groups: in the order that all ranks share.
            action: called with the group, whether the result is still wanted, and the thread's
                number.
            parallelism: of this step; None for that of the installation.

        Raises:
            ReleaseError, RebuildError: the action failed on this rank; the cause is chained.
        """
        took: list[Took] = []
        if groups:
            self._took, self._to_do = took, len(groups)
        most = parallelism or self.options.parallelism
        for order, part in groupby(groups, lambda one: one.construction.order[0]):
            together = list(part)
            threads = 1 if order == HANDED_OVER[0] else min(most, len(together))
            work = partial(self._work, iter(together), threading.Lock(), action, took)
            with self.record.timed("groups", measure=False):
                self.round.run(phase, work, lambda: self.doing, threads)
        position = {group: index for index, group in enumerate(groups)}
        self.record.add(sorted(took, key=lambda one: position[one.group]), self.strategy)

    def _work(
        self,
        left: Iterator[ReloadableProcessGroup],
        taking: threading.Lock,
        action: Action,
        took: list[Took],
        attempt: Attempt,
        index: int,
    ) -> None:
        """Take the next group and do something with it, until none is left; one of the threads."""
        failure = ReleaseError if self.name == "offload" else RebuildError
        while not attempt.abandoned:
            with taking:
                group = next(left, None)
            if group is None:
                return
            self._current[index] = repr(group)
            begun = time.perf_counter()
            try:
                action(group, attempt, index)
            except Exception as cause:
                raise failure(
                    f"{self.name} failed at {group!r} on rank {self.world.rank()}: "
                    f"{type(cause).__name__}: {cause}"
                ) from cause
            took.append(Took(group, begun, (time.perf_counter() - begun) * 1e3))
            self._current.pop(index, None)
            self.round.advance()

    def due(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return those that were registered for a set of this operation."""
        return [one for one in callbacks if self.concerned.overlaps(one.sets)]

    def call(self, callbacks: Sequence[Callback]) -> None:
        """Call what users registered, in the caller's thread; an error names the callback."""
        with self.record.timed("callbacks"):
            for name, callback, _ in self.due(callbacks):
                try:
                    with self._activity(f"callback {name}"):
                        callback()
                except Exception as cause:
                    raise ReloadpgError(
                        f"{self.name}: callback {name} raised {type(cause).__name__}: {cause}"
                    ) from cause

    @contextmanager
    def _activity(self, text: str) -> Iterator[None]:
        """Say within this block what this rank is doing."""
        self.activity = text
        try:
            yield
        finally:
            self.activity = ""

    # -- the end ----------------------------------------------------------------------------

    def complete(self, note: str = "") -> None:
        """Commit: note what holds on all ranks once the operation is complete. Idempotent.

        An interrupt may end it anywhere, and the next call does all of it again: so each value is
        set, none is changed, and the flag comes last.
        """
        job = self.job
        if job is None or self._completed:
            return
        if self.name == "offload":
            job.cycles = self._cycles
            for state, offloaded, cycles in self._before:
                state.cycles, state.offloaded = cycles + (not offloaded), True
            for group in self.groups:
                group.clear_failure()
        elif self.was_offloaded:
            job.generation = self.generation
            for state, *_ in self._before:
                state.generation, state.offloaded = self.generation, False
        if self.name == "recover":
            job.rendezvous.complete_recovery()
            job.replaced = self.all_replaced
            job.position = max(job.position, self.position)
        self.report = self.record.report(job, note)
        self._completed = True

    def mark_offloaded(self) -> None:
        """Note that the sets of this operation have no communicators from now on. Local."""
        for state, *_ in self._before:
            state.offloaded = True

    def _unknown_sets(self) -> list[str]:
        """Warn of names that are no set on this rank, and are nearly the name of one."""
        known = {TRAINER, *(name or "" for name, _ in self.options.selection.sets)}
        known |= {group.set_name for group in registry.managed()}
        near = {name: did_you_mean(name, known) for name in sorted(self.chosen.names - known)}
        return [f"no group here is in the set {name}{text}" for name, text in near.items() if text]

    def fail(self, error: BaseException) -> None:
        """Note that the operation has ended with an error, on this rank."""
        if self.job is not None and self.opened:
            text = self.job.last_error = f"{type(error).__name__}: {error}"
            self.report = self.record.report(self.job, error=text)

    def release(self) -> None:
        """Let other threads use the groups, and end what waits for this operation's end."""
        for group in self._reserved:
            group.reserve(None)
        if self.opened:
            self.round.told.set()

    def publish(self) -> None:
        """Log the report, and hand it to those who asked for it."""
        if self.opened:
            publish(self.report)
