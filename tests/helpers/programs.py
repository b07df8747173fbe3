"""Random programs over process groups, and the model that predicts the result of each step.

A program is plain data: a world size and a list of instructions, which every rank interprets
(``program_ranks``). The model executes the same instructions without a process group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from helpers.worlds import CAN_SPLIT

ADVANCES_COUNTER = TorchVersion(torch.__version__) >= "2.15"
"""Whether a creation with local synchronization counts for the names of later groups."""
WORLD = -1
"""The slot of the default group."""
WORLD_TIMEOUT_S = 40.0
DEFAULT_TIMEOUT_S = 1800.0
"""Torch's own for gloo."""

Instruction = list[Any]
Expected = dict[str, Any]


@dataclass
class Program:
    """The instructions of all ranks. A failure prints the repr."""

    size: int
    bound: bool  # whether the default group is bound to a device, and may be split
    instructions: list[Instruction]

    def __repr__(self) -> str:
        lines = "".join(f"\n    {line}," for line in self.instructions)
        return f"Program(size={self.size}, bound={self.bound}, instructions=[{lines}\n])"


@dataclass
class Group:
    """The expected group. ``holders`` are the members that did not destroy it yet."""

    ranks: tuple[int, ...]
    desc: str
    timeout: float
    holders: set[int] = field(default_factory=set)
    state: str = "live"
    generation: int = 0

    def __post_init__(self) -> None:
        self.holders = set(self.ranks)

    @property
    def managed(self) -> bool:
        return len(self.ranks) > 1

    @property
    def whole(self) -> bool:
        return self.holders == set(self.ranks)


