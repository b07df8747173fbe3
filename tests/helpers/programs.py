"""Random programs of groups, cycles, recoveries, destroys, faults and ends, and their model.

A program is plain data, which every rank interprets (``program_ranks``): on gloo, on torch's
ProcessGroupNCCL over the stand-ins, and on two hosts. The model executes the same steps without a
process group; :func:`check` compares what the ranks saw with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import torch
from torch.torch_version import TorchVersion

from helpers.fault_job import ALLOWANCE, BOUND, RING, Seen
from helpers.worlds import CAN_SPLIT

ADVANCES_COUNTER = TorchVersion(torch.__version__) >= "2.15"
"""Whether a creation with local synchronization counts for the names of later groups."""
SPLIT_SHARES_OPTIONS = TorchVersion(torch.__version__) < "2.13"
"""Whether torch writes the timeout of a split into the options of its parent (2.8.0, NCCL)."""
WORLD = -1
"""The slot of the default group."""
WORLD_TIMEOUT_S = 60.0
DEFAULT_TIMEOUT_S = 1800.0
"""Torch's own for gloo."""
UNTOUCHED = ("offload.enter", "offload.callbacks", "reload.enter")
"""Points before the first change of a group."""
LAST_BARRIERS = ("offload.released", "reload.done")
CALLS = {
    # Not init: torch creates a communicator in a collective by a call that blocks, in which the
    # peers of a member that has failed stay until their processes end.
    "use": ("collective", "send", "recv"),
    "offload": ("finalize", "destroy", "abort", "suspend"),
    "reload": ("init", "collective", "resume", "abort"),
    "recover": ("abort", "init", "collective"),
}
"""The calls of NCCL in which a step may have a fault."""
END_CALLS: dict[str, tuple[str, ...]] = {
    "destroy": ("destroy_process_group",),
    "abort all": ("_abort_process_group",),
    "abort": ("abort", "destroy_process_group"),
    "shutdown": ("shutdown", "destroy_process_group"),
    "abort, abort all, twice": ("abort", "_abort_process_group") * 2,
    "abort, shutdown, destroy, twice": ("abort", "shutdown", "destroy_process_group") * 2,
    "shutdown, abort, abort all": ("shutdown", "abort", "_abort_process_group"),
}
"""Ends of a job that are calls of torch's functions, and of the methods of each group."""
BLOCKS = ("scope", "scope raises", "context", "context raises")
"""Ends by ``process_group_scope`` and by ``init_distributed``."""
BRACKETS = ("scope raises in a bracket", "context raises in a bracket")
"""Ends by an error while a group coalesces collectives."""
ENDS = (*END_CALLS, *BLOCKS, *BRACKETS)


@dataclass(frozen=True)
class Fault:
    """What happens to some ranks in a step.

    Attributes:
        point: of an operation, see ``fault_job``; or a call of NCCL.
        kind: at a point ``raise``; ``interrupt`` or ``terminate``, by a signal; ``counted``, an
            interrupt after the rank was counted at that barrier; ``late``, until another rank has
            logged that it waits; ``hang``, until the others have raised; ``cut``, the link between
            the hosts goes down until the operation has ended on all ranks. In a call of NCCL
            ``fail``, ``delay``, ``hang`` or ``async``.
        ranks: the faulty ranks.
        skip: the number of calls of NCCL before the one that fails.
    """

    point: str
    kind: str = "raise"
    ranks: tuple[int, ...] = (1,)
    skip: int = 0

    @property
    def in_nccl(self) -> bool:
        return "." not in self.point and self.kind != "cut"

    @property
    def may_stay(self) -> bool:
        """Whether a communicator may be left, with a thread in a call of NCCL.

        A creation that blocks waits for the member whose creation fails, and a destroy for the
        member that does not destroy, while torch holds the lock that an abort takes. Torch calls
        destroy and abort once: a communicator for which they fail is not freed (2.8, 2.13, 2.15).
        """
        if self.point in ("init", "finalize", "destroy"):
            return self.kind != "delay"
        return self.point == "abort" and self.kind == "fail"

    @property
    def breaks_kept(self) -> bool:
        """Whether a communicator that is suspended gets an asynchronous error.

        No query of torch shows it: the next collective of the group raises it.
        """
        return self.kind == "async" and self.point in ("suspend", "resume")


