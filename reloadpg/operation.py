"""One lifecycle operation on this rank: its groups, its steps, its report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from torch._C._distributed_c10d import Store

from . import c10d
from .construction import Construction, WorldConstruction
from .errors import RebuildError, ReleaseError, ReloadpgError
from .group import ReloadableProcessGroup
from .plans import GroupPlan, Plan
from .registry import Job, Options
from .rendezvous import Round
from .report import GroupReport, Report
from .strategies import Strategy
from .supervised import Attempt, Task

__all__ = ["OFFLOAD_GATES", "RELOAD_GATES", "Operation", "settings_of"]

logger = logging.getLogger("reloadpg")

OFFLOAD_GATES = ("enter", "quiesced", "released")
RELOAD_GATES = ("enter", "rebuilt", "done")

TOUCHING = ("released", "rebuilt", "done")
"""The gates on the way to which groups are touched: a round that ends there leaves them failed."""

_ABANDON_S = 2.0
"""How long a failed operation waits for its communicators to abort before it raises anyway."""


@dataclass
class Operation:
    """One lifecycle operation of this rank, from its first gate to its report.

    Attributes:
        job: the job.
        options: the installation's options.
        round: the gates to pass.
        strategy: how groups are released and rebuilt.
        groups: the managed groups, in the order that all ranks share.
        started: ``time.perf_counter()`` at the call.
        phases_ms: wall time by phase, in milliseconds.
        done: what was done, group by group.
        current: the group that work is at now, for messages.
    """

    job: Job
    options: Options
    round: Round
    strategy: Strategy
    groups: list[ReloadableProcessGroup]
    started: float
    phases_ms: dict[str, float] = field(default_factory=dict)
    done: list[GroupReport] = field(default_factory=list)
    current: str = ""

    def __post_init__(self) -> None:
        self._generations = [group.generation for group in self.groups]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent in this block to a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            ms = (time.perf_counter() - begun) * 1e3
            self.phases_ms[phase] = self.phases_ms.get(phase, 0.0) + ms

    def each(
        self,
        gate: str,
        items: Sequence[ReloadableProcessGroup | Construction],
        action: Callable[[Any, Attempt], None],
    ) -> list[tuple[ReloadableProcessGroup, float]]:
        """Do something with groups one after the other, in a task, before a gate.

        Returns:
            The groups with the milliseconds that each took.

        Raises:
            ReleaseError, RebuildError: the action failed on this rank; the cause is chained.
        """
        if not items:
            return []
        took: list[tuple[ReloadableProcessGroup, float]] = []
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
                        f"{self.job.world.rank()}: {type(cause).__name__}: {cause}"
                    ) from cause
                if isinstance(item, ReloadableProcessGroup):
                    took.append((item, (time.perf_counter() - begun) * 1e3))

        self.round.run(gate, work, lambda: self.current)
        return took

    @property
    def replays_shared(self) -> bool:
        """Whether torch wants all ranks in the creation of a group that some are members of."""
        return c10d.barrier_after_creation() or self.job.world.bound_device_id is not None

    @property
    def operation(self) -> str:
        """``offload`` or ``reload``."""
        return self.round.operation

    def note(self, took: Sequence[tuple[ReloadableProcessGroup, float]]) -> None:
        """Put groups and their milliseconds into the report."""
        self.done += [
            GroupReport(
                group.group_name,
                group.group_desc,
                group.construction.backend,
                group.size(),
                self.strategy.name,
                ms,
            )
            for group, ms in took
        ]

    def report(self, note: str = "") -> Report:
        """What was done so far."""
        waits = {f"wait.{gate}": ms for gate, ms in self.round.waited_ms.items()}
        return Report(
            self.operation,
            bool(self.done),
            self.job.generation,
            tuple(self.done),
            {**self.phases_ms, **waits},
            (time.perf_counter() - self.started) * 1e3,
            note,
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
            gate = self.round.fail(error)
            if gate is None:
                completed()
            elif gate in TOUCHING:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Leave every group of the job failed: the other ranks do the same."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        groups = list(reversed(self.groups))
        self.job.released = True
        self.job.torn = self.job.torn or self.round.left_work
        # Some ranks had rebuilt a group and others had not yet: left at different generations, the
        # ranks would disagree in every attempt to come.
        for group, generation in zip(self.groups, self._generations, strict=True):
            group.generation = generation
        ending = Task(lambda _: self.strategy.abandon(groups, reason), "abandon")
        if ending.wait(_ABANDON_S):
            return
        self.job.ending = ending
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

    def prepare_store(
        self, gate: str, items: Sequence[ReloadableProcessGroup | Construction], *, renew: bool
    ) -> None:
        """Delete the keys of earlier generations, before groups are rebuilt.

        Args:
            gate: the gate that comes next.
            items: what is about to be rebuilt.
            renew: whether to connect anew for the groups: a creation that was given up may hold
                the store client of the default group, which all groups are created with.
        """
        world, rendezvous = self.job.world, self.job.rendezvous
        groups = [item for item in items if isinstance(item, ReloadableProcessGroup)]
        spent = [key for group in groups for key in self.strategy.spent_keys(group)]

        def delete(store: Store) -> None:
            for key in spent:
                with suppress(NotImplementedError):
                    store.delete_key(key)

        def work(_: Attempt) -> None:
            if spent and not rendezvous.alone:
                rendezvous.ask_root(delete, self.options.timeout.total_seconds(), self.operation)
            if not renew:
                return
            if isinstance(world, ReloadableProcessGroup):
                construction = cast(WorldConstruction, world.construction)
                world.construction = construction.reconnected()
            else:
                c10d.replace_store(world, c10d.clone_store(c10d.store_of(world)))

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
                self.strategy.name,
                group.construction.digest,
            )
            for group in self.groups
        )
        return Plan(self.operation, settings, groups)


def settings_of(options: Options) -> dict[str, Any]:
    """The options of an installation, by name, as plain values. Pure."""
    policy = options.policy
    return {
        "backends": "accelerators" if policy.backends is None else sorted(policy.backends),
        "min_size": policy.min_size,
        "world": policy.world,
        "strategy": options.strategy,
        "timeout_s": options.timeout.total_seconds(),
    }
