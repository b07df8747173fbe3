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
from ..errors import BorrowedError
from ..groups.borrowed import borrowed, is_part
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState
from ..groups.selection import StrategyPolicy
from ..rendezvous.plan import SHUT_DOWN, Proposal
from ..texts import counted, mebibytes
from .callbacks import callbacks
from .job import Job
from .suspend import released_backends


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


_REFUSED = "borrowed"
"""Subject of the proposal to refuse the operation, which all ranks read."""


def _anchored(group: str) -> str:
    """Subject of the proposal to leave a group as it is, the last one of a rank."""
    return f"anchor/{group}"


def _kept(group: str) -> str:
    """Subject of the proposal to keep the communicator of a group, which its members read."""
    return f"borrowed/{group}"


class Strategy:
    """The choice that one operation makes for each group.

    Attributes:
        extends: whether this rank proposes to keep communicators, or to refuse the operation.
    """

    def __init__(self, policy: StrategyPolicy, job: Job, borrowed: str = "ignore") -> None:
        self._policy = policy
        self._job = job
        self._borrowed = borrowed
        self._choices: dict[str, Choice] = {}
        self._used: dict[str, bool] = {}
        self.extends = False

    def of(self, group: ManagedGroup) -> Choice:
        return self._choices.get(group.name, Choice(group.history.strategy))

    def planned(self, group: ManagedGroup) -> str:
        """The strategy that all members of a group must expect before the choice."""
        if group.state is GroupState.DESTROYED:
            return SHUT_DOWN
        if group.is_live:
            return self._policy.wanted(group.name, group.desc)
        return group.history.strategy if group.communicator is not None else "recreate"

    def propose(self, groups: Sequence[ManagedGroup]) -> tuple[list[Proposal], list[str]]:
        """Return this rank's proposals, and the groups of which it must read the other members'."""
        proposals: list[Proposal] = []
        for group in groups:
            name = group.name
            wanted = self._policy.wanted(name, group.desc)
            stats = group.memory_stats()
            group.history.held_bytes = None if stats is None else stats.get("total", 0)
            group.history.suspended_bytes = stats.get("suspend", 0) if stats else 0
            self._used[name] = stats != {}
            obstacle = "" if wanted == "recreate" else self._obstacle(group)
            if wanted != "recreate":
                obstacle = obstacle or group.history.shortfall
            choice = self._choices[name] = propose(wanted, obstacle, used=self._used[name])
            if wanted != "recreate" and choice.strategy != "suspend":
                proposals.append(choice.to_proposal(name))
            if choice.strategy == "recreate" and (holder := self._holder(group)):
                self.extends = True
                proposals.append(self._protect(group, holder))
        if (anchor := self._anchor(groups)) is not None:
            self.extends = True
            proposals.append(Proposal(_anchored(anchor.name), ""))
        subjects = [name for name, mine in self._choices.items() if mine.strategy != "recreate"]
        if self._policy.anchor:
            subjects += map(_anchored, self._choices)
        if self._borrowed in _PROTECTS:
            subjects += [_REFUSED, *map(_kept, self._choices)]
        return proposals, subjects

    def _anchor(self, groups: Sequence[ManagedGroup]) -> ManagedGroup | None:
        """The smallest group of this rank that has a communicator and may stay alive."""
        anchors = [
            group
            for group in groups
            if self._policy.anchors(group.name, group.desc)
            and self._used[group.name]
            and not group.construction.is_handed_over
        ]
        order = [(len(group.construction.ranks), group.construction.order) for group in anchors]
        return anchors[order.index(min(order))] if anchors else None

    def _holder(self, group: ManagedGroup) -> str:
        """What other code holds of a group and could use after a release; empty if it is none."""
        if self._borrowed not in _PROTECTS:
            return ""
        told = callbacks.packages_of(group.proxy)
        held = [loan for loan in borrowed([group]) if loan.raw and not loan.ended]
        others = [loan for loan in held if not any(is_part(loan.by, name) for name in told)]
        return "; ".join(map(str, others))

    def _protect(self, group: ManagedGroup, holder: str) -> Proposal:
        """Propose to suspend a group instead of recreating it, or to refuse the operation."""
        if self._borrowed == "suspend":
            obstacle = self._obstacle(group)
            if not obstacle:
                return Proposal(_kept(group.name), holder)
            why = f"The group cannot be suspended, which would keep the pointer valid: {obstacle}."
        else:
            why = "Installed with borrowed='refuse'."
        return Proposal(_REFUSED, f"{holder}. {why}")

    def decide(self, groups: Sequence[ManagedGroup], proposed: Mapping[str, str]) -> list[str]:
        """Make the choice for each group, equal on all members, with their proposals by group name.

        Returns warnings of groups that are recreated instead of suspended, with the reason.
        """
        if _REFUSED in proposed:
            raise _refusal(proposed[_REFUSED])
        recreated: list[str] = []
        for group in groups:
            name = group.name
            theirs = Choice.from_text(proposed[name]) if name in proposed else None
            mine = self._choices[name]
            if _kept(name) in proposed:  # its bytes count less than the pointer
                mine, theirs = self._keep(group, theirs, proposed[_kept(name)]), None
            if _anchored(name) in proposed:
                mine, theirs = Choice("skip", _ANCHOR), None
            choice = self._choices[name] = conclude(mine, theirs)
            group.history.strategy = choice.strategy
            if choice.strategy == "recreate" and choice.reason:
                recreated.append(choice.reason)
        anchored = any(choice.reason == _ANCHOR for choice in self._choices.values())
        return [_NO_ANCHOR] * bool(self._policy.anchor and groups and not anchored) + [
            f"{counted(count, 'group')} {'is' if count == 1 else 'are'} recreated, not suspended: "
            f"{reason}"
            for reason in dict.fromkeys(recreated)
            for count in [recreated.count(reason)]
        ]

    def _keep(self, group: ManagedGroup, theirs: Choice | None, holder: str) -> Choice:
        """Keep the communicator of a group that a member has lent, or refuse the operation."""
        obstacle = self._obstacle(group)
        if theirs is not None and theirs.strategy == "recreate" and _SHORT not in theirs.reason:
            obstacle = obstacle or theirs.reason
        if obstacle:
            raise _refusal(f"{holder}. A member of the group cannot suspend it: {obstacle}.")
        if not self._used[group.name]:
            return propose("suspend", "", used=False)
        return Choice("suspend", f"its communicator is kept: {holder}")

    def _obstacle(self, group: ManagedGroup) -> str:
        """Why a group cannot be suspended; empty if it can."""
        backends = released_backends(group.communicator, group.construction)
        obstacles = [c10d.suspend_obstacle(backend) for backend in backends]
        obstacles = obstacles or ["it has no backend object"]
        return next((text for text in (*obstacles, self._job.suspend_obstacle) if text), "")