@dataclass(frozen=True)
class Step:
    """One call of all ranks.

    ``create slot ranks kind desc timeout``, ``destroy slot only``, ``retime slot seconds``,
    ``use slots kind``, ``offload``, ``reload connect``, ``recover``, ``mend how``: a reload, or a
    recovery if the step before it failed; ``settle``: a cycle, after which nothing is left.
    """

    do: str
    args: tuple[Any, ...] = ()
    fault: Fault | None = None


@dataclass(frozen=True)
class Job:
    """The life of a default group: it starts, goes through steps, and ends."""

    steps: tuple[Step, ...]
    bound: bool = False
    end: str = "destroy"


@dataclass(frozen=True)
class Program:
    """Jobs, one after the other in the same processes. A failure prints the repr."""

    size: int
    jobs: tuple[Job, ...]
    backend: str = "faulty"
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def on_nccl(self) -> bool:
        return "nccl" in self.backend


@dataclass
class Group:
    """The expected group. ``holders`` are the members that did not destroy it yet."""

    ranks: tuple[int, ...]
    desc: str
    timeout: float | None
    state: str | None = "live"
    generation: int | None = 0
    holders: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.holders = set(self.ranks)

    @property
    def managed(self) -> bool:
        return len(self.ranks) > 1

    @property
    def whole(self) -> bool:
        return self.holders == set(self.ranks)


Ended = Literal["completed", "unchanged", "failed", "cut"]
Found = Sequence[dict[str, Any]]


