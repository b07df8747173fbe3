"""The changes of one operation on this rank: its sets and groups, as they were and will be."""

from __future__ import annotations

from collections.abc import Mapping

from ..groups.managed import ManagedGroup
from ..groups.registry import Options, registry
from ..groups.sets import Chosen
from ..rendezvous.plan import GENERATION, GroupPlan, Plan
from .job import Job
from .strategy import planned


class Transaction:
    """The changes of one operation to a job.

    Args:
        name: ``offload``, ``reload`` or ``recover``.
        chosen: the sets named in the call.
        job: the job.
        options: those of the installation.

    Attributes:
        concerned: the chosen sets that it will change.
        groups: their managed groups, in the order that all ranks share.
        was_offloaded: whether these sets were offloaded at the start.
        generations: generation of each group at the start.
        generation: the job's generation after the commit.
        whole: whether all groups of the chosen sets are rebuilt, whatever their state.
    """

    def __init__(
        self,
        name: str,
        chosen: Chosen,
        job: Job,
        options: Options,
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self._name = name
        self._chosen = self.concerned = chosen
        self._job = job
        self._options = options
        job.sets.declare(options.selection.set_names)
        offloads = name == "offload"
        due = job.sets.where(chosen, lambda state: state.offloaded != offloads)
        self.was_offloaded = bool(due) != offloads
        self._skip = skip
        self._left_out = job.left_out
        if name == "reload" and self._is_to_try_again():
            self.was_offloaded = True
        elif name == "reload" and due:
            self.concerned = due
        self.groups = [g for g in registry.managed() if g.set_name in self.concerned]
        if offloads:
            self.concerned = due.joined(group.set_name for group in self.groups if group.is_live)
        # Ranks that disagree on the state still have the same groups.
        self._planned = self.groups
        if name == "reload":
            self._planned = [g for g in registry.managed() if g.set_name in chosen]
        # No group is deleted while the operation runs, whichever of these it changes.
        self._proxies = [group.proxy for group in (*self.groups, *self._planned)]
        self._before = [(s, s.offloaded, s.cycles) for s in job.sets.of(self.concerned)]
        self._cycles = job.cycles + (not self.was_offloaded)
        self.generations = {group: group.generation for group in self.groups}
        self.generation = job.generation + (name == "reload" and self.was_offloaded)
        self.whole = name == "recover"

    def _is_to_try_again(self) -> bool:
        """Whether an earlier reload has left out a group that this one does not. Local."""
        left_out = self._job.left_out.items()
        return any(
            not sets.without(self._chosen) for name, sets in left_out if name not in self._skip
        )

    def leave_out(self, left_out: Mapping[str, Chosen]) -> None:
        """Of a recovery: leave out the groups that reloads have left out on any rank. Local."""
        self._left_out, self._skip = dict(left_out), frozenset(left_out)

    @property
    def skipped(self) -> list[ManagedGroup]:
        """The groups of this rank to leave out."""
        registered = [g for g in self.groups if g.construction.is_handed_over and not g.is_live]
        return [group for group in registered if group.name in self._skip]

    def rebuild_all(self, generation: int) -> None:
        """Make this a reload of all groups of the chosen sets, whatever their state. Local."""
        self.whole, self.was_offloaded, self.generation = True, True, generation
        self.concerned, self.groups = self._chosen, self._planned
        self.generations = {group: group.generation for group in self.groups}
        states = self._job.sets.of(self.concerned)
        self._before = [(s, s.offloaded, s.cycles) for s in states]

    def plan(self, settings: Mapping[str, str]) -> Plan:
        """The plan, which must be equal on all ranks; without the state if it is ``whole``."""
        state = {}
        if self._name != "recover":
            settings = {"chosen sets": str(self._chosen), **settings}
            if self._skip:
                settings["skip"] = ", ".join(sorted(self._skip))
        if not self.whole:
            state = {GENERATION: str(self._job.generation), "state": self._job.sets.plan()}
            if self._job.left_out:
                state["left out"] = ", ".join(sorted(self._job.left_out))
        options = {name: str(value) for name, value in self._options.settings().items()}
        groups = tuple(
            GroupPlan(
                group.name,
                construction.ranks,
                0 if self.whole else group.generation,
                "recreate" if self.whole else planned(group, self._options.strategy),
                construction.digest,
                group.set_name,
                construction.summary,
            )
            for group in self._planned
            if not (construction := group.construction).is_handed_over
        )
        return Plan(self._name, dict(settings), groups, options, state)

    def commit(self) -> None:
        """Record the state that all ranks have after the operation. Idempotent.

        An interrupt may end it at any point, and the next call repeats all of it: every value is
        assigned and none is incremented.
        """
        job = self._job
        if self._name == "offload":
            job.cycles = self._cycles
            for state, offloaded, cycles in self._before:
                state.cycles, state.offloaded = cycles + (not offloaded), True
            for group in self.groups:
                group.clear_failure()
        elif self.was_offloaded:
            job.generation = self.generation
            for state, *_ in self._before:
                state.generation, state.offloaded = self.generation, False
            if self._name == "reload":
                others = {n: s for n, s in self._left_out.items() if s.without(self._chosen)}
                job.left_out = {**others, **dict.fromkeys(self._skip, self._chosen)}
        if self._name == "recover":
            job.left_out = self._left_out
            job.rendezvous.complete_recovery()

    def mark_offloaded(self) -> None:
        """Mark the concerned sets as offloaded: their groups have no communicators. Local."""
        for state, *_ in self._before:
            state.offloaded = True
