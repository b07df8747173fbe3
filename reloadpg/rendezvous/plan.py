"""A rank's plan for one operation: compared by a sum of digests, then as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from ..texts import named_ranks

GENERATION = "generation"
"""The state that is a number of reloads: of the job, or of a group."""

MOST = 3
"""Maximum number of entries, or of ranks with their work, in a message."""


@dataclass(frozen=True)
class Entry:
    """One thing that ranks must agree on: a group, the options of ``install``, a call.

    Attributes:
        subject: what it is; groups with different ``members`` can share it. May be empty.
        members: the ranks of a group, in an order that they share; empty for all ranks.
        fixed: values that the program determines, by name.
        state: values by name that failures can leave different between the ranks.
        detail: further description, for messages only.
    """

    subject: str
    members: tuple[int, ...]
    fixed: Mapping[str, str]
    state: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        ranks = f" of {named_ranks(self.members)}" if self.members else ""
        return f"{self.subject}{detail}{ranks}"


@dataclass(frozen=True)
class Plan:
    """One rank's plan for a round: ``offload`` or ``reload``, and what it must agree on."""

    operation: str
    entries: tuple[Entry, ...] = ()

    def contribution(self, rank: int, size: int) -> int:
        """Return this rank's summand: the sum over all ranks is zero exactly if all plans agree.

        For each entry, the first member subtracts what the others add. One 64-bit integer holds the
        number of arrived ranks in its low bits and the sum above. Digests therefore have 40 bits
        for up to 31 ranks and 21 bits for 16,384 ranks: the sum does not overflow with 512 entries
        per rank, and a difference is missed with a probability of 10^-12 to 10^-6.
        """
        bits = min(40, 51 - 2 * size.bit_length())
        total = 0
        for entry in self.entries:
            values = sorted(entry.fixed.items()), sorted(entry.state.items())
            text = json.dumps([self.operation, entry.subject, entry.members, values])
            total += _share(_digest(text, bits), entry.members or range(size), rank)
        return total

    def to_json(self) -> str:
        return json.dumps([self.operation, [astuple(entry) for entry in self.entries]])

    @classmethod
    def from_json(cls, text: str) -> Plan:
        operation, entries = json.loads(text)
        built = (Entry(subject, tuple(members), *rest) for subject, members, *rest in entries)
        return cls(operation, tuple(built))


def _digest(text: str, bits: int) -> int:
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")
    return digest >> (40 - bits)


def _share(digest: int, members: Sequence[int], rank: int) -> int:
    return -digest * (len(members) - 1) if rank == members[0] else digest


def differences(plans: Mapping[int, Plan]) -> str:
    """Say in what the plans differ, on which ranks, and what to do.

    The operations are compared first, then what the program determines, then the state.

    Args:
        plans: by rank.
    """
    if text := _values({rank: f"{plan.operation}()" for rank, plan in plans.items()}):
        return f"{text}; call the same operation on all ranks"
    fixed = _differences(plans, lambda entry: entry.fixed)
    calls = [(entry, text) for entry, text in fixed if not entry.members]
    if calls:  # the groups of a rank follow from them
        return f"{_shortened(calls)}; give the same arguments on all ranks"
    if fixed:
        return _shortened(fixed)
    state = _differences(plans, lambda entry: entry.state)
    if state:
        return f"{_shortened(state)}; reload() on all ranks rebuilds the groups"
    return "the plans differ in their digests only"


def reconciled(plans: Mapping[int, Plan]) -> int:
    """Return the generation with which the ranks rebuild all groups of a reload.

    Positive if the plans of a reload differ in the state alone, which a reload replaces;
    otherwise 0.
    """
    if any(plan.operation != "reload" for plan in plans.values()):
        return 0
    if _differences(plans, lambda entry: entry.fixed):
        return 0
    entries = [entry for plan in plans.values() for entry in plan.entries]
    return 1 + max(int(entry.state.get(GENERATION, 0)) for entry in entries)


def _differences(
    plans: Mapping[int, Plan], values_of: Callable[[Entry], Mapping[str, str]]
) -> list[tuple[Entry, str]]:
    """The entries that some of their ranks lack or have with other values, and what differs."""
    holders: dict[tuple[str, tuple[int, ...]], dict[int, Entry]] = {}
    for rank in sorted(plans):
        for entry in plans[rank].entries:
            holders.setdefault((entry.subject, entry.members), {})[rank] = entry
    found = []
    for held in holders.values():
        entry = next(iter(held.values()))
        lacking = [rank for rank in entry.members if rank in plans and rank not in held]
        if lacking:
            text = (
                f"{entry} exists on {named_ranks(held)} and not on {named_ranks(lacking)} "
                "(destroyed there, in another set, or created before install)"
            )
            found.append((entry, text))
        elif text := _different({rank: values_of(entry) for rank, entry in held.items()}):
            found.append((entry, f"{entry}: {text}" if entry.subject else text))
    return found


def _different(given: Mapping[int, Mapping[str, str]]) -> str:
    names = sorted({name for values in given.values() for name in values})
    texts = {
        name: _values({rank: values.get(name, "unset") for rank, values in given.items()})
        for name in names
    }
    return "; ".join(f"{name} is {text}" for name, text in texts.items() if text)


def _values(values: Mapping[int, str]) -> str:
    """``A on rank 0 and B on ranks 1-3``; empty if all values are equal."""
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    if len(holders) == 1:
        return ""
    return " and ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in holders.items())


def _shortened(found: Sequence[tuple[Entry, str]]) -> str:
    texts = [text for _, text in found]
    if len(texts) > MOST:
        texts[MOST:] = [f"{len(texts) - MOST} more groups differ"]
    return "; ".join(texts)