class Model:
    """A job, and the expected observations of each rank after each step. None is any value."""

    def __init__(self, program: Program, job: Job) -> None:
        self.program, self.size = program, program.size
        self.splits = job.bound and (program.on_nccl or CAN_SPLIT)
        self.groups = {WORLD: Group(tuple(range(self.size)), "default_pg", WORLD_TIMEOUT_S)}
        self.released = self.failed = False
        self.generation: int | None = 0
        self.exact = not program.on_nccl  # a suspended group keeps its generation
        self.store_blocked = False
        """An abandoned creation holds the store client that new groups would use."""
        self._names: set[tuple[tuple[int, ...], int]] = set()

    # -- possible steps ---------------------------------------------------------------------------

    @property
    def subgroups(self) -> dict[int, Group]:
        """The groups that some rank still holds, without WORLD."""
        return {s: g for s, g in self.groups.items() if s != WORLD and g.holders}

    @property
    def usable(self) -> dict[int, Group]:
        """The groups that all their members hold."""
        return {slot: group for slot, group in self.groups.items() if group.whole}

    @property
    def live(self) -> list[int]:
        return sorted(s for s, g in self.usable.items() if g.managed and g.state == "live")

    @property
    def disagreeing(self) -> bool:
        return any(not group.whole for group in self.held())

    def held(self, rank: int | None = None) -> list[Group]:
        """The managed groups, of one rank or of all."""
        groups = [group for group in self.groups.values() if group.managed and group.holders]
        return [g for g in groups if rank is None or rank in g.holders]

    def local_name(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
        """The input of torch's name with local synchronization; None where it cannot be used.

        Torch hashes the ranks and the number of groups that the process knows. Members that know
        different numbers never meet, and a name that was used before finds old keys in the store.
        Since 2.15 only the members advance the counter that all later names use.
        """
        if ADVANCES_COUNTER or self.program.on_nccl:
            return (ranks, len(self._names)) if len(ranks) == self.size else None
        counts = {sum(rank in group.holders for group in self.groups.values()) for rank in ranks}
        name = (ranks, counts.pop())
        return None if counts or name in self._names else name

    def parts(self) -> list[tuple[int, ...]]:
        """The ranks that can be split from the default group now: their name is unused."""
        sizes = range(2, self.size + 1)
        found = [part for size in sizes for part in combinations(range(self.size), size)]
        return [part for part in found if self.local_name(part) is not None]

    # -- expected observations --------------------------------------------------------------------

    def step(self, number: int, step: Step, found: Found = ()) -> list[dict[str, Any]]:
        """Execute one step; return the expected observations of each rank.

        Args:
            number: of the step.
            step: what to execute.
            found: what each rank saw of it, for results that only a run decides.
        """
        self._ended = ""
        results = getattr(self, f"_{step.do}")(number, step, found)
        return [{"result": results[rank], **self._seen(rank)} for rank in range(self.size)]

    def _seen(self, rank: int) -> dict[str, Any]:
        held = {s: g for s, g in self.groups.items() if g.managed and rank in g.holders}
        states = {group.state for group in held.values()}
        state = next((s for s in ("failed", "offloaded") if s in states), "live")
        return {
            "state": None if None in states else state,
            "generation": self.generation,
            "groups": {
                slot: [g.state, g.generation if g.state == "live" else None, g.timeout, g.desc]
                for slot, g in held.items()
            },
            "tables": True,
            "kept": True if self._ended == "unchanged" else None,
        }

    def _create(self, _: int, step: Step, found: Found) -> list[Any]:
        slot, ranks, kind, desc, timeout = step.args
        members, local = tuple(sorted(ranks)), kind in ("local", "split")
        if local:
            name = self.local_name(members)
            assert name is not None, "the program is illegal"
            self._names.add(name)
        default = None if self.program.on_nccl else DEFAULT_TIMEOUT_S
        group = Group(members, desc or "undefined", float(timeout) if timeout else default)
        group.generation = 0 if self.exact else None
        self.groups[slot] = group
        if kind == "split" and self.program.on_nccl and SPLIT_SHARES_OPTIONS:
            self.groups[WORLD].timeout = None
        made = "reloadable" if group.managed else "as torch made it"
        return [made if rank in members else "no member" for rank in range(self.size)]

    def _destroy(self, _: int, step: Step, found: Found) -> list[Any]:
        slot, only = step.args
        group = self.groups[slot]
        leaving = set(group.holders) if only is None else {only}
        group.holders -= leaving
        done = "destroyed" if group.managed else "gone"
        return [done if rank in leaving else "" for rank in range(self.size)]

    def _retime(self, _: int, step: Step, found: Found) -> list[Any]:
        slot, seconds = step.args
        self.groups[slot].timeout = float(seconds)
        return [""] * self.size

    def _use(self, number: int, step: Step, found: Found) -> list[Any]:
        if step.fault is not None:
            return self._repeated(step, found)
        slots, kind = step.args
        results: list[Any] = [{} for _ in range(self.size)]
        for one in slots:
            group = self.groups[one]
            values = [contribution(rank, number) for rank in group.ranks]
            for index, rank in enumerate(group.ranks):
                if group.state != "live":
                    results[rank][one] = "GroupOffloadedError"
                elif kind == "all_reduce":
                    results[rank][one] = [sum(values)]
                else:
                    results[rank][one] = values if kind == "all_gather" else [values[index - 1]]
        return results

    def _repeated(self, step: Step, found: Found) -> list[Any]:
        """A step of a training loop with a fault: it is repeated on all ranks, or on none."""
        if step.fault is not None and step.fault.kind == "cut":
            self.generation, self.failed, self.released = None, True, True
            self._set(None)
            for group in self.held():
                group.timeout = WORLD_TIMEOUT_S
            return [None] * self.size
        self._recreate(found)
        for group in self.held():
            group.timeout = WORLD_TIMEOUT_S
        return [found[0]["result"] if found else None] * self.size

    def _offload(self, _: int, step: Step, found: Found) -> list[Any]:
        if self.disagreeing:
            return [None] * self.size
        live = [self._count(rank, live=True) for rank in range(self.size)]
        ended = self._ended = self.ended(step, found, live)
        if ended in ("failed", "cut"):
            return self._fail(ended)
        if ended == "completed":
            self.released, self.failed = True, False
            self._set("offloaded")
        generation = self.generation
        done = [["offload", live[rank], generation, 0] for rank in range(self.size)]
        return self._results(step, ended, done)

    def _reload(self, _: int, step: Step, found: Found) -> list[Any]:
        if self.disagreeing:
            return [None] * self.size
        absent = [self._count(rank, live=False) for rank in range(self.size)]
        if not self.released:
            return [["reload", 0, self.generation, 0]] * self.size
        ended = self._ended = self.ended(step, found, absent)
        if ended in ("failed", "cut"):
            self.store_blocked = True
            return self._fail(ended)
        if ended == "completed":
            self._rebuild(found)
        done = [["reload", absent[rank], self.generation, 0] for rank in range(self.size)]
        return self._results(step, ended, done)

    def _recover(self, _: int, step: Step, found: Found) -> list[Any]:
        counts = [len(self.held(rank)) for rank in range(self.size)]
        ended = self._ended = self.ended(step, found, counts)
        if ended in ("failed", "cut"):
            self.store_blocked = True
            return self._fail(ended)
        self._recreate(found)
        done = [["recover", counts[rank], self.generation, 0] for rank in range(self.size)]
        return self._results(step, ended, done)

    def _mend(self, _: int, step: Step, found: Found) -> list[Any]:
        """All groups are live, whatever happened before."""
        self._recreate(found)
        return [None] * self.size

    def _settle(self, _: int, step: Step, found: Found) -> list[Any]:
        self.released = True
        self._set("offloaded")
        self._rebuild(found)
        return [""] * self.size

    def _rebuild(self, found: Found) -> None:
        self.released = self.failed = self.store_blocked = False
        if not self.exact or self.generation is None:
            self.generation = found[0]["generation"] if found else None
        else:
            self.generation += 1
        for group in self.held():
            if group.state != "live":
                group.state = "live"
                group.generation = self.generation if self.exact else None

    def _recreate(self, found: Found) -> None:
        """All groups are rebuilt, with a generation above that of any rank."""
        self.released = self.failed = self.store_blocked = False
        now = found[0]["generation"] if found else None
        if self.exact and now is not None and self.generation is not None:
            assert now >= self.generation
        self.generation = now
        self._set("live")
        for group in self.held():
            group.generation = None

    def _fail(self, ended: str) -> list[Any]:
        self.released = self.failed = True
        self._set("failed" if ended == "failed" else None)
        if ended == "cut":
            self.generation = None
        return [None] * self.size

    def _set(self, state: Any) -> None:
        for group in self.held():
            group.state = state

    def _count(self, rank: int, *, live: bool) -> int:
        return sum((group.state == "live") is live for group in self.held(rank))

    def _results(self, step: Step, ended: Ended, done: list[Any]) -> list[Any]:
        """What a rank returns; None if it raises."""
        fault = step.fault
        if ended == "unchanged":
            return [None] * self.size
        if fault is not None and fault.kind == "counted":
            return [None if rank in fault.ranks else done[rank] for rank in range(self.size)]
        if self.program.on_nccl:
            return [[*one[:2], None, None] for one in done]  # suspended groups stay
        return done

    def ended(self, step: Step, found: Found, counts: Sequence[int]) -> Ended:
        """How an operation with a fault ends on all ranks.

        Args:
            step: the operation.
            found: what each rank saw.
            counts: the number of groups that each rank releases or rebuilds.
        """
        fault = step.fault
        if fault is None:
            return "completed"
        if fault.kind == "cut":
            return "cut" if not found or any(one["error"] for one in found) else "completed"
        if fault.in_nccl:
            if not found or not found[0]["error"]:
                return "completed"
            return "failed" if found[0]["state"] == "failed" else "unchanged"
        place = fault.point.lstrip("abcdefghijklmnopqrstuvwxyz.")
        if place and all(counts[rank] <= int(place) for rank in fault.ranks):
            return "completed"
        if fault.kind == "late" or (fault.kind == "counted" and fault.point in LAST_BARRIERS):
            return "completed"
        untouched = fault.point in UNTOUCHED and fault.kind != "counted"
        return "unchanged" if untouched else "failed"


def contribution(rank: int, number: int) -> float:
    """The contribution of a rank to a collective: sums of any ranks are distinct."""
    return float(2**rank + 16 * number)


# -- what the ranks saw ---------------------------------------------------------------------------


def check(program: Program, seen: Sequence[Sequence[Found]]) -> None:
    """Compare each rank's observations with the model: ``seen[rank][job][step]``."""
    for index, job in enumerate(program.jobs):
        model = Model(program, job)
        for number, step in enumerate(job.steps):
            found = [of_rank[index][number] for of_rank in seen]
            where = f"job {index}, step {number}, {step}"
            shown = "\n".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
            disagreeing = model.disagreeing and step.do in ("offload", "reload")
            for rank, expected in enumerate(model.step(number, step, found)):
                different = compare(expected, found[rank])
                assert not different, f"rank {rank} in {where}: {different}\n{shown}\n{program}"
                try:
                    if disagreeing:
                        assert found[rank]["error"].kind == "DisagreementError"
                    else:
                        check_error(step, rank, found)
                except AssertionError as error:
                    raise AssertionError(f"{error}: {where}\n{shown}\n{program}") from error
            if model.live and None not in (found[0]["generation"], model.generation):
                check_generations(found, where)


def check_rank(program: Program, job: Job, rank: int, seen: Found) -> None:
    """Compare what one rank saw with the model, where the others cannot be asked."""
    model = Model(program, job)
    for number, step in enumerate(job.steps):
        expected = model.step(number, step, [seen[number]] * program.size)[rank]
        different = compare(expected, seen[number])
        assert not different, f"rank {rank} in step {number}, {step}: {different}, {seen[number]}"


def compare(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The expected observations that differ from those that were found."""
    return {name: one for name, one in expected.items() if not _is(one, found[name])}


def _is(expected: Any, found: Any) -> bool:
    """Whether values are equal; None is any value."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(
            _is(value, found[key]) for key, value in expected.items()
        )
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_is, expected, found))
    return expected is None or bool(expected == found)


