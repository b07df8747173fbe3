"""A rank's plan for one operation: compared by a sum of digests, then as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from ..texts import format_ranks, named_ranks

GENERATION = "generation"
"""The state that is the job's number of reloads."""

SHUT_DOWN = "none, it was shut down"
"""The strategy of a group whose ``shutdown()`` or ``abort()`` the program has called."""


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
        detail: backends and description, for the error message only.
    """

    name: str
    members: tuple[int, ...]
    generation: int
    strategy: str
    digest: int
    set: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Plan:
    """One rank's plan for a round.

    Attributes:
        operation: ``offload`` or ``reload``.
        settings: arguments that must be equal on all ranks, by name.
        state: the state of the groups as this rank knows it, by name. Failures can leave ranks with
            different ones, as they can the generations and strategies of groups.
        groups: what must be equal on all members of each group.
        options: the options of ``install`` that must be equal on all ranks, by name.
    """

    operation: str
    settings: Mapping[str, str]
    groups: tuple[GroupPlan, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The highest generation that this rank knows."""
        return max([int(self.state.get(GENERATION, 0)), *(g.generation for g in self.groups)])

    def without_state(self) -> Plan:
        """Return the plan without what failures can leave different between the ranks."""
        groups = tuple(
            replace(group, generation=0, strategy="" if group.strategy != SHUT_DOWN else SHUT_DOWN)
            for group in self.groups
        )
        return replace(self, groups=groups, state={})

    def contribution(self, rank: int, size: int) -> int:
        """Return this rank's summand: the sum over all ranks is zero exactly if all plans agree.

        For each group, the first member subtracts what the others add. One 64-bit integer holds the
        number of arrived ranks in its low bits and the sum above. Digests therefore have 40 bits
        for up to 31 ranks and 21 bits for 16,384 ranks: the sum does not overflow with 512 groups
        per rank, and a difference is missed with a probability of 10^-12 to 10^-6.
        """
        bits = min(40, 51 - 2 * size.bit_length())
        total = _share(self._job_digest(bits), range(size), rank)
        for group in self.groups:
            text = f"{group.digest}:{group.name}:{group.generation}:{group.strategy}:{group.set}"
            total += _share(_digest(text, bits), group.members, rank)
        return total

    def _job_digest(self, bits: int) -> int:
        settings = sorted({**self.options, **self.settings, **self.state}.items())
        return _digest(json.dumps([self.operation, settings]), bits)

    def to_json(self) -> str:
        return json.dumps(
            [
                self.operation,
                dict(self.settings),
                [astuple(group) for group in self.groups],
                dict(self.options),
                dict(self.state),
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        operation, settings, groups, options, state = json.loads(text)
        built = (GroupPlan(name, tuple(members), *rest) for name, members, *rest in groups)
        return cls(operation, settings, tuple(built), options, state)


def _digest(text: str, bits: int) -> int:
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")
    return digest >> (40 - bits)


def _share(digest: int, members: Sequence[int], rank: int) -> int:
    return -digest * (len(members) - 1) if rank == members[0] else digest


def differences(plans: Mapping[int, Plan]) -> str:
    """Say in what the plans differ, on which ranks, and what to do.

    The operations are compared first, then all options and the state, then the groups.

    Args:
        plans: by rank.
    """
    return "; ".join(_differences(plans)) or "the plans differ in their digests only"


def _differences(plans: Mapping[int, Plan]) -> list[str]:
    if text := _values({rank: f"{plan.operation}()" for rank, plan in plans.items()}):
        return [text, "call the same operation on all ranks"]
    texts = _settings({rank: plan.options for rank, plan in plans.items()})
    if texts:
        return [*texts, "give install() the same options on all ranks"]
    texts = _settings({rank: plan.settings for rank, plan in plans.items()})
    if not texts:
        texts = _settings({rank: plan.state for rank, plan in plans.items()})
        texts += ["reload() on all ranks rebuilds their groups"] if texts else []
    texts = texts or _groups(plans)
    if len(texts) > 3:
        texts[3:] = [f"{len(texts) - 3} more groups differ"]
    return texts


def reconciled(plans: Mapping[int, Plan]) -> int:
    """Return the generation with which the ranks rebuild all groups of a reload.

    Positive if the plans are those of a reload and differ in the state alone, which a reload
    replaces; otherwise 0.
    """
    if any(plan.operation != "reload" for plan in plans.values()):
        return 0
    if _differences({rank: plan.without_state() for rank, plan in plans.items()}):
        return 0
    return 1 + max(plan.generation for plan in plans.values())


def _values(values: Mapping[int, str]) -> str:
    """``A on rank 0 and B on ranks 1-3``; empty if all values are equal."""
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    if len(holders) == 1:
        return ""
    return " and ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in holders.items())


def _settings(given: Mapping[int, Mapping[str, str]]) -> list[str]:
    names = sorted({name for settings in given.values() for name in settings})
    values = {
        name: _values({rank: settings.get(name, "unset") for rank, settings in given.items()})
        for name in names
    }
    return [f"{name} is {text}" for name, text in values.items() if text]


def _groups(plans: Mapping[int, Plan]) -> list[str]:
    holders: dict[tuple[str, int], dict[int, GroupPlan]] = {}
    for rank in sorted(plans):
        for group in plans[rank].groups:
            holders.setdefault((group.name, group.members[0]), {})[rank] = group
    texts = []
    for held in holders.values():
        group = next(iter(held.values()))
        details = {plan.detail for plan in held.values()} - {""}
        shown = f"group {group.name!r}" + (f" ({group.detail})" if len(details) == 1 else "")
        lacking = [rank for rank in group.members if rank in plans and rank not in held]
        if lacking:
            texts.append(
                f"{shown} of {named_ranks(group.members)} exists on "
                f"{named_ranks(held)} and not on {named_ranks(lacking)} (destroyed there, in "
                "another set, or created before install)"
            )
        elif text := _one_group(held):
            texts.append(f"{shown}: {text}")
    return texts


def _one_group(held: Mapping[int, GroupPlan]) -> str:
    members = {rank: f"[{format_ranks(group.members)}]" for rank, group in held.items()}
    for name, values in (
        ("members are", members),
        ("set is", {rank: group.set for rank, group in held.items()}),
        ("generation is", {rank: str(group.generation) for rank, group in held.items()}),
        ("strategy is", {rank: group.strategy for rank, group in held.items()}),
        ("created as", {rank: group.detail for rank, group in held.items()}),
    ):
        if text := _values(values):
            return f"{name} {text}"
    if len({group.digest for group in held.values()}) > 1:
        return f"its creation differs between {named_ranks(held)}"
    return ""
