"""One lifecycle operation on this rank: its groups, its steps, its report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from . import c10d, memory
from .choice import Choice
from .construction import Construction
from .creation_store import CreationStore
from .errors import RebuildError, ReleaseError, ReloadpgError
from .group import GroupState, ReloadableProcessGroup
from .plans import GroupPlan, Offer, Plan
from .registry import Job, Options
from .rendezvous import Round
from .report import GroupReport, Report, Span
from .strategies import RECREATE, abandon
from .supervised import Attempt, Task

__all__ = ["Operation", "Took", "gates_of", "settings_of"]

logger = logging.getLogger("reloadpg")

_GATES = {
    "offload": ("enter", "quiesced", "suspended", "released"),
    "reload": ("enter", "room", "resumed", "rebuilt", "done"),
}
_SUSPENDING = ("suspended", "room", "resumed")
"""The gates of jobs that may suspend groups; others do without."""

TOUCHING = ("suspended", "released", "resumed", "rebuilt", "done")
"""The gates on the way to which groups are touched: a round that ends there leaves them failed."""

_TELLS = 3
"""How often a rank that is interrupted again tries to tell the others that it cannot go on."""

_ABANDON_S = 2.0
"""How long a failed operation waits for its communicators to abort before it raises anyway."""


@dataclass
class Operation:
    """One lifecycle operation of this rank, from its first gate to its report.

    Attributes:
        job: the job.
        options: the installation's options.
        round: the gates to pass.
        groups: the managed groups, in the order that all ranks share.
        started: ``time.perf_counter()`` at the call.
        spans: phases and waits, in the order in which they ended.
        memory: what was in use, by moment and source.
        warnings: for the report.
        done: what was done, group by group.
        choices: how each group is released, by name.
        current: the group that work is at now, for messages.
    """

    job: Job
    options: Options
    round: Round
    groups: list[ReloadableProcessGroup]
    started: float
    spans: list[Span] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    done: list[GroupReport] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    current: str = ""

    def __post_init__(self) -> None:
        self.started_at = time.time() - (time.perf_counter() - self.started)
        self.world = self.job.world
        self._generations = {group: group.generation for group in self.groups}
        self.creation = CreationStore(self.world)
        self.measure("before")

    def measure(self, moment: str) -> None:
        """Note what memory is in use."""
        self.memory[moment] = memory.in_use()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Note the time spent in this block, and the memory in use after it, as a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._span(phase, begun)
            self.measure(phase)

    def _span(self, name: str, begun: float) -> None:
        start = (begun - self.started) * 1e3
        self.spans.append(Span(name, start, (time.perf_counter() - begun) * 1e3))

    def gate(self, name: str) -> None:
        """Wait until all ranks are here; see :meth:`Round.gate`."""
        begun = time.perf_counter()
        try:
            self.round.gate(name)
        finally:
            self._span(f"wait.{name}", begun)

    def agree(
        self, name: str, plan: Plan, offers: Sequence[Offer] = (), asks: Sequence[str] = ()
    ) -> dict[str, str]:
        """Agree with all ranks; see :meth:`Round.agree`."""
        begun = time.perf_counter()
        try:
            return self.round.agree(name, plan, offers, asks)
        finally:
            self._span(f"wait.{name}", begun)

    def each(
        self,
        gate: str,
        items: Sequence[ReloadableProcessGroup | Construction],
        action: Callable[[Any, Attempt], None],
    ) -> list[Took]:
        """Do something with groups one after the other, in a task, before a gate.

        Raises:
            ReleaseError, RebuildError: the action failed on this rank; the cause is chained.
        """
        if not items:
            return []
        took: list[Took] = []
        failure = ReleaseError if self.operation == "offload" else RebuildError

        def work(attempt: Attempt) -> None:
            for item in items:
                if attempt.abandoned:
                    return
                self.current = (
                    repr(item)
                    if isinstance(item, ReloadableProcessGroup)
                    else f"group {item.name!r} of other ranks"
                )
                begun = time.perf_counter()
                try:
                    action(item, attempt)
                except Exception as cause:
                    raise failure(
                        f"{self.operation} failed at {self.current} on rank "
                        f"{self.world.rank()}: {type(cause).__name__}: {cause}"
                    ) from cause
                if isinstance(item, ReloadableProcessGroup):
                    took.append(Took(item, begun, (time.perf_counter() - begun) * 1e3))

        self.round.run(gate, work, lambda: self.current)
        return took

    @property
    def replays_shared(self) -> bool:
        """Whether torch wants all ranks in the creation of a group that some are members of."""
        return c10d.barrier_after_creation() or self.world.bound_device_id is not None

    @property
    def operation(self) -> str:
        """``offload`` or ``reload``."""
        return self.round.operation

    def note(self, took: Sequence[Took]) -> None:
        """Put groups and their milliseconds into the report, and into the groups' histories."""
        for group, begun, ms in took:
            history = group.history
            if self.operation == "offload":
                history.offload_ms = ms
                history.cycles += 1
            else:
                history.reload_ms = ms
            choice = self.choices.get(group.group_name, Choice(history.strategy))
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

    def report(self, note: str = "", error: BaseException | None = None) -> Report:
        """What was done so far."""
        self.measure("after")
        return Report(
            self.operation,
            bool(self.done),
            self.job.generation,
            tuple(self.done),
            tuple(self.spans),
            (time.perf_counter() - self.started) * 1e3,
            note,
            self.memory,
            (*self.warnings, *memory.warnings(self.job.released)),
            "" if error is None else f"{type(error).__name__}: {error}",
            self.started_at,
            self.world.rank(),
            self.world.size(),
        )

    @contextmanager
    def guarded(self, completed: Callable[[], None]) -> Iterator[None]:
        """Make all ranks end this block alike: completed, untouched, or failed.

        Whatever ends the block early is told to the other ranks, and goes on afterwards. Where
        the round ended decides what this rank does: it may have been interrupted after the last
        rank had arrived at a gate, so that the others are in the next phase by now, or done.

        Args:
            completed: what to note once all ranks have passed the last gate; idempotent.
        """
        try:
            yield
            completed()
        except BaseException as error:
            gate = self._end_early(error)
            if gate is None:
                completed()
            elif gate in TOUCHING:
                self._give_up(error)
            raise

    def _end_early(self, error: BaseException) -> str | None:
        """Tell the other ranks; the gate at which the operation ended, None if it is complete.

        Bounded. A second interrupt meanwhile only makes it ask again: a rank that does not know
        how the round ended would leave its groups in another state than the others, for good.
        """
        for _ in range(_TELLS):
            with suppress(BaseException):
                gate = self.round.fail(error)
                if gate in ("suspended", "resumed") and self.falls_back:
                    # The others go on in a second round: this rank ends that one.
                    self.go_on_after(gate)
                    gate = self.round.fail(error)
                return gate
        return self.round.supposed_end

    @property
    def falls_back(self) -> bool:
        """Whether the ranks go on after a communicator that failed to suspend or to resume."""
        verdict = self.round.verdict
        return verdict is not None and verdict.mendable and self.options.strategy.fallback

    def go_on_after(self, gate: str) -> tuple[str, ...]:
        """Begin the second round of a fall back; the gates that it has."""
        gates = gates_of(self.operation, self.options.strategy.may_suspend)
        left = gates[gates.index(gate) + 1 :]
        self.job.torn = self.job.torn or self.round.left_work
        self.round = self.job.rendezvous.again(self.round, left)
        return left

    def _give_up(self, error: BaseException) -> None:
        """Leave every group of the job failed: the other ranks do the same."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        groups = list(reversed(self.groups))
        self.job.released = True
        self.job.torn = self.job.torn or self.round.left_work
        # Some ranks had rebuilt a group and others had not yet: left at different generations, the
        # ranks would disagree in every attempt to come.
        for group, generation in self._generations.items():
            group.generation = generation
        ending = Task(lambda _: abandon(groups, GroupState.FAILED, reason), "abandon")
        self.job.ending = ending  # whatever interrupts this rank from here on
        self.creation.restore()
        self._free_store()
        if ending.wait(_ABANDON_S):
            self.job.ending = None
            return
        logger.error(
            "%s: aborting the communicators did not end within %g s and goes on beside; their "
            "memory is not free yet, and the next operation waits for it",
            self.operation,
            _ABANDON_S,
        )

    def await_earlier(self, gate: str) -> None:
        """Before anything else: wait for what a failed operation before left going on."""
        ending = self.job.ending
        if ending is not None:
            self.round.run(
                gate,
                lambda _: ending.wait(threading.TIMEOUT_MAX),
                lambda: "aborting the communicators that an operation that failed has left",
            )
            self.job.ending = None

    def _free_store(self) -> None:
        """After work was given up: let groups be created again, by anybody. Bounded."""
        if self.job.torn and not self.round.lost:
            attempt = Attempt()
            if not Task(self._renew_store, "renew", attempt).wait(_ABANDON_S):
                attempt.abandon()  # the next reload tries again

    def _renew_store(self, attempt: Attempt) -> None:
        if self.creation.renew(attempt):
            self.job.torn = False

    def prepare_store(
        self, gate: str, items: Sequence[ReloadableProcessGroup | Construction]
    ) -> None:
        """Delete the keys of earlier generations, and connect anew after work was given up.

        Args:
            gate: the gate that comes next.
            items: what is about to be rebuilt.
        """
        rendezvous = self.job.rendezvous
        groups = [item for item in items if isinstance(item, ReloadableProcessGroup)]
        spent = [key for group in groups for key in RECREATE.spent_keys(group)]

        def delete(store: Store) -> None:
            for key in spent:
                with suppress(NotImplementedError):
                    store.delete_key(key)

        def work(attempt: Attempt) -> None:
            if spent and not rendezvous.alone:
                rendezvous.ask_root(delete, self.options.timeout.total_seconds(), self.operation)
            if self.job.torn:
                self._renew_store(attempt)

        self.round.run(gate, work, lambda: "deleting the keys of earlier generations")

    def call_back(self, callbacks: list[tuple[str, Callable[[], object]]]) -> None:
        """Call what users registered, in the caller's thread; an error names the callback."""
        with self.timed("callbacks"):
            for name, callback in list(callbacks):
                try:
                    callback()
                except Exception as cause:
                    raise ReloadpgError(
                        f"{self.operation}: callback {name} raised {type(cause).__name__}: {cause}"
                    ) from cause

    def plan(self, **extra: str) -> Plan:
        """What this rank is about to do, for the other ranks to compare."""
        settings = {
            **{name: str(value) for name, value in settings_of(self.options).items()},
            "generation": str(self.job.generation),
            "state": "offloaded" if self.job.released else "live",
            **extra,
            "creation": "by all ranks" if self.replays_shared else "by members",
        }
        groups = tuple(
            GroupPlan(
                group.group_name,
                group.construction.ranks,
                group.generation,
                self._planned(group),
                group.construction.digest,
            )
            for group in self.groups
        )
        return Plan(self.operation, settings, groups)

    def _planned(self, group: ReloadableProcessGroup) -> str:
        if group.is_live:
            return self.options.strategy.wanted(group.group_name, group.group_desc)
        return group.history.strategy if group.communicator is not None else "recreate"


class Took(NamedTuple):
    """What was done with one group: when it began (``time.perf_counter()``), and how long."""

    group: ReloadableProcessGroup
    begun: float
    ms: float


def gates_of(operation: str, may_suspend: bool) -> tuple[str, ...]:
    """The gates of an operation, in order: equal on all ranks with equal options. Pure."""
    return tuple(gate for gate in _GATES[operation] if may_suspend or gate not in _SUSPENDING)


def settings_of(options: Options) -> dict[str, Any]:
    """The options of an installation, by name, as plain values. Pure."""
    policy = options.policy
    return {
        "backends": "accelerators" if policy.backends is None else sorted(policy.backends),
        "min_size": policy.min_size,
        "world": policy.world,
        "strategy": str(options.strategy),
        "timeout_s": options.timeout.total_seconds(),
    }