def check_generations(found: Found, where: str) -> None:
    """Check that the members of a group have the same generation of it."""
    for slot in {slot for one in found for slot in one["groups"]}:
        of_group = {str(one["groups"][slot][:2]) for one in found if slot in one["groups"]}
        assert len(of_group) == 1, f"group {slot} differs: {of_group} after {where}"


def check_error(step: Step, rank: int, found: Found) -> None:
    """Check that each rank raises an error with the cause, or completes the step."""
    fault, seen = step.fault, found[rank]["error"]
    if fault is None:
        assert seen is None or step.do == "use", seen
        return
    if fault.in_nccl:
        assert len({bool(one["error"]) for one in found}) == 1, "the ranks end differently"
        assert fault.kind != "delay" or step.do == "use" or seen is None, "a delay is no fault"
        return
    if seen is None or fault.kind == "cut":
        assert fault.kind in ("late", "counted", "cut") or step.fault.point[-1].isdigit()  # type: ignore[union-attr]
        return
    assert seen.seconds < ALLOWANCE + (BOUND if fault.kind == "hang" else 0), seen
    if rank in fault.ranks:
        _check_own_error(step, fault, seen)
    else:
        _check_others_error(step, fault, seen)


def _check_own_error(step: Step, fault: Fault, seen: Seen) -> None:
    """A faulty rank raises its own error, with the cause."""
    if len(fault.ranks) > 1:
        assert seen.kind
    elif fault.kind == "raise" and fault.point[-1].isdigit():
        own = "ReleaseError" if step.do == "offload" else "RebuildError"
        assert (seen.kind, seen.cause) == (own, "Injected('injected')"), seen
    elif fault.kind == "raise" and fault.point.endswith("callbacks"):
        assert (seen.kind, seen.cause) == ("ReloadpgError", "Injected('injected')"), seen
    else:
        kinds = {
            "raise": "Injected",
            "interrupt": "KeyboardInterrupt",
            "counted": "KeyboardInterrupt",
            "terminate": "Terminated",
            "hang": "RendezvousTimeoutError",
        }
        assert seen.kind == kinds[fault.kind], seen


