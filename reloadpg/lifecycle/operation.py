"""One offload, reload or recovery on this rank: what it changes, its barriers, its steps, its end.

It runs in a separate thread (:mod:`.pending`), as the ``with`` block of an :class:`Operation`: its
steps in order, each up to the next barrier. An error leaves the groups unchanged or failed, on all
ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby

from torch.distributed import ProcessGroup

from ..c10d import devices, memory, nccl
from ..c10d.stores import Clients
from ..errors import NotInstalledError, RebuildError, ReleaseError, ReloadpgError
from ..groups.borrowed import borrowed
from ..groups.creation import HANDED_OVER
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState, UnderWay
from ..groups.registry import Options, registry
from ..groups.sets import SetState, concerns
from ..rendezvous.plan import GENERATION, Entry, Plan
from ..rendezvous.round import Interrupted, Round
from ..reports import (
    GroupReport,
    OperationStatus,
    RankFault,
    Report,
    Span,
    groups_of_one_rank,
)
from ..settings import IS_OFF
from ..threads import CancelToken, Deadline, Task
from .callbacks import Callback, callbacks
from .destroy import abort
from .job import Job, Unfinished, jobs
from .status import bypassed_groups, dropped_groups, not_reloadable, nothing_released
from .suspend import planned

Action = Callable[[ManagedGroup, CancelToken, int], object]
"""What a thread does with a group. It has the token of its results, which are committed only while
they are wanted, and the number of its thread."""

PHASES = {
    "offload": ("enter", "quiesced", "suspended", "released"),
    "reload": ("enter", "room", "resumed", "done"),
    "recover": ("enter", "done"),
}
SUSPENDING = ("quiesced", "suspended", "room", "resumed")
"""The phases that exist only in jobs that suspend groups."""

TOUCHING = ("suspended", "released", "resumed", "done")
"""The phases in which groups change: if a round ends there, the groups have failed."""

_OUTSIDE = (
    "If its members outside the job have ended, destroy_process_group(group) leaves it out of the "
    "next reload; pass its successor to register_group()."
)
"""What to do about a registered group that cannot be rebuilt, for the error."""

_ABORT_S = 2.0
"""Seconds that a failed operation waits for its communicators to abort before it raises."""

_UNFINISHED_S = 10.0
"""Seconds that an operation waits for communicators that a failed one is still destroying."""


_CREATORS = 16384
"""Maximum number of creating threads over all ranks of a job (or one per rank, if it has more
ranks). The store's server has a file descriptor for each, and 65,536 is a common limit."""


