"""One offload or reload on this rank: its groups, its barriers, its steps, its report."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from types import FrameType
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import NotInstalledError, RebuildError, ReleaseError, ReloadpgError, counted
from ..groups.creation import HANDED_OVER
from ..groups.offloaded import UnderWay
from ..groups.proxy import GroupState, ReloadableProcessGroup
from ..groups.registry import Job, Options, Unfinished, registry
from ..rendezvous.outcome import Outcome
from ..rendezvous.plan import GroupPlan, Plan, Proposal
from ..rendezvous.round import Round
from ..rendezvous.store_client import StorePool
from ..rendezvous.worker_thread import Attempt, Wait
from . import memory
from .recreate import Releases, spent_keys
from .report import Fault, GroupReport, OperationStatus, Report, Span
from .strategy import Strategy

__all__ = ["Operation", "settings_of", "why_nothing"]

logger = logging.getLogger("reloadpg")

PHASES = {
    "offload": ("enter", "quiesced", "suspended", "released"),
    "reload": ("enter", "room", "resumed", "rebuilt", "done"),
    "recover": ("enter", "agreed", "rebuilt", "done"),
}
SUSPENDING = ("suspended", "room", "resumed")
"""The phases of jobs that may suspend groups; others do without."""

TOUCHING = ("suspended", "released", "resumed", "agreed", "rebuilt", "done")
"""The phases in which groups are touched: a round that ends there leaves them failed."""

Action = Callable[[ReloadableProcessGroup, Attempt, int], object]


class Took(NamedTuple):
    """The time that one group took: when it began (``time.perf_counter()``), and how long."""

    group: ReloadableProcessGroup
    begun: float
    ms: float


class Operation:
    """One lifecycle operation on this rank, from its first barrier to its report.

    Args:
        name: ``offload``, ``reload`` or ``recover``.
        frame: of the function that runs it.

    Attributes:
        job: the job; None if torch.distributed is not initialised.
        groups: the managed groups, in the order that all ranks share.
        round: the barriers to reach.
        strategy: what is done with each group.
        activity: what this rank is doing, other than with groups, in words.
        releases: the communicators that are destroyed.
        warnings: for the report.
        done: what was done, group by group.
        faults: of a recovery, what ranks brought to it.
        replaced: of a recovery, the ranks that came to it with a new process.
        was_offloaded: whether the groups were offloaded when it began.
        generations: of each group when it began.
        generation: the job's generation once this operation is complete.
        report: what was done on this rank; there once the operation has ended.

    Raises:
        NotInstalledError: nothing is installed.
        ReloadpgError: another operation runs, or the groups are a parent process's.
    """

    def __init__(self, name: str, frame: FrameType) -> None:
        self.name = name
        self.started = time.perf_counter()
        self.started_at = time.time()
        if registry.options is None:
            raise NotInstalledError(
                f"{name}() was called and nothing is installed; nothing was changed. Call "
                "reloadpg.install() before the process groups are created."
            )
        self.options: Options = registry.options
        self.report = Report(name, False, 0, note="torch.distributed is not initialized")
        self.warnings: list[str] = []
        self.done: list[GroupReport] = []
        self.faults: tuple[Fault, ...] = ()
        self.replaced: tuple[int, ...] = ()
        self.releases = Releases()
        self._spans: list[Span] = []
        self._memory: dict[str, dict[str, int]] = {}
        self._moments: dict[str, float] = {}
        self._current: dict[int, str] = {}
        self._took: list[Took] = []
        self._to_do = 0
        self._completed = False
        self._reserved: list[ReloadableProcessGroup] = []
        self.activity = ""
        self.opened = False
        self.job: Job | None = None
        registry.begin(name, frame, _progress_of(weakref.ref(self)))
        self.job = registry.job(name)
        if self.job is not None:
            self._open(self.job)

    def _open(self, job: Job) -> None:
        phases = [p for p in PHASES[self.name] if self.may_suspend or p not in SUSPENDING]
        if self.name == "reload" and not job.offloaded:
            phases = phases[:1]  # with nothing offloaded it ends when all ranks agree on that
        self.world = job.world
        self.was_offloaded = job.offloaded
        self.groups = registry.managed()
        self.generations = {group: group.generation for group in self.groups}
        self.generation = job.generation + (self.name == "reload" and job.offloaded)
        self.strategy = Strategy(self.options.strategy, job)
        if self.name != "recover":  # that one asks the store for its round
            self.begin(
                job, job.rendezvous.open(self.name, phases, self.options.timeout.total_seconds())
            )

    def begin(self, job: Job, round_: Round) -> None:
        """Begin the round of this operation. Local."""
        job.round = self.round = round_
        job.last_error = ""
        self.opened = True
        self.measure("before")
        for callback in list(registry.callbacks.begin):
            callback()

    @property
    def doing(self) -> str:
        """The groups that work is at now, for messages."""
        return ", ".join(self._current.values())

    def status(self) -> OperationStatus:
        """Return how far this operation is on this rank. Local, from any thread."""
        if not self.opened:
            return OperationStatus(self.name, 0, "", False, self.started_at, self.started_at)
        waiting = self.round.waiting
        return OperationStatus(
            self.name,
            self.round.sequence,
            self.round.phase,
            waiting,
            self.started_at,
            self.round.since,
            "" if waiting else self.activity or self.doing,
            len(self._took),
            self._to_do,
        )

    def current(self, index: int) -> str:
        """The group that a thread works at, or worked at last, for messages."""
        return self._current.get(index, self.doing)

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
        **settings: str,
    ) -> dict[str, str]:
        """Agree with all ranks on what is about to be done; see :meth:`Round.agree`."""
        with self.timed("wait.enter", measure=False):
            return self.round.agree("enter", self._plan(settings), proposals, subjects)

    def barrier(self, phase: str) -> Outcome:
        """Wait until all ranks are here; see :meth:`Round.barrier`."""
        with self.timed(f"wait.{phase}", measure=False):
            return self.round.barrier(phase)

    def _plan(self, settings: dict[str, str]) -> Plan:
        job = self.job
        state = "offloaded" if self.was_offloaded else "live"
        generation = job.generation if job is not None else 0
        return Plan(
            self.name,
            {
                **{name: str(value) for name, value in settings_of(self.options).items()},
                "generation": str(generation),
                "state": state,
                **settings,
            },
            tuple(
                GroupPlan(
                    group.group_name,
                    group.construction.ranks,
                    group.generation,
                    self._planned(group),
                    group.construction.digest,
                )
                for group in self.groups
                if not group.construction.is_handed_over
            ),
        )

    def _planned(self, group: ReloadableProcessGroup) -> str:
        if group.state is GroupState.DESTROYED:
            return "none, it was shut down"
        if group.is_live:
            return self.options.strategy.wanted(group.group_name, group.group_desc)
        return group.history.strategy if group.communicator is not None else "recreate"

    # -- steps ------------------------------------------------------------------------------

    def do(self, phase: str, work: Callable[[], object], doing: str) -> None:
        """Do one blocking thing before a barrier; see :meth:`Round.run`."""
        with self._activity(doing):
            self.round.run(phase, lambda attempt, index: work(), lambda: doing)

    def await_aborts(self, phase: str, aborts: Sequence[Unfinished]) -> None:
        """Wait, before a barrier, until communicators are aborted; it goes on if this raises."""
        names = ", ".join(one.group for one in aborts)
        if self.job is not None:
            self.job.unfinished += aborts
        for_ever = threading.TIMEOUT_MAX
        self.do(phase, lambda: [one.task.wait(for_ever) for one in aborts], f"aborting {names}")

    def each(
        self,
        phase: str,
        groups: Sequence[ReloadableProcessGroup],
        action: Action,
        parallelism: int | None = None,
    ) -> Outcome | None:
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

        Returns:
            None; an outcome ``fall_back`` if another rank has fallen back meanwhile.

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
            with self.timed("groups", measure=False):
                outcome = self.round.run(phase, work, lambda: self.doing, threads)
            if outcome is not None:
                return outcome
        position = {group: index for index, group in enumerate(groups)}
        self._note(sorted(took, key=lambda one: position[one.group]))
        return None

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

    def each_or_fall_back(
        self, phase: str, groups: Sequence[ReloadableProcessGroup], action: Action
    ) -> str:
        """Suspend or resume groups and reach a barrier, or fall back, on all ranks alike.

        Returns:
            Empty when it is done; why these groups are recreated instead, on all ranks alike.
        """
        try:
            outcome = self.each(phase, groups, action) or self.barrier(phase)
        except (ReleaseError, RebuildError) as error:
            if not self.options.strategy.fallback:
                raise
            outcome = self.round.fall_back(phase, error)
        if outcome.ok:
            self.measure(phase)
            return ""
        logger.warning(
            "%s: %s recreated instead of suspended: %s",
            self.name,
            counted(len(groups), "group"),
            outcome.text,
        )
        self.strategy.fall_back(groups, phase, outcome.text)
        return outcome.text

    def call(self, callbacks: list[tuple[str, Callable[[], object]]]) -> None:
        """Call what users registered, in the caller's thread; an error names the callback."""
        with self.timed("callbacks"):
            for name, callback in list(callbacks):
                try:
                    with self._activity(f"callback {name}"):
                        callback()
                except Exception as cause:
                    raise ReloadpgError(
                        f"{self.name}: callback {name} raised {type(cause).__name__}: {cause}"
                    ) from cause

    def delete_spent_keys(
        self, groups: Sequence[ReloadableProcessGroup], *, whole: bool = False
    ) -> None:
        """Delete the keys that earlier generations of groups left in the job's store. Bounded."""
        job = self.job
        spent = [key for group in groups for key in spent_keys(group, self.world, whole=whole)]
        if job is None or not spent or job.rendezvous.alone:
            return

        def delete(store: Store) -> None:
            for key in spent:
                with suppress(NotImplementedError):
                    store.delete_key(key)

        with self.timed("store"):
            job.rendezvous.ask_root(delete, Wait(f"{self.name}, spent keys", self.round.seconds))

    # -- the report -------------------------------------------------------------------------

    def measure(self, moment: str) -> None:
        """Note what memory is in use."""
        self._memory[moment] = memory.in_use()
        self._moments[moment] = (time.perf_counter() - self.started) * 1e3

    @contextmanager
    def _activity(self, text: str) -> Iterator[None]:
        """Say within this block what this rank is doing."""
        self.activity = text
        try:
            yield
        finally:
            self.activity = ""

    @contextmanager
    def timed(self, phase: str, *, measure: bool = True) -> Iterator[None]:
        """Note the time spent in this block, and the memory in use after it, as a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            start = (begun - self.started) * 1e3
            self._spans.append(Span(phase, start, (time.perf_counter() - begun) * 1e3))
            if measure:
                self.measure(phase)

    def memory_change(self, earlier: str, later: str) -> tuple[int | None, str]:
        """Bytes that came back between two moments, by the device itself, and who measured it."""
        source = next(iter(self._memory[earlier]), "")
        if source not in memory.exact_sources() or source not in self._memory[later]:
            return None, source
        return self._memory[earlier][source] - self._memory[later][source], source

    def note_together(self, groups: Sequence[ReloadableProcessGroup], begun: float) -> None:
        """Put groups whose communicators were aborted together into the report."""
        each_ms = (time.perf_counter() - begun) * 1e3 / max(1, len(groups))
        self._note([Took(group, begun, each_ms) for group in groups])

    def _note(self, took: Sequence[Took]) -> None:
        """Put groups and their milliseconds into the report, and into the groups' histories."""
        reported = {report.name for report in self.done}
        for group, begun, ms in took:
            if group.group_name in reported:  # resumed, and now connected
                continue
            history = group.history
            if self.name == "offload":
                history.offload_ms = ms
                history.cycles += 1
            else:
                history.reload_ms = ms
            choice = self.strategy.of(group)
            self.done.append(
                GroupReport(
                    group.group_name,
                    group.group_desc,
                    group.construction.backend,
                    group.size(),
                    choice.strategy,
                    ms,
                    (begun - self.started) * 1e3,
                    choice.reason,
                    history.held_bytes,
                )
            )

    def _build_report(self, job: Job, note: str = "", error: BaseException | None = None) -> Report:
        self.measure("after")
        return Report(
            self.name,
            bool(self.done),
            job.generation,
            tuple(self.done),
            tuple(self._spans),
            (time.perf_counter() - self.started) * 1e3,
            note,
            self._memory,
            (*self.warnings, *self.strategy.warnings, *self._late_warnings(job)),
            "" if error is None else f"{type(error).__name__}: {error}",
            self.started_at,
            self.world.rank(),
            self.world.size(),
            tuple(str(one) for one in job.unfinished if not one.task.ended),
            self._moments,
            self.faults,
            self.replaced,
        )

    def _late_warnings(self, job: Job) -> list[str]:
        """Say what keeps memory from coming back, as it is at the end."""
        found = memory.warnings(job.offloaded)
        for group in self.releases.held():
            found.append(
                f"{group}: the object that torch made for it is still referenced, past the "
                "reloadable group; use what torch.distributed returns after reloadpg.install()"
            )
        if self.name == "offload":
            found += [
                f"not reloadable, keeps its communicator: {text}"
                for text in _by_reason(registry.unmanaged())
            ]
            if not self.groups:
                found += why_nothing(self.options)
        return found + [
            f"{one}: what it holds is not free" for one in job.unfinished if not one.task.ended
        ]

    # -- the end ----------------------------------------------------------------------------

    def complete(self, note: str = "") -> None:
        """Note that the operation is complete on all ranks. Idempotent."""
        job = self.job
        if job is None or self._completed:
            return
        self._completed = True
        if self.name == "offload":
            job.cycles += not self.was_offloaded
            job.offloaded = True
            for group in self.groups:
                group.clear_failure()
        elif self.was_offloaded:
            job.generation = self.generation
            job.offloaded = False
        if self.name == "recover":
            job.rendezvous.complete_recovery()
        self.report = self._build_report(job, note)

    def fail(self, error: BaseException) -> None:
        """Note that the operation has ended with an error, on this rank."""
        job = self.job
        if job is not None and self.opened:
            job.last_error = f"{type(error).__name__}: {error}"
            self.report = self._build_report(job, error=error)

    def reserve(self, under_way: UnderWay) -> None:
        """Let only this operation's threads use the groups that it touches, until it is closed."""
        if self.opened:
            touched = [g for g in self.groups if self.name == "offload" or not g.is_live]
            self._reserved += touched
            for group in touched:
                group.reserve(under_way)

    def close(self) -> None:
        """Let other operations begin, and hand the report to those who asked for it."""
        for group in self._reserved:
            group.reserve(None)
        if self.opened:
            self.round.told.set()
        registry.end()
        if self.opened:
            _publish(self.report)


