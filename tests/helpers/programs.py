"""Programs of groups, cycles, recoveries, destroys, faults and ends: random ones and tables.

A program is plain data. Every rank plays it, on gloo, on torch's ProcessGroupNCCL over the
stand-ins, or on two hosts, and after each step compares what it and the others see with what
:class:`State` expects. So there is one job and one set of expectations for every kind of fault.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from helpers.fault_job import (
    BOUND,
    OFFLOAD_POINTS,
    RECOVER_POINTS,
    RELOAD_POINTS,
    RING,
    TRIANGLE,
)
from reloadpg.testing import faults

WORLD = -1
"""The slot of the default group."""
CALLS = {
    # Not init: torch creates a communicator in a collective by a call that blocks, in which the
    # peers of a member that has failed stay until their processes end.
    "use": ("collective", "send", "recv"),
    "offload": ("finalize", "destroy", "abort", "suspend"),
    "reload": ("init", "collective", "resume", "abort"),
    "recover": ("abort", "init", "collective"),
}
"""The calls of NCCL in which a step may have a fault."""
POINTS = {"offload": OFFLOAD_POINTS, "reload": RELOAD_POINTS, "recover": RECOVER_POINTS}
UNTOUCHED = ("offload.enter", "offload.callbacks", "reload.enter")
"""Points before the first change of a group."""
LAST_BARRIERS = ("offload.released", "reload.done")
END_CALLS: dict[str, tuple[str, ...]] = {
    "destroy": ("destroy_process_group",),
    "abort all": ("_abort_process_group",),
    "abort": ("abort", "destroy_process_group"),
    "shutdown": ("shutdown", "destroy_process_group"),
    "abort twice, shutdown, destroy": ("abort", "abort", "shutdown", "destroy_process_group"),
    "shutdown, abort, abort all": ("shutdown", "abort", "_abort_process_group"),
}
"""Ends of a job that are calls of torch's functions, and of the methods of each group."""
BRACKET = "an error while a group coalesces"
"""The end of a job whose ``process_group_scope`` is left by an error while WORLD coalesces."""
ENDS = (*END_CALLS, BRACKET)


ARGUMENTS = {"use": ((WORLD,), "all_reduce"), "reload": ("none",)}
"""Of a step of a table."""


@dataclass(frozen=True)
class Fault:
    """What happens to some ranks in a step, in the words of ``reloadpg.testing.faults``.

    Attributes:
        point: of an operation, see ``fault_job``; ``use``, a collective; or a call of NCCL.
        action: ``raise``; ``stall``, at a point until the others have raised; ``async``, in a call
            of NCCL. ``die``, or ``stop`` the process in a call of NCCL. At a point ``interrupt`` or
            ``terminate``, by a signal; ``counted``, an interrupt after the rank was counted at that
            barrier; ``cut``, the link to the store or between the hosts is down until all ranks
            have ended the operation. In ``use``, ``skip`` the collective, ``abort`` all groups,
            ``disconnect`` the process from its peers, or ``coalesce``, an error that leaves a
            coalescing open on all ranks. ``alone``: the others call an offload before the recovery.
        ranks: the faulty ranks.
        nth: the call of NCCL that fails.
        seconds: the duration of a stall in a call of NCCL; None for no end.
    """

    point: str
    action: str = "raise"
    ranks: tuple[int, ...] = (1,)
    nth: int = 1
    seconds: float | None = None

    def injected(self, rank: int) -> faults.Fault:
        """This fault in a call of NCCL on one rank."""
        return faults.Fault(
            "nccl",
            self.action,  # type: ignore[arg-type]
            operation=self.point,
            rank=rank,
            nth=self.nth,
            times=None if self.action == "stall" and self.seconds is None else 1,
            seconds=self.seconds,
        )

    @property
    def in_nccl(self) -> bool:
        return "." not in self.point and self.point != "use"

    @property
    def may_stay(self) -> bool:
        """Whether a communicator may be left, with a thread in a call of NCCL.

        A creation that blocks waits for the member whose creation fails, and a destroy for the
        member that does not destroy, while torch holds the lock that an abort takes. Torch calls
        destroy and abort once: a communicator for which they fail is not freed (2.8, 2.13, 2.15).
        """
        if self.action == "stop":
            return self.point == "init"
        if self.point in ("init", "finalize", "destroy"):
            return self.seconds is None
        return self.point == "abort" and self.action == "raise"

    @property
    def breaks_kept(self) -> bool:
        """Whether a communicator that is suspended gets an asynchronous error.

        No query of torch shows it: the next collective of the group raises it.
        """
        return self.action == "async" and self.point in ("suspend", "resume")