def _check_others_error(step: Step, fault: Fault, seen: Seen) -> None:
    """Another rank names a faulty rank and its error.

    An interrupted rank drops its groups before the others have read its error, so a rank that is
    still connecting to it raises RebuildError.
    """
    assert any(seen.names(rank) for rank in fault.ranks), seen
    if fault.kind == "hang":
        assert seen.kind == "RendezvousTimeoutError", seen
    elif seen.kind != "RebuildError" or (fault.kind == "raise" and len(fault.ranks) == 1):
        assert seen.kind == "PeerFailedError", seen
        assert seen.rank in fault.ranks, seen
    text = {"raise": "injected", "interrupt": "KeyboardInterrupt", "terminate": "Terminated"}
    assert text.get(fault.kind, "") in seen.text, seen


# -- random programs ------------------------------------------------------------------------------


class Writer:
    """Writes the steps of a job that are legal: a caller may make each call in that state."""

    def __init__(self, draw: random.Random, program: Program, job: Job) -> None:
        self.draw, self.program = draw, program
        self.model = Model(program, job)
        self.steps: list[Step] = []

    def add(self, do: str, *args: Any, fault: Fault | None = None) -> None:
        step = Step(do, args, fault)
        self.model.step(len(self.steps), step)
        self.steps.append(step)

    def use_all(self, kind: str) -> None:
        self.add("use", tuple(sorted(self.model.usable)), kind)

    def add_any(self) -> None:
        """Add a step of any kind that is possible now."""
        model, draw = self.model, self.draw
        kinds = ["use", "use"]
        kinds += ["reload"] * (4 if model.released else 1)
        kinds += ["offload"] * (1 if model.released else 4)
        kinds += ["recover"] * (not model.disagreeing and (model.failed or not model.released))
        kinds += ["create"] * (0 if model.store_blocked else 3)
        kinds += ["destroy"] * bool(model.subgroups)
        kinds += ["retime"] * bool(model.live)
        getattr(self, f"_{draw.choice(kinds)}")()

    def _create(self) -> None:
        model, draw = self.model, self.draw
        ranks = tuple(draw.sample(range(model.size), draw.randint(1, model.size)))
        kinds = ["positional", "keyword"]
        if model.local_name(tuple(sorted(ranks))) is not None:
            kinds.append("local")
        kind = draw.choice(kinds)
        if model.splits and not model.released and model.parts() and draw.random() < 0.4:
            kind, ranks = "split", draw.choice(model.parts())
        self.create(kind, ranks)

    def create(self, kind: str, ranks: tuple[int, ...]) -> None:
        timeout = self.draw.choice([20, 30] if kind == "split" else [0, 20, 30])
        desc = self.draw.choice(["", "a description"]) if kind != "split" else "a part"
        self.add("create", len(self.model.groups) - 1, ranks, kind, desc, timeout)

    def _destroy(self) -> None:
        slot = self.draw.choice(sorted(self.model.subgroups))
        group = self.model.subgroups[slot]
        partly = group.managed and group.whole and self.draw.random() < 0.25
        self.add("destroy", slot, self.draw.choice(group.ranks) if partly else None)

    def _retime(self) -> None:
        self.add("retime", self.draw.choice(self.model.live), self.draw.choice([25, 50]))

    def _use(self) -> None:
        usable = sorted(self.model.usable)
        slots = usable if self.draw.random() < 0.3 else [self.draw.choice(usable)]
        self.add("use", tuple(slots), self.draw.choice(["all_reduce", "all_gather", "ring"]))

    def _offload(self) -> None:
        effective = not self.model.released
        self.add("offload", fault=self._point("offload") if effective else None)

    def _reload(self) -> None:
        connect = self.draw.choice(["none", "canary", "eager"])
        fault = self._point("reload") if self.model.released else None
        self.add("reload", connect, fault=fault)

    def _recover(self) -> None:
        self.add("recover", fault=self._point("recover"))

    def _point(self, operation: str) -> Fault | None:
        if self.draw.random() < 0.5 or self.model.disagreeing:
            return None
        point = self.draw.choice(POINTS[operation])
        kind = self.draw.choice(["raise", "raise", "interrupt", "terminate"])
        kind = "raise" if point.endswith("callbacks") else kind
        return Fault(point, kind, (self.draw.randrange(self.model.size),))