def _progress_of(operation: weakref.ref[Operation]) -> Callable[[], OperationStatus | None]:
    """Ask an operation for its status, and keep neither it nor its groups alive."""

    def progress() -> OperationStatus | None:
        found = operation()
        return None if found is None else found.status()

    return progress


def settings_of(options: Options) -> dict[str, Any]:
    """Return the options of an installation, by name, as plain values. Pure."""
    selection = options.selection
    return {
        "backends": "accelerators" if selection.backends is None else sorted(selection.backends),
        "min_size": selection.min_size,
        "world": selection.world,
        "strategy": str(options.strategy),
        "timeout_s": options.timeout.total_seconds(),
        "parallelism": options.parallelism,
        "exclude": list(selection.exclude),
        "recoverable": options.recoverable,
    }


def _by_reason(groups: Iterable[tuple[ProcessGroup, str]]) -> list[str]:
    """Name groups that have one reason together, with the reason. Local."""
    names: dict[str, list[str]] = {}
    for group, reason in groups:
        names.setdefault(reason, []).append(c10d.label_of(group))
    return [
        f"group {', '.join(named[:_NAMED])}"
        f"{f' and {len(named) - _NAMED} more' if len(named) > _NAMED else ''}: {reason}"
        for reason, named in names.items()
    ]


_NAMED = 8
"""Groups that a message names."""


def why_nothing(options: Options) -> list[str]:
    """Say why an offload of a job without a reloadable group releases nothing. Local."""
    bypassed = registry.bypassed()
    if not bypassed:
        return []
    why = "; ".join(_by_reason((group, bypass.reason) for group, bypass in bypassed))
    remedies = " or ".join(dict.fromkeys(f"install({one.remedy})" for _, one in bypassed))
    return [
        f"nothing was released, since no group is reloadable: {why}. Installed with "
        f"{options.selection}; call {remedies} to make them reloadable."
    ]


def _publish(report: Report) -> None:
    """Log a report and hand it to all who asked for it; their errors stay here."""
    logger.log(logging.ERROR if report.error else logging.INFO, "%s", report)
    for warning in report.warnings:
        kind = re.sub(r"\d[\d.]*", "#", warning)  # the same with other figures is not news
        first = kind not in registry.warned
        registry.warned.add(kind)
        logger.log(logging.WARNING if first else logging.DEBUG, "%s: %s", report.operation, warning)
    for callback in list(registry.callbacks.report):
        try:
            callback(report)
        except Exception:
            logger.exception("a callback registered with reloadpg.on_report failed")
