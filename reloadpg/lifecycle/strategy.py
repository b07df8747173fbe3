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
from ..errors import ReleaseError, counted, mebibytes
from ..groups.proxy import ReloadableProcessGroup
from ..groups.registry import Job
from ..groups.selection import StrategyPolicy
from ..rendezvous.plan import Proposal
from .suspend import communicators

__all__ = ["Choice", "Facts", "Strategy", "conclude", "propose"]


@dataclass(frozen=True)
class Facts:
    """Facts that this rank knows of a group's communicator.

    Attributes:
        obstacle: why it cannot be suspended, in words; empty if it can.
        used: whether it was ever used: one that was not has nothing to give back.
        total: bytes that it holds by its own account, or None if it gives none.
        suspendable: bytes of them that a suspend gives back.
    """

    obstacle: str = ""
    used: bool = True
    total: int | None = None
    suspendable: int = 0


@dataclass(frozen=True)
class Choice:
    """``recreate``, ``suspend`` or ``skip`` (nothing to suspend) for one group, and why."""

    strategy: str
    reason: str = ""

    def to_proposal(self, group: str) -> Proposal:
        """For the other members; one that must recreate decides for those that would skip."""
        text = json.dumps([self.strategy, self.reason])
        return Proposal(group, text, yields=self.strategy != "recreate")

    @classmethod
    def from_text(cls, text: str) -> Choice:
        return cls(*json.loads(text))


def propose(policy: StrategyPolicy, wanted: str, facts: Facts) -> Choice:
    """Return what one member proposes for a group. Pure."""
    if wanted == "recreate":
        return Choice("recreate")
    if facts.obstacle:
        return Choice("recreate", facts.obstacle)
    if not facts.used:
        if wanted == "suspend":
            return Choice("skip", "its communicator was never used: nothing to suspend")
        return Choice("recreate", "its communicator was never used: nothing to suspend")
    if wanted == "suspend":
        return Choice("suspend")
    if not facts.total:
        return Choice("recreate", "the backend does not say what a suspend would give back")
    share = facts.suspendable / facts.total
    gives = f"a suspend gives back {share:.0%} of what its communicator holds"
    if share < policy.min_share:
        return Choice("recreate", f"{gives}, less than {policy.min_share:.0%}")
    return Choice("suspend", gives)


_WEIGHT = {"suspend": 0, "skip": 1, "recreate": 2}


def conclude(mine: Choice, theirs: Choice | None) -> Choice:
    """Return what all members do with a group, given one's own proposal and another's. Pure.

    One that must recreate decides for all; one that has nothing to suspend makes all skip.
    """
    if theirs is None:
        return mine
    return max(mine, theirs, key=lambda choice: _WEIGHT[choice.strategy])


class Strategy:
    """The choice that one offload makes for each group.

    Args:
        policy: what the user wants.
        job: the job, which learns from what happens.
    """

    def __init__(self, policy: StrategyPolicy, job: Job) -> None:
        self._policy = policy
        self._job = job
        self._choices: dict[str, Choice] = {}
        self.warnings: list[str] = []

    def of(self, group: ReloadableProcessGroup) -> Choice:
        """Return what is done with a group, and why."""
        return self._choices.get(group.group_name, Choice(group.history.strategy))

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
            facts = self._facts(group, wanted)
            group.history.held_bytes = facts.total
            group.history.suspended_bytes = facts.suspendable
            choice = self._choices[name] = propose(self._policy, wanted, facts)
            if wanted != "recreate" and choice.strategy != "suspend":
                proposals.append(choice.to_proposal(name))
        subjects = [name for name, mine in self._choices.items() if mine.strategy != "recreate"]
        return proposals, subjects

    def decide(self, groups: Sequence[ReloadableProcessGroup], proposed: Mapping[str, str]) -> None:
        """Decide, alike on all members, what is done with each group. Local.

        Args:
            groups: the groups to release.
            proposed: what other members propose, by group name.

        Raises:
            ReleaseError: a group cannot be suspended and must not be recreated instead.
        """
        recreated: list[str] = []
        for group in groups:
            name = group.group_name
            theirs = Choice.from_text(proposed[name]) if name in proposed else None
            choice = self._choices[name] = conclude(self._choices[name], theirs)
            group.history.strategy = choice.strategy
            if choice.strategy != "recreate" or not choice.reason:
                continue
            wanted = self._policy.wanted(name, group.group_desc)
            if wanted == "suspend" and not self._policy.fallback:
                raise ReleaseError(
                    f"offload: {group!r} cannot be suspended: {choice.reason}. Nothing was "
                    "changed. Install with strategy='auto', or with a StrategyPolicy that allows "
                    "the fallback to recreate."
                )
            recreated.append(choice.reason)
        for reason in dict.fromkeys(recreated):
            count = recreated.count(reason)
            self.warnings.append(
                f"{count} {'group is' if count == 1 else 'groups are'} recreated, not suspended: "
                f"{reason}"
            )

    def fall_back(self, groups: Sequence[ReloadableProcessGroup], phase: str, reason: str) -> None:
        """Recreate these groups after all: one could not be suspended or resumed. Local."""
        self.warnings.append(f"recreated instead of suspended: {reason}")
        # It has cost all ranks a wait: ``auto`` does not try again in this job.
        self._job.suspend_obstacle = f"{phase} failed before: {reason}"
        for group in groups:
            self._choices[group.group_name] = Choice("recreate", reason)
            group.history.strategy = "recreate"

    def learn(
        self, kept: Sequence[ReloadableProcessGroup], came_back: int | None, source: str
    ) -> None:
        """Learn from the device whether suspending was worth it. Local.

        A communicator's own account counts only part of its memory. A job whose device got back
        less than ``min_share`` of it recreates its ``auto`` groups from then on: this rank
        proposes so next time, and one proposal is enough.

        Args:
            kept: the groups that were suspended.
            came_back: bytes that the device got back from them; None if nothing measures it.
            source: what measures it.
        """
        account = sum(group.history.held_bytes or 0 for group in kept)
        stays = account - sum(group.history.suspended_bytes for group in kept)
        if stays > 0:
            self.warnings.append(
                f"{mebibytes(stays)} stay in {counted(len(kept), 'suspended communicator')}, by "
                "their own account; strategy 'recreate' gives them back"
            )
        if account and came_back is not None and came_back < self._policy.min_share * account:
            text = (
                f"the last suspend gave back {max(0, came_back) / account:.0%} of "
                f"{account / 2**20:.0f} MiB, measured by {source}"
            )
            self._job.suspend_obstacle = text
            self.warnings.append(
                f"{text}: NVLS and NET buffers stay, and peers may hold what they have mapped"
            )

    def _facts(self, group: ReloadableProcessGroup, wanted: str) -> Facts:
        stats = group.memory_stats()
        total = None if stats is None else stats.get("total", 0)
        if wanted == "recreate":
            return Facts(total=total)
        obstacles = [
            c10d.suspend_obstacle(backend)
            for backend in communicators(group.communicator, group.construction)
        ] or ["it has no backend object"]
        if wanted == "auto":
            obstacles.append(self._job.suspend_obstacle)
        return Facts(
            next((text for text in obstacles if text), ""),
            used=stats != {},
            total=total,
            suspendable=stats.get("suspend", 0) if stats else 0,
        )
