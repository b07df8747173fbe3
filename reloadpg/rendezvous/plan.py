"""A rank's plan for one operation: compared by a sum of digests, then as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import format_ranks

__all__ = ["GroupPlan", "Plan", "Proposal", "first_difference"]


class Proposal(NamedTuple):
    """A rank's proposal on a subject, for the ranks that look it up.

    Attributes:
        subject: the subject, under a name that the other ranks know.
        text: the proposal. If several ranks propose on a subject, all ranks read the same one.
        yields: whether a proposal that does not yield takes precedence.
    """

    subject: str
    text: str
    yields: bool = False


@dataclass(frozen=True)
class GroupPlan:
    """One member's plan for one group.

    Attributes:
        name: its name; the parts of a split can share a name.
        members: global ranks.
        generation: the reload that built its communicator.
        strategy: the strategy that releases or restores it.
        digest: 40-bit digest of all else that must be equal on all members.
        set: the set that it belongs to.
    """

    name: str
    members: tuple[int, ...]
    generation: int
    strategy: str
    digest: int
    set: str = ""

    def difference(self, other: GroupPlan) -> str:
        """Describe the first difference; empty if there is none."""
        for field_name in ("members", "set", "generation", "strategy", "digest"):
            mine, theirs = getattr(self, field_name), getattr(other, field_name)
            if mine != theirs:
                if field_name == "digest":
                    return "different backends or order of creation"
                return f"{field_name} {_shown(mine)} versus {_shown(theirs)}"
        return ""


@dataclass(frozen=True)
class Plan:
    """One rank's plan for a round.

    Attributes:
        operation: ``offload`` or ``reload``.
        settings: values that must be equal on all ranks of the job, by name.
        groups: plans that must be equal on a group's members.
    """

    operation: str
    settings: Mapping[str, str]
    groups: tuple[GroupPlan, ...] = ()

    def contribution(self, rank: int, size: int) -> int:
        """Return this rank's summand: the sum over all ranks is zero exactly if all plans agree.

        For each group, the first member subtracts what the others add. One 64-bit integer holds the
        number of arrived ranks in its low bits and the sum above. Digests therefore have 40 bits
        for up to 64 ranks and 24 bits for 16,384 ranks: the sum does not overflow with 512 groups
        per rank, and a difference is missed with a probability of 10^-12 to 10^-7.
        """
        bits = min(40, 54 - 2 * size.bit_length())
        total = _share(self._job_digest(bits), range(size), rank)
        for group in self.groups:
            text = f"{group.digest}:{group.name}:{group.generation}:{group.strategy}:{group.set}"
            total += _share(_digest(text, bits), group.members, rank)
        return total

    def _job_digest(self, bits: int) -> int:
        return _digest(json.dumps([self.operation, sorted(self.settings.items())]), bits)

    def to_json(self) -> str:
        groups = [
            [g.name, g.members, g.generation, g.strategy, g.digest, g.set] for g in self.groups
        ]
        return json.dumps([self.operation, dict(self.settings), groups])

    @classmethod
    def from_json(cls, text: str) -> Plan:
        operation, settings, groups = json.loads(text)
        return cls(
            operation,
            settings,
            tuple(GroupPlan(n, tuple(m), int(g), s, int(d), t) for n, m, g, s, d, t in groups),
        )


def _digest(text: str, bits: int) -> int:
    found = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")
    return found >> (40 - bits)


def _share(digest: int, members: Sequence[int], rank: int) -> int:
    return -digest * (len(members) - 1) if rank == members[0] else digest


def _shown(value: object) -> str:
    return f"[{format_ranks(value)}]" if isinstance(value, tuple) else str(value)


def _key(group: GroupPlan) -> tuple[str, int]:
    return group.name, group.members[0]


def first_difference(plans: Mapping[int, Plan]) -> str:
    """Describe the first difference between plans, with ranks and values. Pure.

    Args:
        plans: by rank.
    """
    ranks = sorted(plans)
    first = plans[ranks[0]]
    for rank in ranks[1:]:
        plan = plans[rank]
        if plan.operation != first.operation:
            return (
                f"rank {ranks[0]} calls {first.operation}() and rank {rank} calls "
                f"{plan.operation}()"
            )
        for name in sorted({*first.settings, *plan.settings}):
            mine, theirs = first.settings.get(name), plan.settings.get(name)
            if mine != theirs:
                return f"{name} is {mine} on rank {ranks[0]} and {theirs} on rank {rank}"
    seen: dict[tuple[str, int], tuple[int, GroupPlan]] = {}
    for rank in ranks:
        for group in plans[rank].groups:
            holder = seen.setdefault(_key(group), (rank, group))
            difference = holder[1].difference(group)
            if difference:
                return f"group {group.name!r}: {difference} (rank {holder[0]} versus rank {rank})"
    for key, (holder_rank, group) in seen.items():
        lacking = [
            rank
            for rank in group.members
            if rank in plans and all(_key(g) != key for g in plans[rank].groups)
        ]
        if lacking:
            return (
                f"group {group.name!r} of ranks [{format_ranks(group.members)}] exists on rank "
                f"{holder_rank} and not on rank {format_ranks(lacking)} (destroyed there, in "
                "another set, or created before install)"
            )
    return "the plans differ in their digests only"