@dataclass(frozen=True)
class Step:
    """One call of all ranks.

    ``create slot ranks kind``, ``destroy slot``, ``use slots kind``, ``offload``, ``reload
    connect``, ``recover``, ``mend how``: a reload, or a recovery if the step before it failed;
    ``settle``: a cycle, after which nothing is left.
    """

    do: str
    args: tuple[Any, ...] = ()
    fault: Fault | None = None

    def has(self, action: str) -> bool:
        """Whether it has a fault with this action."""
        return self.fault is not None and self.fault.action == action


@dataclass(frozen=True)
class Life:
    """The life of a default group: it starts, goes through steps, and ends."""

    steps: tuple[Step, ...]
    bound: bool = False
    end: str = "destroy"


@dataclass(frozen=True)
class Program:
    """Lives of default groups, one after the other in the same processes.

    ``eager``: whether a creation on the simulated accelerator waits for all members.
    """

    size: int
    lives: tuple[Life, ...]
    backend: str = "sim"
    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    eager: bool = field(default=True, kw_only=True)

    @property
    def on_nccl(self) -> bool:
        return "nccl" in self.backend

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks that are killed in its last step."""
        fault = self.lives[-1].steps[-1].fault
        return fault.ranks if fault and fault.action == "die" else ()


Ended = Literal["completed", "unchanged", "failed", "any"]


class State:
    """The groups that exist, and what is expected of them. Groups of one rank are not managed."""

    def __init__(self, size: int) -> None:
        self.members: dict[int, tuple[int, ...]] = {WORLD: tuple(range(size))}
        self.live = {WORLD}
        self.released = self.failed = False
        self.known = True
        """Whether the states are known: after a cut link, the ranks may differ."""

    def managed(self, rank: int) -> list[int]:
        """The managed groups of a rank."""
        return [s for s, ranks in self.members.items() if rank in ranks and len(ranks) > 1]

    def count(self, rank: int, *, live: bool) -> int:
        """The number of groups of a rank that an offload releases, or that a reload rebuilds."""
        return sum((slot in self.live) is live for slot in self.managed(rank))

    def changes(self, step: Step) -> bool:
        """Whether an operation has something to do."""
        return step.do != "reload" or self.released

    def end_of(self, step: Step) -> Ended:
        """How an operation ends on all ranks; those with faults in NCCL may end in any way."""
        fault = step.fault
        if fault is None:
            return "completed"
        if step.do == "use" and fault.action not in ("cut", "die"):
            return "completed"  # it is repeated on all ranks, or on none
        if fault.in_nccl or fault.action in ("cut", "die"):
            return "any"
        if fault.point.startswith("recover.abort") or fault.action == "alone":
            return "completed"  # the communicator is dropped; all ranks recover
        place = fault.point.lstrip("abcdefghijklmnopqrstuvwxyz.")
        if place:
            reached = {"offload": self.count, "reload": self.count}.get(step.do)
            live = step.do == "offload"
            counts = [
                reached(rank, live=live) if reached else len(self.managed(rank))
                for rank in fault.ranks
            ]
            if max(counts) <= int(place):
                return "completed"
        if fault.action == "counted" and fault.point in LAST_BARRIERS:
            return "completed"
        untouched = fault.point in UNTOUCHED and fault.action != "counted"
        return "unchanged" if untouched else "failed"

    def apply(self, step: Step, ended: Ended) -> None:
        """Execute a step that has ended in this way on all ranks."""
        if step.do == "create":
            slot, ranks, _ = step.args
            self.members[slot] = tuple(sorted(ranks))
            self.live.add(slot)
        elif step.do == "destroy":
            del self.members[step.args[0]]
            self.live.discard(step.args[0])
        elif ended == "unchanged" or not self.changes(step):
            pass
        elif ended == "completed" and step.do == "offload":
            self.live = {slot for slot, ranks in self.members.items() if len(ranks) == 1}
            self.released, self.failed, self.known = True, False, True
        elif ended == "completed" and (step.do != "use" or step.fault is not None):
            self.live = {*self.members}
            self.released = self.failed = False
            self.known = True
        elif ended in ("failed", "any"):
            self.live = {slot for slot, ranks in self.members.items() if len(ranks) == 1}
            self.released = self.failed = True
            self.known = ended == "failed"


# -- random programs ------------------------------------------------------------------------------


class Writer:
    """Writes the steps of a life that are legal: a caller may make each call in that state."""

    def __init__(self, draw: random.Random, size: int) -> None:
        self.draw, self.size = draw, size
        self.state = State(size)
        self.steps: list[Step] = []
        self._slots = 0

    def add(self, do: str, *args: Any, fault: Fault | None = None) -> Ended:
        step = Step(do, args, fault)
        ended = self.state.end_of(step)
        self.state.apply(step, ended)
        self.steps.append(step)
        return ended

    def create(self, ranks: tuple[int, ...], kind: str = "keyword") -> None:
        self.add("create", self._slots, ranks, kind)
        self._slots += 1

    def use_all(self, kind: str = "all_reduce") -> None:
        self.add("use", tuple(sorted(self.state.members)), kind)

    def part(self, do: str, fault: Fault, connect: str = "none", how: str = "") -> None:
        """A step with a fault after which the ranks may differ, and a call that mends all."""
        how = how or self.draw.choice(["reload", "recover"])
        if do == "reload":
            self.add("offload")
        given = (connect,) if do == "reload" else ARGUMENTS.get(do, ())
        self.add(do, *given, fault=fault)
        must = fault.breaks_kept or (do in ("use", "recover") and fault.action == "cut")
        self.add("mend", "must recover" if must else how)
        self.use_all("ring")
        self.add("settle")

    def add_any(self) -> None:
        """Add a step of any kind that is possible now."""
        state, draw = self.state, self.draw
        kinds = ["use", "use"]
        kinds += ["reload"] * (4 if state.released else 1)
        kinds += ["offload"] * (1 if state.released else 4)
        kinds += ["recover"]
        kinds += ["create"] * 3
        kinds += ["destroy"] * (len(state.members) > 1)
        kind = draw.choice(kinds)
        if kind == "create":
            ranks = tuple(draw.sample(range(self.size), draw.randint(1, self.size)))
            self.create(ranks, draw.choice(["positional", "keyword"]))
        elif kind == "destroy":
            self.add("destroy", draw.choice([slot for slot in state.members if slot != WORLD]))
        elif kind == "use":
            self.use_all(draw.choice(["all_reduce", "ring"]))
        else:
            args = (draw.choice(["none", "canary", "eager"]),) if kind == "reload" else ()
            may_fail = state.released if kind == "reload" else not state.released
            fault = self._fault(kind) if may_fail or kind == "recover" else None
            self.add(kind, *args, fault=fault)

    def _fault(self, operation: str) -> Fault | None:
        point = self.draw.choice(POINTS[operation])
        kind = self.draw.choice(["raise", "raise", "interrupt", "terminate"])
        kind = "raise" if point.endswith("callbacks") else kind
        fault = Fault(point, kind, (self.draw.randrange(self.size),))
        return fault if self.draw.random() < 0.5 else None


AGAIN = Life((Step("use", ((WORLD,), "all_reduce")),))
"""A life that shows that a process can start again."""


def program_of(seed: int, lives: int = 4) -> Program:
    """A random program on gloo; its last life shows that the process starts again."""
    draw = random.Random(seed)
    size, made = draw.choice([4, 3, 2]), []
    for _ in range(lives):
        writer = Writer(draw, size)
        writer.create(tuple(range(size)))
        for _ in range(draw.randint(6, 16)):
            writer.add_any()
        ends = [end for end in ENDS if not writer.state.released or end != BRACKET]
        made.append(Life(tuple(writer.steps), draw.random() < 0.5, draw.choice(ends)))
    options = {"parallelism": draw.choice([1, 1, 8])}
    return Program(size, (*made, AGAIN), eager=draw.random() < 0.5, options=options)


def program_on_nccl(seed: int, *, suspends: bool) -> Program:
    """A random program with a fault at a call of NCCL in each part, on a torch that may suspend."""
    draw = random.Random(seed)
    size, bound = draw.choice([2, 3]), draw.random() < 0.5
    # Operations with a call that hangs reach the timeout. It is longer than those of the groups: a
    # collective whose peer has aborted can stay on the device for its own timeout.
    options: dict[str, Any] = {"parallelism": draw.choice([1, 8]), "timeout": 40.0}
    if suspends and draw.random() < 0.4:
        options["strategy"] = "suspend"
    variables = {"RELOADPG_STANDIN_PEER_ERRORS": "1"} if draw.random() < 0.3 else {}
    backend = draw.choice(["nccl", "nccl", "cpu:gloo,cuda:nccl"])
    writer, everyone = Writer(draw, size), tuple(range(size))
    for _ in range(draw.randrange(1, 4)):
        ranks = everyone if draw.random() < 0.5 else tuple(sorted(draw.sample(everyone, 2)))
        writer.create(ranks, draw.choice(["keyword", "priority"]))
    writer.use_all("ring")
    writer.add("recover")  # what a process creates once exists from now on
    writer.add("settle")
    for _ in range(draw.randrange(2, 5)):
        do = draw.choice(list(CALLS))
        action, seconds = draw.choice(
            [("raise", None), ("raise", None), ("stall", 1.0), ("stall", None), ("async", None)]
        )
        ranks = (draw.randrange(size),)
        fault = Fault(draw.choice(CALLS[do]), action, ranks, draw.choice([1, 1, 2, 3]), seconds)
        writer.part(do, fault, draw.choice(["eager", "canary"]))
    writer.add("offload")
    return Program(size, (Life(tuple(writer.steps), bound),), backend, options, variables)


CUTS = ("use", *(p for p in (*OFFLOAD_POINTS, *RELOAD_POINTS, *RECOVER_POINTS) if "3" not in p))
"""Points at which the link between two hosts is cut; ``use`` is before a collective."""


def program_on_two_hosts(seed: int) -> tuple[Program, int, bool]:
    """A random program in which the link is down in each part until all ranks have ended it.

    Returns:
        The program, the ranks of a host, and whether the store is on another link.
    """
    draw = random.Random(seed)
    of_a_host, other_link = draw.choice([1, 2]), draw.random() < 0.5
    size = 2 * of_a_host
    writer = Writer(draw, size)
    # Each rank is in two groups and the default one, so that each point exists on all ranks.
    pairs = draw.choice([[(0, 1), (2, 3), (0, 2), (1, 3)], [(0, 3), (1, 2), (0, 2), (1, 3)]])
    for ranks in pairs if size == 4 else [(0, 1), (1, 0)]:
        writer.create(ranks)
    writer.use_all()
    for _ in range(2):
        point = draw.choice([one for one in CUTS if "callbacks" not in one])
        writer.part(point.partition(".")[0], Fault(point, "cut", tuple(range(size))))
    options = {"recoverable": True, "timeout": BOUND}
    return Program(size, (Life(tuple(writer.steps)),), options=options), of_a_host, other_link


# -- programs of a table --------------------------------------------------------------------------

NEXT = {"offload": ("offload", "reload"), "reload": ("reload",), "recover": ("recover",)}
"""The calls after a fault, unless the table specifies others."""


def every_fault(
    faults: Sequence[Fault | tuple[Fault, tuple[str, ...]]],
    groups: Sequence[tuple[int, ...]] = RING,
    eager: bool = True,
    **options: Any,
) -> Program:
    """A life in which each fault happens in its operation, and then other operations succeed.

    Args:
        faults: one after the other; with the operations that follow, if they are not as usual.
            ``create`` creates a group of all ranks.
        groups: besides WORLD.
        eager: as in :class:`Program`.
        options: of ``install``.
    """
    size = max(map(max, groups)) + 1
    writer = Writer(random.Random(0), size)
    for ranks in groups:
        writer.create(ranks)
    writer.use_all()
    for one in faults:
        fault, then = one if isinstance(one, tuple) else (one, ())
        do = fault.point.partition(".")[0]
        if fault.action == "cut":
            writer.part(do, fault, how="reload")
            continue
        if do == "reload":
            writer.add("offload")
        ended = writer.add(do, *ARGUMENTS.get(do, ()), fault=fault)
        if fault.action == "die":
            break
        if not then and ended == "completed":
            then = {"offload": ("reload",), "reload": ("offload", "reload")}.get(do, (do,))
        for name in then or NEXT[do]:
            if name == "create":
                writer.create(tuple(range(size)))
            else:
                writer.add(name, *ARGUMENTS.get(name, ()))
        writer.use_all()
        writer.add("settle")
    options = {"parallelism": 1, **options}
    return Program(size, (Life(tuple(writer.steps)),), eager=eager, options=options)


DISTURBED = {
    "offload": "destroy",
    "reload": "init",
    "recover": "init",
    "suspend": "suspend",
    "resume": "resume",
}
"""Calls of NCCL in which a rank is stopped or killed; the tables on gloo have the barriers."""


def disturbed(operation: str, kind: str) -> Program:
    """A life on NCCL in which rank 1 is stopped or killed in a call, from which it never returns.

    A stopped process stops whole, with the threads of NCCL: with ``RELOADPG_NCCL`` also those of
    NVIDIA's host code, which its peers wait for in a destroy.
    """
    writer = Writer(random.Random(0), 3)
    for ranks in TRIANGLE:
        writer.create(ranks)
    writer.use_all()
    writer.add("recover")  # what a process creates once exists from now on
    writer.add("settle")
    do = {"suspend": "offload", "resume": "reload"}.get(operation, operation)
    writer.part(do, Fault(DISTURBED[operation], kind), "canary")
    steps = writer.steps
    if kind == "die":
        steps = steps[: next(n for n, step in enumerate(steps) if step.fault is not None) + 1]
    options: dict[str, Any] = {"recoverable": True, "timeout": 15.0}
    if operation in ("suspend", "resume"):
        options["strategy"] = "suspend"
    return Program(3, (Life(tuple(steps)),), "nccl", options)


STATES = ("live", "offloaded", "failed", "half rebuilt")


def every_end(state: str, backend: str = "sim", **options: Any) -> Program:
    """A life for each end, in a state of its groups, bound to a device and not."""
    lives: list[Life] = []
    for number, end in enumerate(ENDS):
        if end == BRACKET and state != "live":
            continue
        writer = Writer(random.Random(number), 2)
        writer.create((0, 1))
        writer.use_all()
        if state == "failed":
            writer.add("offload", fault=Fault("offload.released"))
        elif state != "live":
            writer.add("offload")
        if state == "half rebuilt" and backend == "sim":
            writer.add("reload", "eager", fault=Fault("reload.group1"))
        elif state == "half rebuilt":  # on both ranks: a creation waits for a member that fails
            writer.add("reload", "eager", fault=Fault("init", "raise", (0, 1), nth=2))
        lives += [Life(tuple(writer.steps), number % 2 == 1, end), AGAIN]
    return Program(2, tuple(lives), backend, {"parallelism": 1, **options})
