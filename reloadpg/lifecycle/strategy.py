"""The choice of how each group is released: recreated, suspended, or skipped.

Suspending is collective over a communicator's members, so all members must make the same choice.
Each rank proposes a strategy for its own groups. Proposals other than ``suspend`` are published
when the ranks agree on the operation, and all members draw the same conclusion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import c10d
from ..errors import counted, mebibytes
from ..groups.proxy import GroupState, ReloadableProcessGroup
from ..groups.registry import Job
from ..groups.selection import StrategyPolicy
from ..rendezvous.plan import SHUT_DOWN, Proposal
from .suspend import communicators


@dataclass(frozen=True)
class Choice:
    """``recreate``, ``suspend`` or ``skip`` (nothing to suspend) for one group, with a reason."""

    strategy: str
    reason: str = ""

    def to_proposal(self, group: str) -> Proposal:
        """Return the proposal for the other members; ``recreate`` overrides ``skip``."""
        text = json.dumps([self.strategy, self.reason])
        return Proposal(group, text, yields=self.strategy != "recreate")

    @classmethod
    def from_text(cls, text: str) -> Choice:
        return cls(*json.loads(text))


def propose(wanted: str, obstacle: str, *, used: bool) -> Choice:
    """Return one member's proposal for a group whose communicator was ``used``. Pure.

    ``obstacle`` is why it cannot be suspended; empty if it can.
    """
    if wanted == "recreate":
        return Choice("recreate")
    if obstacle:
        return Choice("recreate", obstacle)
    if not used:
        return Choice("skip", "its communicator was never used: nothing to suspend")
    return Choice("suspend")


_WEIGHT = {"suspend": 0, "skip": 1, "recreate": 2}


def conclude(mine: Choice, theirs: Choice | None) -> Choice:
    """Conclude from this rank's proposal and another member's: the one that overrides. Pure."""
    if theirs is None:
        return mine
    return max(mine, theirs, key=lambda choice: _WEIGHT[choice.strategy])


class Strategy:
    """The choice that one operation makes for each group."""

    def __init__(self, policy: StrategyPolicy, job: Job) -> None:
        self._policy = policy
        self._job = job
        self._choices: dict[str, Choice] = {}

    def of(self, group: ReloadableProcessGroup) -> Choice:
        return self._choices.get(group.group_name, Choice(group.history.strategy))

    def planned(self, group: ReloadableProcessGroup) -> str:
        """The strategy that all members of a group must expect before the choice."""
        if group.state is GroupState.DESTROYED:
            return SHUT_DOWN
        if group.is_live:
            return self._policy.wanted(group.group_name, group.group_desc)
        return group.history.strategy if group.communicator is not None else "recreate"

    def propose(self, groups: Sequence[ReloadableProcessGroup]) -> tuple[list[Proposal], list[str]]:
        """Return this rank's proposals, and the groups of which it must read the other members'."""
        proposals: list[Proposal] = []
        for group in groups:
            name = group.group_name
            wanted = self._policy.wanted(name, group.group_desc)
            stats = group.memory_stats()
            group.history.held_bytes = None if stats is None else stats.get("total", 0)
            group.history.suspended_bytes = stats.get("suspend", 0) if stats else 0
            obstacle = "" if wanted == "recreate" else self._obstacle(group)
            choice = self._choices[name] = propose(wanted, obstacle, used=stats != {})
            if wanted != "recreate" and choice.strategy != "suspend":
                proposals.append(choice.to_proposal(name))
        subjects = [name for name, mine in self._choices.items() if mine.strategy != "recreate"]
        return proposals, subjects

    def decide(
        self, groups: Sequence[ReloadableProcessGroup], proposed: Mapping[str, str]
    ) -> list[str]:
        """Make the choice for each group, equal on all members, with their proposals by group name.

        Returns warnings of groups that are recreated instead of suspended, with the reason.
        """
        recreated: list[str] = []
        for group in groups:
            name = group.group_name
            theirs = Choice.from_text(proposed[name]) if name in proposed else None
            choice = self._choices[name] = conclude(self._choices[name], theirs)
            group.history.strategy = choice.strategy
            if choice.strategy == "recreate" and choice.reason:
                recreated.append(choice.reason)
        return [
            f"{counted(count, 'group')} {'is' if count == 1 else 'are'} recreated, not suspended: "
            f"{reason}"
            for reason in dict.fromkeys(recreated)
            for count in [recreated.count(reason)]
        ]

    def _obstacle(self, group: ReloadableProcessGroup) -> str:
        """Why a group cannot be suspended; empty if it can."""
        backends = communicators(group.communicator, group.construction)
        obstacles = [c10d.suspend_obstacle(backend) for backend in backends]
        obstacles = obstacles or ["it has no backend object"]
        return next((text for text in (*obstacles, self._job.suspend_obstacle) if text), "")


def bytes_kept(groups: Sequence[ReloadableProcessGroup]) -> list[str]:
    """Warn of the memory that suspended communicators report as kept. Local."""
    stays = sum((g.history.held_bytes or 0) - g.history.suspended_bytes for g in groups)
    if stays <= 0:
        return []
    return [
        f"{counted(len(groups), 'suspended communicator')} kept {mebibytes(stays)}; strategy "
        "'recreate' releases them"
    ]