POINTS = {
    "offload": (
        *("offload.enter", "offload.callbacks", "offload.group0", "offload.group1"),
        *("offload.group3", "offload.released"),
    ),
    "reload": (
        *("reload.enter", "reload.group0", "reload.group1", "reload.group3", "reload.done"),
    ),
    "recover": (
        *("recover.enter", "recover.agreed", "recover.group0", "recover.group1"),
        *("recover.check0", "recover.done"),
    ),
}
"""Points of faults; on ranks with fewer groups, those of a group are not reached."""


def program_of(seed: int, jobs: int = 4) -> Program:
    """A random program on gloo; its last job shows that the process starts again."""
    draw = random.Random(seed)
    program = Program(draw.choice([4, 3, 2]), (), options={"parallelism": draw.choice([1, 1, 8])})
    made: list[Job] = []
    for _ in range(jobs):
        job = Job((), bound=draw.random() < 0.5)
        writer = Writer(draw, program, job)
        writer._create()
        for _ in range(draw.randint(6, 16)):
            writer.add_any()
        ends = ENDS if writer.model.released is False else (*END_CALLS, *BLOCKS)
        made.append(Job(tuple(writer.steps), job.bound, draw.choice(ends)))
    return Program(program.size, (*made, AGAIN), options=program.options)


