"""Scope of one operation: sets, groups, the generation, and this rank's plan. Frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch.distributed import ProcessGroup

from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState, UnderWay
from ..groups.registry import registry
from ..rendezvous.plan import GENERATION, Entry, Plan
from .callbacks import callbacks, for_groups, for_sets
from .installation import Options
from .job import Job
from .kinds import Kind


@dataclass(frozen=True)
class Scope:
    """What one operation works on.

    Attributes:
        kind: offload, reload or recover.
        job: the job.
        world: its default group, so that it is not deleted.
        options: the installation's.
        chosen: the sets that it is for.
        sets: the chosen sets that it will change.
        changes: whether a set is to be offloaded or reloaded: not if it is already.
        generation: the job's generation after a reload or recovery.
        whole: whether all groups of the chosen sets are rebuilt, whatever their state.
        planned: the groups of the chosen sets, with their proxies, so that none is deleted.
    """

    kind: Kind
    job: Job
    world: ProcessGroup
    options: Options
    chosen: frozenset[str]
    sets: frozenset[str]
    changes: bool
    generation: int
    whole: bool
    planned: Mapping[ManagedGroup, ProcessGroup]

    @classmethod
    def of(cls, kind: Kind, job: Job, options: Options, chosen: frozenset[str]) -> Scope:
        """The scope of an operation that begins now."""
        # Ranks that disagree on the state still have the same groups of the chosen sets.
        groups = [group for group in registry.managed() if group.set_name in chosen]
        planned = {group: group.proxy for group in groups}
        due = frozenset(n for n in chosen if job.sets[n].offloaded != kind.releases)
        sets = due or chosen
        if kind.releases:
            sets = due.union(group.set_name for group in groups if group.is_live)
        following = job.generation + 1
        scope = cls(
            kind, job, job.world, options, chosen, sets, bool(due), following, False, planned
        )
        return scope.rebuilding_all(scope.generation) if kind.whole else scope

    def rebuilding_all(self, generation: int) -> Scope:
        """This scope, with all groups of the chosen sets to be rebuilt, whatever their state."""
        return replace(self, sets=self.chosen, changes=True, whole=True, generation=generation)

    @property
    def groups(self) -> list[ManagedGroup]:
        """The managed groups that it may change, in the shared order."""
        return [g for g in self.planned if self.kind.releases or g.set_name in self.sets]

    @property
    def strategy(self) -> str:
        """How its groups are released or restored."""
        return "recreate" if self.whole else self.options.strategy

    @property
    def barriers(self) -> tuple[str, ...]:
        """Its barriers, in order."""
        if not self.changes and not self.kind.releases:
            return self.kind.barriers["recreate"][:1]  # it ends when all ranks agree on that
        return self.kind.barriers[self.strategy]

    @property
    def shown_sets(self) -> str:
        return "all" if self.chosen == registry.sets else ", ".join(sorted(self.chosen))

    # -- the plan ---------------------------------------------------------------------------

    def plan(self, arguments: Mapping[str, str]) -> Plan:
        """The plan, which must be equal on all ranks; without the state if it is ``whole``."""
        job, state = self.job, {}
        if not self.kind.whole:
            arguments = {"chosen sets": self.shown_sets, **arguments}
        if not self.whole:
            state = {f"set {name}": str(job.sets[name]) for name in registry.sets}
            state[GENERATION] = str(job.generation)
        options = {name: str(value) for name, value in self.options.settings().items()}
        groups = [g for g in self.planned if not g.construction.is_handed_over]
        return Plan(
            self.kind.name,
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
            state = {GENERATION: str(group.generation), "strategy": self._strategy(group)}
        return Entry(f"group {group.name!r}", made.ranks, fixed, state, made.summary)

    def _strategy(self, group: ManagedGroup) -> str:
        """How a group is released, or was; equal on all of its members."""
        if group.is_live:
            return self.options.strategy
        return group.history.strategy if group.communicator is not None else "recreate"

    # -- what it does to the job ------------------------------------------------------------

    def mark_offloaded(self) -> None:
        """Mark its sets as offloaded: their groups have no communicators. Local."""
        for name in self.sets:
            self.job.sets[name].offload()

    def owe(self, groups: Iterable[ManagedGroup]) -> None:
        """Owe the callbacks after a reload of these groups. Local, idempotent."""
        registered = callbacks.reload
        self.job.owed.add([*for_groups(registered, groups), *for_sets(registered, self.sets)])

    def commit(self) -> None:
        """Record the state that all ranks have after the last barrier. Local."""
        if self.kind.releases:
            self.mark_offloaded()
            for group in self.groups:
                group.clear_failure()
            self.job.owed.drop(self.sets)  # the reload will owe them
        elif self.changes:
            self.job.reload(self.generation, self.sets)
            self.owe(group for group in self.groups if group.generation == self.generation)

    def reserve(self, under_way: UnderWay) -> None:
        """Restrict the groups that it changes to the threads of an operation. Idempotent."""
        for group in self.groups:
            if self.kind.releases or not group.is_live:
                group.reserve(under_way)

    def free(self, under_way: UnderWay) -> None:
        """Lift that restriction. Local."""
        for group in self.planned:
            if group.under_way is under_way:
                group.reserve(None)
