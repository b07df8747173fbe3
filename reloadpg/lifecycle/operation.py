"""One offload, reload or recovery on this rank: its barriers, and its steps between them.

It begins (no other one can begin in this process), opens (its barriers are known), and is either
committed by :meth:`Operation.complete` or ended by ``failure``, which leaves all groups failed or
unchanged on all ranks. :class:`.transaction.Transaction` has what it changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import groupby

from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import (
    NotInstalledError,
    RebuildError,
    ReleaseError,
    ReloadpgError,
)
from ..groups.creation import HANDED_OVER
from ..groups.managed import ManagedGroup
from ..groups.offloaded import UnderWay
from ..groups.region import refuse_undeclared
from ..groups.registry import Options, registry
from ..groups.selection import Selection
from ..groups.sets import ALL, Chosen
from ..rendezvous.plan import Proposal
from ..rendezvous.round import Round
from ..rendezvous.store_client import StorePool
from ..rendezvous.worker_thread import Attempt
from ..reports import OperationStatus, Report
from ..settings import IS_OFF
from .callbacks import Callback, callbacks
from .job import Job, jobs
from .record import Record
from .transaction import Transaction

PHASES = {
    "offload": ("enter", "quiesced", "suspended", "released"),
    "reload": ("enter", "room", "resumed", "done"),
    "recover": ("enter", "agreed", "done"),
}
SUSPENDING = ("quiesced", "suspended", "room", "resumed")
"""The phases that exist only in jobs that suspend groups."""

TOUCHING = ("suspended", "released", "resumed", "agreed", "done")
"""The phases in which groups change: if a round ends there, the groups have failed."""

_DEFAULTS = Options(Selection.of(None, 2, True), "recreate", timedelta(minutes=5))
"""The options of an operation that does nothing, because the library is off."""

_OBSTACLE = "obstacle"
"""Subject of the proposals to recreate groups that were to be suspended."""

Action = Callable[[ManagedGroup, Attempt, int], object]


class Operation:
    """One lifecycle operation on this rank.

    Args:
        name: ``offload``, ``reload`` or ``recover``.
        chosen: the sets named in the call.
        skip: of a reload, the names of the registered groups to leave out.

    Attributes:
        is_running: whether this operation runs in this process: see :meth:`Registry.begin`.
        job: the job; None if torch.distributed is not initialized.
        changes: what it changes; unset without a job.
        may_suspend: whether this job suspends groups where it can: equal on all ranks.
        opened: whether its barriers are known.
        round: the barriers to reach.
        record: times, memory and warnings, for the report.
        activity: this rank's current activity other than with groups, as text.
        report: the report of this rank; set when the operation has ended.

    Raises:
        NotInstalledError: ``install`` was not called.
        InvalidOptionError: ``install`` does not declare a chosen set.
    """

    def __init__(self, name: str, chosen: Chosen = ALL, skip: frozenset[str] = frozenset()) -> None:
        if registry.options is None and not registry.off:
            raise NotInstalledError(
                f"{name}() was called, but reloadpg is not installed; nothing was changed. Call "
                "reloadpg.install() before the process groups are created."
            )
        self.name = name
        self.options = registry.options or _DEFAULTS
        if not chosen.others and registry.options is not None:
            refuse_undeclared(sorted(chosen.names), self.options.selection.set_names, name)
        self.may_suspend = self.options.strategy == "suspend"
        self.chosen = chosen
        self.skip = skip
        self.record = Record(name, chosen)
        note = IS_OFF if registry.off else "torch.distributed is not initialized"
        self.report = Report(operation=name, changed=False, generation=0, note=note)
        self.activity = ""
        self.opened = False
        self.job: Job | None = None
        self.is_running = False
        self._completed = False
        self._current: dict[int, str] = {}
        self._took: dict[ManagedGroup, tuple[float, float]] = {}  # begin and duration
        self._to_do = 0
        self._reserved: list[ManagedGroup] = []
        self._under_way: UnderWay | None = None

    def begin(self) -> None:
        """Begin the operation and, except in a recovery, open its barriers. Local, idempotent.

        Raises:
            ReloadpgError: another operation runs, or the groups belong to a parent process.
        """
        if self.is_running:
            return
        self.is_running = True
        jobs.begin(self)
        job = self.job = jobs.current(self.name)
        if job is None:
            return
        self.world = job.world
        self.changes = Transaction(self.name, self.chosen, job, self.options, self.skip)
        if self.name == "recover":  # the store determines its round
            return
        phases = [p for p in PHASES[self.name] if self.may_suspend or p not in SUSPENDING]
        if self.name == "reload" and not self.changes.was_offloaded:
            phases = phases[:1]  # nothing is offloaded: it ends when all ranks agree on that
        seconds = self.options.timeout.total_seconds()
        self.open(job.rendezvous.open(self.name, phases, seconds))

    def open(self, round_: Round) -> None:
        """Open the barriers of this operation, or those that take their place. Local."""
        if self.job is not None:
            self.job.round, self.job.last_error = round_, ""
        self.round = round_
        if self.opened:
            return
        self.opened = True
        if text := c10d.devices.difference():
            self.record.warnings.append(text)
        self.record.measure("before")
        for callback in list(callbacks.begin):
            callback()

    def reserve(self, under_way: UnderWay) -> None:
        """Restrict the groups that it changes to this operation's threads until it ends.

        Groups that an asynchronous save uses follow when :meth:`await_saves` has returned.
        """
        self._under_way = under_way
        if self.opened:
            saving = self._saves().values()
            for group in self.changes.groups:
                if group.proxy not in saving and (self.name == "offload" or not group.is_live):
                    self._reserved.append(group)
                    group.reserve(under_way)

    def reserve_all(self) -> None:
        """Reserve the groups that a reload has only now released."""
        if self._under_way is not None:
            self.reserve(self._under_way)

    def _saves(self) -> dict[futures.Future[object], ProcessGroup]:
        """The asynchronous saves on groups whose backend of the CPU will be released. Local."""
        groups = self.changes.groups if self.name == "offload" else []
        return c10d.saves_on(
            [g.proxy for g in groups if g.is_live and "cpu" in g.construction.selected]
        )

    def doing(self, index: int = -1) -> str:
        """The group that a thread processes, otherwise those of all threads, for messages."""
        return self._current.get(index, ", ".join(self._current.values()))

    def status(self) -> OperationStatus:
        """Return the progress of this operation on this rank. Local, from any thread."""
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
            "" if waiting else self.activity or self.doing(),
            len(self._took),
            self._to_do,
        )

    @property
    def creators(self) -> int:
        """Number of threads that create groups, each with a separate store client."""
        return min(self.options.threads, StorePool.clients_of_a_rank(self.world.size()))

    # -- barriers ---------------------------------------------------------------------------

    def agree(self, obstacle: str = "", **settings: str) -> str:
        """Agree on the plan with all ranks; see :meth:`Round.agree`.

        Args:
            obstacle: why this rank cannot suspend; one obstacle decides for all ranks.
            settings: further arguments of the call that must be equal on all ranks.

        Returns:
            An obstacle and its rank, the same on all ranks; empty if no rank has one.
        """
        plan, given, needed = self.changes.plan(settings), [], []
        if obstacle:
            given = [Proposal(_OBSTACLE, f"rank {self.world.rank()}: {obstacle}")]
        if self.name == "offload" and self.may_suspend:
            needed = [_OBSTACLE]
        with self.record.timed("wait.enter", measure=False):
            proposed = self.round.agree("enter", plan, given, needed)
        return proposed.get(_OBSTACLE, "")

    def barrier(self, phase: str) -> None:
        """Wait until all ranks arrive; see :meth:`Round.barrier`."""
        with self.record.timed(f"wait.{phase}", measure=False):
            self.round.barrier(phase)

    # -- steps ------------------------------------------------------------------------------

    def await_saves(self, phase: str) -> None:
        """Wait for asynchronous saves that use groups to release; with a timeout.

        A checkpoint whose group is released is lost, and only the future of the save says so.
        """
        if saves := self._saves():
            names = ", ".join(dict.fromkeys(map(repr, saves.values())))
            doing = f"waiting for an async_save of a checkpoint that uses {names}"
            with self.record.timed("saves"):
                self.do(phase, partial(futures.wait, saves), doing)
            self.reserve_all()

    def do(self, phase: str, work: Callable[[], object], doing: str) -> None:
        """Run blocking work before a barrier; see :meth:`Round.run`."""
        with self._activity(doing):
            self.round.run(phase, lambda attempt, index: work(), lambda: doing)

    def each(
        self,
        phase: str,
        groups: Sequence[ManagedGroup],
        action: Action,
        parallelism: int | None = None,
    ) -> None:
        """Apply an action to each group, in this order, before a barrier.

        With a parallelism of N, each of N threads takes the next group when it has finished one.
        All ranks share one order, so all members of the first unfinished group of the job are
        working on it, and no topology can deadlock, provided that a thread that waits for peers
        holds no lock that another one needs (:mod:`reloadpg.c10d.nccl`). The default group is
        processed alone. Groups that users rebuild, and by default those of a backend whose locks
        are unknown, are processed one after the other.

        Args:
            phase: the barrier after it.
            groups: in the order that all ranks share.
            action: called with the group, the cancellation token, and the thread's number.
            parallelism: number of threads of this step; None for that of the installation.

        Raises:
            ReleaseError, RebuildError: the action failed on this rank; the cause is chained.
        """
        if groups:
            self._took, self._to_do = {}, len(groups)
        most = parallelism or self.options.threads
        for order, part in groupby(groups, lambda group: group.construction.order[0]):
            together = list(part)
            alone = order == HANDED_OVER[0] or (
                self.options.parallelism is None
                and any(c10d.needs_one_thread(g.construction.released.values()) for g in together)
            )
            threads = 1 if alone else min(most, len(together))
            work = partial(self._work, deque(together), action, self._took)
            with self.record.timed("groups", measure=False):
                self.round.run(phase, work, self.doing, threads)
        for group in groups:
            self.record.add(group, *self._took[group])

    def _work(
        self,
        left: deque[ManagedGroup],
        action: Action,
        took: dict[ManagedGroup, tuple[float, float]],
        attempt: Attempt,
        index: int,
    ) -> None:
        """Process groups until none is left; the body of one thread."""
        failure = ReleaseError if self.name == "offload" else RebuildError
        while not attempt.abandoned:
            try:
                group = left.popleft()
            except IndexError:
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
            took[group] = begun, (time.perf_counter() - begun) * 1e3
            self._current.pop(index, None)
            self.round.advance()

    def due(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return the callbacks that were registered for a set of this operation."""
        concerned = self.changes.concerned
        return [c for c in callbacks if c.group is None and concerned.overlaps(c.sets)]

    def of_generations(
        self, callbacks: Sequence[Callback], groups: Sequence[ManagedGroup]
    ) -> list[Callback]:
        """Return those of ``on_generation`` for these groups, in the order that members share."""

        def call(function: Callable[..., object], group: ManagedGroup) -> None:
            if group.is_live:  # an earlier callback may have destroyed it
                function(group.proxy, group.backend)

        return [
            Callback(f"{entry.name} for {group!r}", partial(call, entry.function, group))
            for group in groups
            for entry in callbacks
            if entry.group is not None and entry.group() is group.proxy
        ]

    def call(self, callbacks: Sequence[Callback]) -> None:
        """Call user callbacks in the caller's thread; an error names the callback."""
        with self.record.timed("callbacks"):
            for name, callback, *_ in self.due(callbacks):
                try:
                    with self._activity(f"callback {name}"):
                        callback()
                except Exception as cause:
                    raise ReloadpgError(
                        f"{self.name}: callback {name} raised {type(cause).__name__}: {cause}"
                    ) from cause

    def call_after(self, callbacks: Sequence[Callback]) -> None:
        """Call all of these callbacks after the last barrier, and raise the first error.

        The groups are live on all ranks by then, so a callback may run collectives on them, and its
        error is this rank's alone: the operation is complete.
        """
        if self.job is None:
            return
        self.changes.commit()
        self.job.settle(self.chosen)
        first: ReloadpgError | None = None
        for callback in self.due(callbacks):
            try:
                self.call([callback])
            except ReloadpgError as error:
                first = first or error
        if first is not None:
            self.job.owed.append(self.chosen)
            raise ReloadpgError(
                f"{first}. All groups are live on all ranks. reload() on all ranks calls the "
                "callbacks of this rank again."
            ) from first.__cause__

    @contextmanager
    def _activity(self, text: str) -> Iterator[None]:
        """Set ``activity`` within this block."""
        self.activity = text
        try:
            yield
        finally:
            self.activity = ""

    # -- the end ----------------------------------------------------------------------------

    def complete(self, note: str = "") -> None:
        """Commit, and build the report. Idempotent; an interrupt may end it at any point."""
        if self.job is None or self._completed:
            return
        self.changes.commit()
        self.report = self.record.report(self.job, note)
        self._completed = True

    def release(self) -> None:
        """Lift the restriction to the operation's threads, and wake threads that wait for it."""
        for group in self._reserved:
            group.reserve(None)
        if self.opened:
            self.round.notified.set()