AGAIN = Job((Step("use", ((WORLD,), "all_reduce")),))
"""A job that shows that a process can start again."""


def program_on_nccl(seed: int, *, suspends: bool, splits_mixed: bool) -> Program:
    """A random program with a fault at a call of NCCL in each part.

    Args:
        seed: of the program.
        suspends: whether the installed torch can suspend groups.
        splits_mixed: whether it can split a group with several backends.
    """
    draw = random.Random(seed)
    size, bound = draw.choice([2, 3]), draw.random() < 0.5
    # Operations with a call that hangs reach the timeout. It is longer than those of the groups: a
    # collective whose peer has aborted can stay on the device for its own timeout.
    options: dict[str, Any] = {"parallelism": draw.choice([1, 8]), "timeout": 40.0}
    if suspends and draw.random() < 0.4:
        options["strategy"] = "suspend"
    variables = {"RELOADPG_STANDIN_PEER_ERRORS": "1"} if draw.random() < 0.3 else {}
    backend = draw.choice(["nccl", "nccl", "cpu:gloo,cuda:nccl"])
    program, job = Program(size, (), backend, options, variables), Job((), bound)
    writer, everyone = Writer(draw, program, job), tuple(range(size))
    if bound and draw.random() < 0.7 and (backend == "nccl" or splits_mixed):
        writer.create("split", everyone)
    for _ in range(draw.randrange(1, 4)):
        ranks = everyone if draw.random() < 0.5 else tuple(sorted(draw.sample(everyone, 2)))
        kinds = ["keyword", "priority"] + ["local"] * (len(ranks) == size)
        writer.create(draw.choice(kinds), ranks)
    writer.use_all("ring")
    writer.add("recover")  # what a process creates once exists from now on
    writer.add("settle")
    for _ in range(draw.randrange(2, 5)):
        do = draw.choice(list(CALLS))
        kind = draw.choice(["fail", "fail", "delay", "hang", "async"])
        ranks = (draw.randrange(size),)
        fault = Fault(draw.choice(CALLS[do]), kind, ranks, draw.choice([0, 0, 1, 2]))
        _part(writer, do, draw.choice(["eager", "canary"]), fault)
        if draw.random() < 0.3 and len(writer.model.subgroups) > 1:
            writer.add("destroy", draw.choice(sorted(writer.model.subgroups)), None)
    writer.add("offload")
    return Program(size, (Job(tuple(writer.steps), bound),), backend, options, variables)


def _part(writer: Writer, do: str, connect: str, fault: Fault) -> None:
    if do == "reload":
        writer.add("offload")
    given = {"use": ((WORLD,), "all_reduce"), "reload": (connect,)}.get(do, ())
    writer.add(do, *given, fault=fault)
    must = do in ("use", "recover") and fault.kind == "cut"
    how = "must recover" if fault.breaks_kept or must else writer.draw.choice(["reload", "recover"])
    writer.add("mend", how)
    writer.use_all("ring")
    writer.add("settle")


BOUND_ON_HOSTS = 5.0
"""The library's timeout on two hosts, which an outage outlasts."""
CUTS = {
    "use": ("",),
    "offload": ("enter", "group0", "group1", "released"),
    "reload": ("enter", "group0", "group1", "done"),
    "recover": ("enter", "agreed", "group0", "check0", "done"),
}
"""Points at which the link between two hosts is cut."""


