"""The decision of how each group is released: recreated, suspended, or left as it is.

Suspending is collective over a communicator's members, so all members must choose alike. Each
rank proposes for its own groups; the proposals that are not a plain ``suspend`` are made known to
the other members when the ranks agree on the operation, and all of them conclude the same.
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
from ..rendezvous.plan import Proposal
from .suspend import communicators

__all__ = ["Choice", "Strategy", "bytes_kept", "conclude", "propose"]


@dataclass(frozen=True)
class Choice:
    """``recreate``, ``suspend`` or ``skip`` (nothing to suspend) for one group, and why."""

    strategy: str
    reason: str = ""

    def to_proposal(self, group: str) -> Proposal:
        """For the other members; ``recreate`` overrides ``skip``."""
        text = json.dumps([self.strategy, self.reason])
        return Proposal(group, text, yields=self.strategy != "recreate")

    @classmethod
    def from_text(cls, text: str) -> Choice:
        return cls(*json.loads(text))


def propose(wanted: str, obstacle: str, *, used: bool) -> Choice:
    """Return what one member proposes for a group. Pure.

    Args:
        wanted: the strategy that the user wants.
        obstacle: why its communicator cannot be suspended, in words; empty if it can.
        used: whether its communicator was ever used: one that was not has nothing to give back.
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
    """Return what all members do with a group, given one's own proposal and another's. Pure.

    ``recreate`` overrides ``skip``, and ``skip`` overrides ``suspend``.
    """
    if theirs is None:
        return mine
    return max(mine, theirs, key=lambda choice: _WEIGHT[choice.strategy])


class Strategy:
    """The choice that one operation makes for each group.

    Args:
        policy: what the user wants.
        job: the job.
    """

    def __init__(self, policy: StrategyPolicy, job: Job) -> None:
        self._policy = policy
        self._job = job
        self._choices: dict[str, Choice] = {}

    def of(self, group: ReloadableProcessGroup) -> Choice:
        """Return what is done with a group, and why."""
        return self._choices.get(group.group_name, Choice(group.history.strategy))

    def planned(self, group: ReloadableProcessGroup) -> str:
        """Return what all members of a group must expect alike, before they choose. Local."""
        if group.state is GroupState.DESTROYED:
            return "none, it was shut down"
        if group.is_live:
            return self._policy.wanted(group.group_name, group.group_desc)
        return group.history.strategy if group.communicator is not None else "recreate"

    def propose(self, groups: Sequence[ReloadableProcessGroup]) -> tuple[list[Proposal], list[str]]:
        """Choose for this rank. Local.

        Returns:
            What other members must know, and the groups of which this rank must know what other
            members propose.
        """
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
        """Decide, alike on all members, what is done with each group. Local.

        Args:
            groups: the groups to release.
            proposed: what other members propose, by group name.

        Returns:
            Warnings: which groups are recreated though they should be suspended, and why.
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
        """Say why a group cannot be suspended; empty if it can. Local."""
        backends = communicators(group.communicator, group.construction)
        obstacles = [c10d.suspend_obstacle(backend) for backend in backends]
        obstacles = obstacles or ["it has no backend object"]
        return next((text for text in (*obstacles, self._job.suspend_obstacle) if text), "")


def bytes_kept(groups: Sequence[ReloadableProcessGroup]) -> list[str]:
    """Warn of the memory that suspended communicators keep, by their own account. Local."""
    stays = sum((g.history.held_bytes or 0) - g.history.suspended_bytes for g in groups)
    if stays <= 0:
        return []
    return [
        f"{mebibytes(stays)} stay in {counted(len(groups), 'suspended communicator')}, by their "
        "own account; strategy 'recreate' gives them back"
    ]