class Operation:
    """One lifecycle operation on this rank.

    Args:
        name: ``offload``, ``reload`` or ``recover``.
        named: the sets named in the call; empty for all.

    Attributes:
        is_running: whether it runs in this process: see :meth:`Jobs.begin`.
        job: the job; None if torch.distributed is not initialized.
        may_suspend: whether this job suspends groups where it can: equal on all ranks.
        chosen: the sets that it is for.
        concerned: the chosen sets that it will change.
        changes: whether a set is to be offloaded or reloaded: not if it is already.
        generation: the job's generation after a reload or recovery.
        whole: whether all groups of the chosen sets are rebuilt, whatever their state.
        committed: whether all ranks have passed the last barrier.
        round: the barriers to reach; None before this rank has entered the operation.
        activity: this rank's current activity other than with groups, as text.
        reports: the reports on the groups that it has changed, by name.
        warnings: for the report, as are ``note`` and ``faults``.
        report: the report of this rank; set when the operation has ended.
        in_caller: calls a function in the thread of the caller, if that waits.
        under_way: what gives its threads exclusive use of the groups, if the caller does not wait.

    Raises:
        NotInstalledError: ``install`` was not called.
        InvalidOptionError: ``install`` does not declare a chosen set.
    """

    def __init__(self, name: str, named: frozenset[str] = frozenset()) -> None:
        if registry.options is None and not registry.off:
            raise NotInstalledError(
                f"{name}() was called, but reloadpg is not installed; nothing was changed. Call "
                "reloadpg.install() before the process groups are created."
            )
        self.name = name
        self.options = registry.options or Options()  # it does nothing if the library is off
        if registry.options is not None:
            registry.options.selection.refuse_undeclared(sorted(named), name)
        self.may_suspend = self.options.strategy == "suspend"
        self.chosen = named or registry.sets
        self._shown_sets = "all" if self.chosen == registry.sets else ", ".join(sorted(named))
        note = IS_OFF if registry.off else "torch.distributed is not initialized"
        self.report = Report(operation=name, changed=False, generation=0, note=note)
        self.started_at = time.time()
        self.reports: dict[str, GroupReport] = {}
        self.warnings: list[str] = []
        self.faults: tuple[RankFault, ...] = ()
        self.note = self.activity = ""
        self.job: Job | None = None
        self.under_way: UnderWay | None = None
        self._planned: dict[ManagedGroup, ProcessGroup] = {}  # so that none is deleted
        self.is_running = False
        self.in_caller: Callable[[Callable[[], object]], object] = lambda call: call()
        self._round: Round | None = None
        self._interrupt: BaseException | None = None
        self.committed = False
        self._busy: dict[int, str] = {}  # the group that each thread processes
        self._took: dict[ManagedGroup, float] = {}  # milliseconds
        self._to_do = 0
        self._started = time.perf_counter()
        self._spans: list[Span] = []
        self._before: dict[str, int] = {}

    # -- its begin and its end --------------------------------------------------------------

    def begin(self) -> None:
        """Begin the operation in this process. Local.

        Raises:
            ReloadpgError: another operation runs, or the groups belong to a parent process.
        """
        self.is_running = True
        jobs.begin(self)
        job = jobs.current(self.name)
        if job is not None:
            self.world = job.world
            if text := devices.difference():
                self.warnings.append(text)
            self._choose(job)
        self.job = job  # last: an interrupt before this line has changed nothing

    def __enter__(self) -> Operation:
        return self

    def enter(self, seconds: float = 0, *, reason: str = "") -> None:
        """Enter the next operation of the job with all ranks; see :meth:`Round.enter`."""
        if self._round is None:
            self._before = memory.in_use()
        self._known.last_error = ""
        round_ = self._new_round(self._known, seconds)
        if self._interrupt is not None:
            round_.interrupt()
        round_.enter(reason)

    def _new_round(self, job: Job, seconds: float = 0) -> Round:
        """The next operation of the job, which this rank has not entered yet."""
        suspends = self.may_suspend and not self.whole
        phases = [p for p in PHASES[self.name] if suspends or p not in SUSPENDING]
        if self.name == "reload" and not self.changes:
            phases = phases[:1]  # nothing is offloaded: it ends when all ranks agree on that
        seconds = seconds or self.options.timeout.total_seconds()
        self._round = Round(job.rendezvous, self.name, phases, seconds)
        return self._round

    @property
    def round(self) -> Round:
        if self._round is None:
            raise ReloadpgError(f"{self.name} has no barriers before all ranks have entered it")
        return self._round

    @property
    def _known(self) -> Job:
        if self.job is None:
            raise ReloadpgError(f"{self.name} has no job; this is a bug")
        return self.job

    def interrupt(self, error: BaseException) -> None:
        """Tell the operation to end, for an error in the waiting caller. Local, non-blocking."""
        self._interrupt = error
        if self._round is not None:
            self._round.interrupt()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End it as all ranks do, build the report, and free its groups for other threads."""
        if isinstance(error, Interrupted) and self._interrupt is not None:
            error = self._interrupt
        if self.job is not None:
            if error is not None:
                self._end_early(self.job, error)
            self.report = self._report(self.job)
        if self._round is not None:
            self._round.notified.set()
        for group in self._planned:
            if self.under_way is not None and group.under_way is self.under_way:
                group.reserve(None)
        self.is_running = False
        if self.under_way is not None:
            self.under_way.end()
        if error is self._interrupt and error is not None:
            raise error

    def fail(self, error: BaseException) -> None:
        """End the operation, for which no thread runs, because of an error in the caller.

        The other ranks are notified, also of an interrupt at the begin. Local, with a timeout.
        """
        if self.job is None and not isinstance(error, Exception):
            with suppress(ReloadpgError):  # another operation runs
                self.begin()
        self._interrupt = None
        self.__exit__(type(error), error, None)

    def _end_early(self, job: Job, error: BaseException) -> None:
        """End it as all ranks do: complete, unchanged, or failed. Local, with a timeout.

        The phase at which the operation ended decides: the last rank may have arrived at a barrier
        just before this error, so the others may be in a later phase, or done.
        """
        self.activity = f"ending it after {type(error).__name__}"
        phase = (self._round or self._new_round(job)).fail(error)
        if phase is None:
            self._commit()
        elif phase in TOUCHING or self.name == "recover":
            self._leave_failed(job, phase, error)
        job.last_error = f"{type(error).__name__}: {error}"

    def _leave_failed(self, job: Job, phase: str, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self.mark_offloaded()
        if phase in ("suspended", "resumed"):
            job.suspend_obstacle = f"an earlier {self.name} failed in its phase {phase!r}: {reason}"
            self.warnings = ["from now on, the job recreates its groups and suspends none"]
        job.creation_stores = Clients()  # abandoned creations may hold the clients indefinitely
        # Some ranks may have rebuilt a group and others not. With different generations, the ranks
        # would disagree in every later attempt.
        for group in self.groups:
            group.generation = job.generation
        # A recovery replaces all backends: some ranks may already have the new ones, and others
        # not.
        groups, whole = list(reversed(self.groups)), self.name == "recover"
        aborts = abort(job, groups, GroupState.FAILED, reason, whole=whole)
        # Usually their memory is free before the caller sees the error. An abort that hangs must
        # not withhold the error: the report names it, and the next operation waits for it again.
        end = Deadline(self.name, _ABORT_S)
        for aborting in aborts:
            aborting.runs(end.left)

    # -- what it changes --------------------------------------------------------------------

    def _choose(self, job: Job) -> None:
        """Choose the groups, and the sets that it changes."""
        offloads = self.name == "offload"
        # Ranks that disagree on the state still have the same groups of the chosen sets.
        groups = [group for group in registry.managed() if group.set_name in self.chosen]
        self._planned = {group: group.proxy for group in groups}
        due = frozenset(n for n in self.chosen if job.sets[n].offloaded != offloads)
        self.concerned = due or self.chosen
        if offloads:
            self.concerned = due.union(group.set_name for group in groups if group.is_live)
        self.changes, self.whole, self.generation = bool(due), False, job.generation + 1
        if self.name == "recover":
            self.rebuild_all(self.generation)

    def rebuild_all(self, generation: int) -> None:
        """Make it rebuild all groups of the chosen sets, whatever their state. Local."""
        self.changes = self.whole = True
        self.concerned, self.generation = self.chosen, generation

    @property
    def groups(self) -> list[ManagedGroup]:
        """The managed groups that it may change, in the order that all ranks share."""
        offloads = self.name == "offload"
        return [g for g in self._planned if offloads or g.set_name in self.concerned]

    @property
    def states(self) -> list[SetState]:
        """The states of the sets that it changes."""
        return [self._known.sets[name] for name in self.concerned]

    def _plan(self, arguments: Mapping[str, str]) -> Plan:
        """The plan, which must be equal on all ranks; without the state if it is ``whole``."""
        job, state = self._known, {}
        if self.name != "recover":
            arguments = {"chosen sets": self._shown_sets, **arguments}
        if not self.whole:
            state = {f"set {name}": str(job.sets[name]) for name in registry.sets}
            state[GENERATION] = str(job.generation)
        options = {name: str(value) for name, value in self.options.settings().items()}
        groups = [g for g in self._planned if not g.construction.is_handed_over]
        return Plan(
            self.name,
            (
                Entry("install()", (), options),
                Entry("", (), arguments, state),
                *map(self._entry, groups),
            ),
        )

    def _entry(self, group: ManagedGroup) -> Entry:
        """What the members of a group must agree on."""
        made, state = group.construction, {}
        fixed = {"backend": made.backends, "set": group.set_name}
        if not self.whole:
            shut_down = group.state is GroupState.DESTROYED
            fixed["communicator"] = "shut down" if shut_down else "in use"
            strategy = planned(group, self.options.strategy)
            state = {GENERATION: str(group.generation), "strategy": strategy}
        return Entry(f"group {group.name!r}", made.ranks, fixed, state, made.summary)

    def _commit(self) -> None:
        """Record the state that all ranks have after the last barrier. Once."""
        if self.committed:
            return
        self.committed, job = True, self._known
        if self.name == "offload":
            for state in self.states:
                state.offloaded = True
            for group in self.groups:
                group.clear_failure()
        elif self.changes:
            job.generation = self.generation
            for state in self.states:
                state.generation, state.offloaded = self.generation, False
        if self.name == "recover":
            job.rendezvous.recovered = self.round.number

    def mark_offloaded(self) -> None:
        """Mark the concerned sets as offloaded: their groups have no communicators. Local."""
        for state in self.states:
            state.offloaded = True

    def reserve(self) -> None:
        """Restrict the groups that it changes to its threads until it ends, if it is pending."""
        if self.under_way is not None:
            for group in self.groups:
                if self.name == "offload" or not group.is_live:
                    group.reserve(self.under_way)

    @property
    def creators(self) -> int:
        """Number of threads that create groups, each with a separate store client."""
        return min(self.options.threads, max(1, _CREATORS // self.world.size()))

    # -- barriers ---------------------------------------------------------------------------

    def agree(
        self,
        said: str = "",
        summary: Callable[[Sequence[str]], str] = "\n".join,
        **arguments: str,
    ) -> str:
        """Agree on the plan with all ranks; see :meth:`Round.barrier`.

        Args:
            said, summary: what this rank says to all ranks, and how that is summarized.
            arguments: further arguments of the call that must be equal on all ranks.
        """
        with self.step("wait.enter"):
            return self.round.barrier("enter", self._plan(arguments), said, summary)

    def barrier(self, phase: str) -> None:
        """Wait until all ranks arrive; the last one commits. See :meth:`Round.barrier`."""
        with self.step(f"wait.{phase}"):
            self.round.barrier(phase)
        if phase == PHASES[self.name][-1]:
            self._commit()

    # -- steps ------------------------------------------------------------------------------

    def await_unfinished(self) -> None:
        """Wait a limited time for communicators that failed operations are still destroying.

        A call in C++ may never return and must not block the job.
        """
        job = self._known
        abort(job, [], GroupState.FAILED)  # those for which no thread could be started
        for entry in list(job.unfinished):
            if entry.task is not None and entry.task.ended:
                job.unfinished.remove(entry)
        destroying = [entry for entry in job.unfinished if entry.runs() and not entry.creates]
        end = Deadline(self.name, min(_UNFINISHED_S, self.round.seconds / 2))

        def wait() -> None:
            while end.left and any(entry.runs(min(0.2, end.left)) for entry in destroying):
                self.round.advance()  # the other ranks may wait for this limited time

        if destroying:
            names = ", ".join(dict.fromkeys(entry.group for entry in destroying))
            self.do(
                "unfinished",
                wait,
                f"waiting for communicators that are still being destroyed: {names}",
            )

    def do(self, step: str, work: Callable[[], object], doing: str) -> None:
        """Run blocking work before the next barrier, in a thread; see :meth:`Round.watch`."""
        with self.step(step, doing):
            self.round.watch([Task(work, self.name)], CancelToken(), lambda: doing)

    def over(
        self, groups: Sequence[ManagedGroup], action: Action, parallelism: int | None = None
    ) -> None:
        """Process groups in parallel, in this order, before the next barrier.

        Each thread takes the next group that no thread has taken. All ranks share one order, so all
        members of the first unfinished group of the job are working on it, and no topology can
        deadlock, provided that a thread that waits for peers holds no lock that another needs
        (:mod:`reloadpg.c10d.nccl`). The default group is processed alone. Groups that users
        rebuild, and by default those of a backend whose locks are unknown, are processed one after
        the other.

        Args:
            groups: in the order that all ranks share.
            action: what to do with a group.
            parallelism: number of threads of this step; None for that of the installation.

        Raises:
            ReleaseError, RebuildError: the action raised on this rank; the cause is chained.
        """
        if groups:
            self._took, self._to_do = {}, len(groups)
        for order, part in groupby(groups, lambda group: group.construction.order[0]):
            together = list(part)
            alone = order == HANDED_OVER[0] or (
                self.options.parallelism is None
                and any(nccl.needs_one_thread(g.construction.released.values()) for g in together)
            )
            most = 1 if alone else parallelism or self.options.threads
            with self.step("groups"):
                self._process(deque(together), action, min(most, len(together)))
        for group in groups:
            if group.name not in self.reports:  # a group is first resumed and then connected
                self.reports[group.name] = self._group_report(group, self._took[group])

    def _process(self, left: deque[ManagedGroup], action: Action, threads: int) -> None:
        """Process groups in some threads; those that are abandoned are recorded in the job."""
        wanted, busy, took, round_ = CancelToken(), self._busy, self._took, self.round

        def loop(index: int) -> None:
            while not wanted.cancelled:
                try:
                    group = left.popleft()
                except IndexError:  # none is left
                    return
                busy[index], begun = repr(group), time.perf_counter()
                try:
                    action(group, wanted, index)
                except Exception as cause:
                    raise self._failure(group, cause) from cause
                finally:
                    del busy[index]
                took[group] = (time.perf_counter() - begun) * 1e3
                round_.advance()

        tasks: list[Task[object]] = []
        try:
            for index in range(threads):
                tasks.append(Task(partial(loop, index), self.name))
            round_.watch(tasks, wanted, self.doing)
        finally:
            wanted.cancel()  # also if a thread could not be started
            creates = self.name != "offload"
            for index, group in list(busy.items()):
                self._known.unfinished.append(Unfinished(group, [], tasks[index], creates))

    def _failure(self, group: ManagedGroup, cause: Exception) -> ReloadpgError:
        text = (
            f"{self.name} failed at {group!r} on rank {self.world.rank()}: "
            f"{type(cause).__name__}: {cause}"
        )
        if self.name == "offload":
            return ReleaseError(text)
        return RebuildError(f"{text}. {_OUTSIDE}" if group.construction.is_handed_over else text)

    def set_doing(self, index: int, doing: str) -> None:
        """Set what a thread does, for messages. Local."""
        self._busy[index] = doing

    def doing(self) -> str:
        """The groups that the threads process, for messages."""
        return ", ".join(self._busy.values())

    # -- callbacks --------------------------------------------------------------------------

    def due(
        self, registered: Sequence[Callback], groups: Sequence[ManagedGroup] | None = None
    ) -> list[Callback]:
        """Return those of this operation's sets; of these groups, in the order of the groups."""
        if groups is None:
            return [c for c in registered if not c.group and concerns(c.sets, self.concerned)]
        return [c for g in groups for c in registered if c.group and c.group() is g.proxy]

    def call(self, due: Sequence[Callback], then: str = "") -> None:
        """Call user callbacks in the caller's thread.

        An error names the callback and ends with ``then``: the state and the remedy.
        """
        for callback in due:
            with self.step("callbacks", f"callback {callback.name}"):
                try:
                    self.in_caller(callback.function)
                except Interrupted:  # the caller waits no more
                    raise
                except Exception as cause:
                    raise ReloadpgError(
                        f"{self.name}: callback {callback.name} raised {type(cause).__name__}: "
                        f"{cause}{then}"
                    ) from cause

    def call_reloaded(self, groups: Sequence[ManagedGroup]) -> None:
        """Call the callbacks after a reload of these groups, and raise the first error.

        The groups are live on all ranks by then, so a callback may run collectives on them, and its
        error is this rank's alone: the operation is complete.
        """
        first: ReloadpgError | None = None
        registered = callbacks.reload
        for callback in [*self.due(registered, groups), *self.due(registered)]:
            try:
                self.call([callback])
            except ReloadpgError as error:
                first = first or error
        for name in self.chosen:
            self._known.sets[name].owes_callbacks = first is not None
        if first is not None:
            raise ReloadpgError(
                f"{first}. All groups are live on all ranks. reload() on all ranks calls the "
                "callbacks of this rank again."
            ) from first.__cause__

    # -- its report -------------------------------------------------------------------------

    @contextmanager
    def step(self, name: str, doing: str = "") -> Iterator[None]:
        """Record the time of this block for the report; ``doing`` is what the status shows."""
        self.activity, begun = doing, time.perf_counter()
        try:
            yield
        finally:
            self.activity, start = "", (begun - self._started) * 1e3
            self._spans.append(Span(name, start, (time.perf_counter() - begun) * 1e3))

    def status(self) -> OperationStatus:
        """Return the progress of this operation on this rank. Local, from any thread."""
        begun, round_ = self.started_at, self._round
        if round_ is None:
            return OperationStatus(self.name, 0, "", False, begun, begun)
        waiting = round_.waiting
        return OperationStatus(
            self.name,
            round_.number,
            round_.phase,
            waiting,
            begun,
            round_.since,
            "" if waiting else self.activity or self.doing(),
            len(self._took),
            self._to_do,
        )

    def _group_report(self, group: ManagedGroup, ms: float) -> GroupReport:
        history, offloads = group.history, self.name == "offload"
        return GroupReport(
            name=group.name,
            desc=group.desc,
            backend=group.construction.backend,
            size=group.construction.size,
            strategy=history.strategy,
            ms=ms,
            reason=history.reason if offloads else "",
            bytes=history.held_bytes,
            set=group.set_name,
            pinned_bytes=(
                history.suspended_bytes if offloads and history.strategy == "suspend" else 0
            ),
        )

    def _report(self, job: Job) -> Report:
        unfinished = [str(entry) for entry in job.unfinished if entry.runs()]
        warnings = list(self.warnings)
        if self.name == "offload":
            warnings += not_reloadable()
            if registry.options is not None and not registry.managed():
                warnings += nothing_released(registry.options)
            if not job.warned_of_one_rank and (text := groups_of_one_rank(bypassed_groups(True))):
                job.warned_of_one_rank = True
                warnings.append(text)
        if self.name == "reload" and self.reports:
            warnings += dropped_groups(self._planned.values())
        warnings += [f"{entry}: its memory is not free" for entry in unfinished]
        held = borrowed([g for g in registry.managed() if g.set_name in self.chosen])
        warnings += [text for loan in held if (text := loan.consequence)]
        return Report(
            operation=self.name,
            changed=bool(self.reports),
            generation=job.generation,
            groups=tuple(self.reports.values()),
            spans=tuple(self._spans),
            total_ms=(time.perf_counter() - self._started) * 1e3,
            note="" if job.last_error else self.note,
            memory={"before": self._before, "after": memory.in_use()},
            warnings=tuple(warnings),
            error=job.last_error,
            started_at=self.started_at,
            rank=job.rendezvous.rank,
            world_size=job.rendezvous.size,
            faults=self.faults,
            sets=self._shown_sets,
        )