_ANCHOR = "its communicator stays alive: an anchor of StrategyPolicy(anchor=...)"
_NO_ANCHOR = (
    "no communicator of this rank stays alive: no group that it has used matches "
    "StrategyPolicy(anchor=...)"
)

_PROTECTS = ("suspend", "refuse")
"""Values of ``install(borrowed=...)`` with which an offload invalidates nothing that is used."""


def _refusal(why: str) -> BorrowedError:
    return BorrowedError(
        f"offload: {why} The offload would release the communicator, and a later use of it is a "
        "use after free. Nothing was changed on any rank. Let the holder drop it and take it "
        "again, with reloadpg.on_generation(group, before=..., after=...) or the module of "
        "reloadpg.integrations for that library; or accept the danger with "
        "install(borrowed='warn')."
    )


_SHORT = "an earlier suspend gave back"


def verify(
    groups: Sequence[ManagedGroup], before: Mapping[str, int], after: Mapping[str, int]
) -> list[str]:
    """Warn if suspended groups gave back less than their communicators reported. Local.

    All ranks recreate these groups from the next offload on.

    Args:
        groups: the groups that were suspended.
        before, after: bytes in use, by source.
    """
    expected = sum(group.history.suspended_bytes for group in groups)
    source = next((name for name in before if name != "rss" and name in after), "")
    if not groups or (expected and not source):
        return []
    freed = before[source] - after[source] if source else 0
    if expected and freed >= expected * _LEAST_SHARE:
        return []
    if not expected and any(group.history.held_bytes is None for group in groups):
        return []  # the backend reports no bytes
    short = f"{_SHORT} {mebibytes(freed)} of {mebibytes(expected)}"
    for group in groups:
        group.history.shortfall = short
    why = "NCCL without cuMem (NCCL_CUMEM_ENABLE=0, or a driver without virtual memory) keeps it"
    return [
        f"the suspend of {counted(len(groups), 'group')} gave back {mebibytes(freed)} of the "
        f"{mebibytes(expected)} that NCCL had reported: {why}. All ranks recreate these groups "
        "from the next offload on"
    ]


_LEAST_SHARE = 0.25
"""Share of the reported bytes that a suspend must give back; other processes may allocate too."""


def bytes_kept(groups: Sequence[ManagedGroup]) -> list[str]:
    """Warn of the memory that suspended communicators report as kept. Local."""
    stays = sum((g.history.held_bytes or 0) - g.history.suspended_bytes for g in groups)
    if stays <= 0:
        return []
    return [
        f"{counted(len(groups), 'suspended communicator')} kept {mebibytes(stays)}; strategy "
        "'recreate' releases them"
    ]