def program_on_two_hosts(seed: int) -> tuple[Program, int, bool]:
    """A random program in which the link is down in each part until all ranks have ended it.

    Returns:
        The program, the ranks of a host, and whether the store is on another link.
    """
    draw = random.Random(seed)
    of_a_host, other_link = draw.choice([1, 2]), draw.random() < 0.5
    size = 2 * of_a_host
    program = Program(size, (), options={"recoverable": True, "timeout": BOUND_ON_HOSTS})
    writer = Writer(draw, program, Job(()))
    # Each rank is in two groups and the default one, so that each point exists on all ranks.
    pairs = draw.choice([[(0, 1), (2, 3), (0, 2), (1, 3)], [(0, 3), (1, 2), (0, 2), (1, 3)]])
    for ranks in pairs if size == 4 else [(0, 1), (1, 0)]:
        writer.create("keyword", ranks)
    writer.use_all("all_reduce")
    for _ in range(2):
        do = draw.choice(list(CUTS))
        place = draw.choice(CUTS[do])
        point = f"{do}.{place}" if place else ""
        _part(writer, do, "none", Fault(point, "cut", tuple(range(size))))
    return (
        Program(size, (Job(tuple(writer.steps)),), options=program.options),
        of_a_host,
        other_link,
    )


def must_fail(step: Step, other_link: bool) -> bool:
    """Whether something uses the link after a cut: the store, or groups that connect."""
    assert step.fault is not None
    connected = step.do == "offload" or step.fault.point.endswith("done")
    return not other_link or not connected


# -- programs of a table --------------------------------------------------------------------------

NEXT = {"offload": ("offload", "reload"), "reload": ("reload",), "recover": ("recover",)}
"""The calls after a fault, unless the table specifies others."""


def every_fault(
    faults: Sequence[Fault | tuple[Fault, tuple[str, ...]]],
    groups: Sequence[tuple[int, ...]] = RING,
    **options: Any,
) -> Program:
    """A job in which each fault happens in its operation, and then other operations succeed.

    Args:
        faults: one after the other; with the operations that follow, if they are not as usual.
        groups: of the job, besides WORLD.
        options: of ``install``.
    """
    program = Program(max(map(max, groups)) + 1, (), options={"parallelism": 1, **options})
    writer = Writer(random.Random(0), program, Job(()))
    for ranks in groups:
        writer.create("keyword", ranks)
    writer.use_all("all_reduce")
    for one in faults:
        fault, then = one if isinstance(one, tuple) else (one, ())
        do = fault.point.partition(".")[0]
        if do == "reload":
            writer.add("offload")
        writer.add(do, *CONNECT.get(do, ()), fault=fault)
        if not then and writer.model.ended(Step(do, (), fault), (), [99] * 9) == "completed":
            then = {"offload": ("reload",), "reload": ("offload", "reload")}[do]
        for name in then or NEXT[do]:
            writer.add(name, *CONNECT.get(name, ()))
        writer.use_all("all_reduce")
        writer.add("settle")
    return Program(program.size, (Job(tuple(writer.steps)),), options=program.options)


CONNECT = {"reload": ("none",)}
STATES = ("live", "offloaded", "failed", "half rebuilt")


def every_end(state: str, backend: str = "faulty", **options: Any) -> Program:
    """A job for each end, in a state of its groups, bound to a device and not."""
    options = {"parallelism": 1, **options}
    jobs = []
    for number, end in enumerate(ENDS):
        if end in BRACKETS and state != "live":
            continue
        bound = number % 2 == 1
        writer = Writer(random.Random(number), Program(2, (), backend, options), Job((), bound))
        writer.create("split" if writer.model.splits else "keyword", (0, 1))
        writer.use_all("all_reduce")
        if state == "failed":
            writer.add("offload", fault=Fault("offload.released"))
        elif state != "live":
            writer.add("offload")
        if state == "half rebuilt" and backend == "faulty":
            writer.add("reload", "eager", fault=Fault("reload.group1"))
        elif state == "half rebuilt":  # on both ranks: a creation waits for a member that fails
            writer.add("reload", "eager", fault=Fault("init", "fail", (0, 1), skip=1))
        jobs += [Job(tuple(writer.steps), bound, end), AGAIN]
    return Program(2, tuple(jobs), backend, options)