class Model:
    """The job, and the expected observations of each rank after each instruction."""

    def __init__(self, size: int, splits: bool = False) -> None:
        self.size = size
        self.splits = splits
        self.groups = {WORLD: Group(tuple(range(size)), "default_pg", WORLD_TIMEOUT_S)}
        self.released = False
        self.generation = 0
        self.store_blocked = False
        """An abandoned creation holds the store client that new groups would use."""
        self._names: set[tuple[tuple[int, ...], int]] = set()

    # -- possible instructions -------------------------------------------------------------------

    @property
    def subgroups(self) -> dict[int, Group]:
        """The groups that some rank still holds, without WORLD."""
        return {s: g for s, g in self.groups.items() if s != WORLD and g.holders}

    @property
    def usable(self) -> dict[int, Group]:
        """The groups that all their members hold."""
        return {slot: group for slot, group in self.groups.items() if group.whole}

    def local_name(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
        """The input of torch's name with local synchronization; None where it cannot be used.

        Torch hashes the ranks and the number of groups that the process knows. Members that know
        different numbers never meet, and a name that was used before finds old keys in the store.
        Since 2.15 only the members advance the counter that all later names use.
        """
        if ADVANCES_COUNTER:
            return (ranks, len(self._names)) if len(ranks) == self.size else None
        counts = {sum(rank in group.holders for group in self.groups.values()) for rank in ranks}
        name = (ranks, counts.pop())
        return None if counts or name in self._names else name

    # -- expected observations --------------------------------------------------------------------

    def step(self, number: int, instruction: Instruction) -> list[Expected]:
        """Execute one instruction; return the expected observations of each rank."""
        results = getattr(self, f"_{instruction[0]}")(number, *instruction[1:])
        return [{"result": results[rank], **self._seen(rank)} for rank in range(self.size)]

    def _seen(self, rank: int) -> Expected:
        held = {s: g for s, g in self.groups.items() if g.managed and rank in g.holders}
        states = {group.state for group in held.values()}
        return {
            "state": next((s for s in ("failed", "offloaded") if s in states), "live"),
            "generation": self.generation,
            "groups": {
                slot: [g.state, g.generation, g.timeout, g.desc] for slot, g in held.items()
            },
            "tables": True,
        }

    def _create(
        self, _: int, slot: int, ranks: list[int], form: str, local: bool, desc: str, timeout: int
    ) -> list[Any]:
        members = tuple(sorted(ranks))
        if local:
            name = self.local_name(members)
            assert name is not None, "the program is illegal"
            self._names.add(name)
        group = Group(members, desc or "undefined", float(timeout or DEFAULT_TIMEOUT_S))
        self.groups[slot] = group
        kind = "reloadable" if group.managed else "as torch made it"
        outside = "none" if local else "no member"
        return [kind if rank in members else outside for rank in range(self.size)]

    def _split(
        self, number: int, slot: int, ranks: list[int], desc: str, timeout: int
    ) -> list[Any]:
        return self._create(number, slot, ranks, "split", True, desc, timeout)

    def _destroy(self, _: int, slot: int, only: int | None) -> list[Any]:
        group = self.groups[slot]
        leaving = group.holders if only is None else {only}
        group.holders = group.holders - leaving
        done = "destroyed" if group.managed else "gone"
        return [done if rank in leaving else "" for rank in range(self.size)]

    def _retime(self, _: int, slot: int, seconds: int) -> list[Any]:
        self.groups[slot].timeout = float(seconds)
        return [""] * self.size

    def _collective(self, number: int, slot: int, kind: str) -> list[Any]:
        group = self.groups[slot]
        values = [contribution(rank, number) for rank in group.ranks]
        results: list[Any] = [""] * self.size
        for index, rank in enumerate(group.ranks):
            if group.state != "live":
                results[rank] = ["GroupOffloadedError", None]
            elif kind == "all_reduce":
                results[rank] = [sum(values)]
            elif kind == "all_gather":
                results[rank] = values
            else:
                results[rank] = [values[index - 1]]
        return results

    def _offload(self, _: int, fault: list[Any] | None) -> list[Any]:
        if self._disagreeing():
            return [["DisagreementError", None]] * self.size
        live = [self._count(rank, live=True) for rank in range(self.size)]
        self.released = True
        if fault is not None and fault[1] < live[fault[0]]:
            return self._fail("ReleaseError", fault[0])
        for group in self._held():
            group.state = "offloaded"
        return [["offload", live[rank], self.generation, 0] for rank in range(self.size)]

    def _reload(self, _: int, connect: str, fault: list[Any] | None) -> list[Any]:
        if self._disagreeing():
            return [["DisagreementError", None]] * self.size
        if not self.released:
            return [["reload", 0, self.generation, 0]] * self.size
        absent = [self._count(rank, live=False) for rank in range(self.size)]
        if fault is not None and fault[1] < absent[fault[0]]:
            self.store_blocked = True
            return self._fail("RebuildError", fault[0])
        self.released = self.store_blocked = False
        self.generation += 1
        for group in self._held():
            if group.state != "live":
                group.state, group.generation = "live", self.generation
        return [["reload", absent[rank], self.generation, 0] for rank in range(self.size)]

    def _fail(self, own: str, faulty: int) -> list[Any]:
        for group in self._held():
            group.state = "failed"
        return [
            [own, None] if rank == faulty else ["PeerFailedError", faulty]
            for rank in range(self.size)
        ]

    def _held(self) -> list[Group]:
        return [group for group in self.groups.values() if group.managed and group.holders]

    def _disagreeing(self) -> bool:
        return any(not group.whole for group in self._held())

    def _count(self, rank: int, *, live: bool) -> int:
        return sum((g.state == "live") is live for g in self._held() if rank in g.holders)


def contribution(rank: int, number: int) -> float:
    """The contribution of a rank to a collective: sums of any ranks are distinct."""
    return float(2**rank + 16 * number)


@st.composite
def programs(draw: Any) -> Program:
    """Legal programs: a caller may give each instruction in the current state."""
    size, bound = draw(st.sampled_from([4, 3, 2])), draw(st.booleans())
    model = Model(size, splits=bound and CAN_SPLIT)
    instructions: list[Instruction] = []
    for number in range(draw(st.integers(6, 16))):
        kinds = _permitted(model) if number > 1 else ["create"]
        kind = draw(st.sampled_from(kinds))
        instruction = [kind, *draw(_ARGUMENTS[kind](model))]
        model.step(number, instruction)
        instructions.append(instruction)
    return Program(size, bound, instructions)


def _permitted(model: Model) -> list[str]:
    """The possible instructions, weighted by repetition."""
    kinds = ["collective", "collective"]
    kinds += ["reload"] * (4 if model.released else 1)
    kinds += ["offload"] * (1 if model.released else 4)
    if not model.store_blocked:
        kinds += ["create"] * 3
    if model.splits and not model.released and _parts(model):
        kinds += ["split"] * 2
    if model.subgroups:
        kinds.append("destroy")
    if _live(model):
        kinds.append("retime")
    return kinds


def _parts(model: Model) -> list[tuple[int, ...]]:
    """The ranks that can be split from the default group now: their name is unused."""
    everyone = range(model.size)
    sizes = [model.size] if ADVANCES_COUNTER else range(2, model.size + 1)
    parts = [part for size in sizes for part in combinations(everyone, size)]
    return [part for part in parts if model.local_name(part) is not None]


def _live(model: Model) -> list[int]:
    return sorted(s for s, g in model.usable.items() if g.managed and g.state == "live")


def _faults(model: Model) -> st.SearchStrategy[list[Any] | None]:
    ranks = st.integers(0, model.size - 1)
    fault = st.tuples(ranks, st.integers(0, 3), st.sampled_from(["before", "after"])).map(list)
    return st.booleans().flatmap(lambda yes: fault if yes else st.none())


@st.composite
def _create(draw: Any, model: Model) -> tuple[Any, ...]:
    ranks = draw(
        st.lists(st.integers(0, model.size - 1), min_size=1, max_size=model.size, unique=True)
    )
    permitted = model.local_name(tuple(sorted(ranks))) is not None
    return (
        len(model.groups) - 1,
        ranks,
        draw(st.sampled_from(["positional", "keyword"])),
        draw(st.booleans()) if permitted else False,
        draw(st.sampled_from(["", "a description"])),
        draw(st.sampled_from([0, 20, 30])),
    )


@st.composite
def _split(draw: Any, model: Model) -> tuple[Any, ...]:
    ranks = list(draw(st.sampled_from(_parts(model))))
    return len(model.groups) - 1, ranks, "a part", draw(st.sampled_from([20, 30]))


@st.composite
def _destroy(draw: Any, model: Model) -> tuple[Any, ...]:
    slot = draw(st.sampled_from(sorted(model.subgroups)))
    group = model.subgroups[slot]
    partly = group.managed and group.whole and draw(st.integers(0, 3)) == 3
    return slot, draw(st.sampled_from(group.ranks)) if partly else None


_ARGUMENTS: dict[str, Any] = {
    "create": _create,
    "split": _split,
    "destroy": _destroy,
    "retime": lambda model: st.tuples(st.sampled_from(_live(model)), st.sampled_from([25, 50])),
    "collective": lambda model: st.tuples(
        st.sampled_from(sorted(model.usable)), st.sampled_from(["all_reduce", "all_gather", "ring"])
    ),
    "offload": lambda model: st.tuples(_faults(model)),
    "reload": lambda model: st.tuples(st.sampled_from(["none", "canary", "eager"]), _faults(model)),
}
