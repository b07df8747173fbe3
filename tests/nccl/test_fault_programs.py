"""Random programs over NCCL groups, with a fault at a call of NCCL in each part.

All ranks get the same result of each operation, values are right after the next recovery or reload,
and nothing is left. ``FAULT_PROGRAMS`` is the number of programs, of one seed each.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import (
    CAN_SPLIT_MIXED,
    CAN_SUSPEND,
    ENGINES,
    LIMIT,
    Meetings,
    engine_variables,
    held,
    left_over,
    start,
    summed,
)
from helpers.repeating import repeat

import reloadpg
from reloadpg.testing import run_ranks, standins
from reloadpg.testing.standins import Fault

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "3"))
BOUND = timedelta(seconds=8)
"""The timeout of an operation, which those with a call that hangs reach."""
SHORT = timedelta(seconds=5)
"""The timeout of a collective that waits for a rank whose call has failed."""

VARIABLES = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""No flight recorder: torch's watchdog looks up the Python lines of a collective that has timed out
before it aborts it, and the first look-up imports ``torch._inductor`` (2.13)."""

Instruction = Literal["use", "offload", "reload", "recover"]

CALLS: dict[Instruction, tuple[str, ...]] = {
    # Not init: torch creates a communicator in a collective by a call that blocks, in which the
    # peers of a member that has failed stay until their processes end.
    "use": ("collective", "send", "recv"),
    "offload": ("finalize", "destroy", "abort", "suspend"),
    "reload": ("init", "collective", "resume", "abort"),
    "recover": ("abort", "init", "collective"),
}
"""The calls of NCCL that an instruction may make."""


@dataclass(frozen=True)
class Part:
    """An instruction with a fault in it, and what is called if it fails."""

    instruction: Instruction
    fault: Fault
    connect: Literal["eager", "canary"]
    mend: Literal["reload", "recover"]


@dataclass(frozen=True)
class Program:
    """The program of all ranks. A failure prints the repr."""

    size: int
    bound: bool
    backend: str
    options: dict[str, Any]
    variables: dict[str, str]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    parts: tuple[Part, ...]


def program_of(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    size, bound = draw.choice([2, 3]), draw.random() < 0.5
    everyone = tuple(range(size))
    kinds = ["new", "priority", "local"]
    groups: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(draw.randrange(1, 4)):
        members = everyone if draw.random() < 0.5 else tuple(sorted(draw.sample(everyone, 2)))
        groups.append((draw.choice(kinds), members))
    groups.sort(key=lambda group: len(group[1]), reverse=True)  # a name counts the groups before
    if bound and draw.random() < 0.7:
        groups.insert(0, ("split", everyone))
    variables = {}
    if draw.random() < 0.3:
        variables["RELOADPG_STANDIN_PEER_ERRORS"] = "1"
    options = {"parallelism": draw.choice([1, 8])}
    if CAN_SUSPEND and draw.random() < 0.4:
        options["strategy"] = "suspend"
    parts = tuple(_part(draw, size) for _ in range(draw.randrange(2, 5)))
    backend = draw.choice(["nccl", "nccl", "cpu:gloo,cuda:nccl"])
    if backend != "nccl" and not CAN_SPLIT_MIXED:
        groups = [group for group in groups if group[0] != "split"]
    return Program(size, bound, backend, options, variables, tuple(groups), parts)


def _part(draw: random.Random, size: int) -> Part:
    instruction: Instruction = draw.choice(list(CALLS))
    action: Any = draw.choice(["fail", "fail", "delay", "hang", "async"])
    fault = Fault(
        action,
        draw.choice(CALLS[instruction]),  # type: ignore[arg-type]
        rank=draw.randrange(size),
        skip=draw.choice([0, 0, 1, 2]),
        times=None if action == "hang" else 1,
        seconds=1.0 if action == "delay" else 0.0,
    )
    return Part(
        instruction, fault, draw.choice(["eager", "canary"]), draw.choice(["reload", "recover"])
    )


def may_stay(part: Part) -> bool:
    """Whether a communicator may be left after a part, with a thread in a call of NCCL.

    A creation that blocks waits for the member whose creation fails, and a destroy for the member
    that does not destroy, while torch holds the lock that an abort takes. Torch calls destroy and
    abort once: a communicator for which they fail is not freed (2.8, 2.13, 2.15).
    """
    call, action = part.fault.call, part.fault.action
    if call in ("init", "finalize", "destroy"):
        return action != "delay"
    return call == "abort" and action == "fail"


def breaks_kept(part: Part) -> bool:
    """Whether a communicator that is suspended gets an asynchronous error.

    No query of torch shows it: the next collective of the group raises it, as a fault of a step.
    """
    return part.fault.action == "async" and part.fault.call in ("suspend", "resume")


class Player:
    """One rank's run of a program."""

    def __init__(self, rank: int, program: Program) -> None:
        self._rank = rank
        self._program = program
        self._meetings = Meetings(program.size)
        options = {"timeout": BOUND, "recoverable": True, **program.options}
        start(rank, bound=program.bound, backend=program.backend, **options)
        everyone = tuple(range(program.size))
        self._groups: list[tuple[Any, tuple[int, ...]]] = [(dist.group.WORLD, everyone)]
        for kind, members in program.groups:
            made = self._create(kind, list(members))
            if rank in members:
                self._groups.append((made, members))

    @staticmethod
    def _create(kind: str, members: list[int]) -> Any:
        if kind == "split":
            return dist.split_group(split_ranks=[members], timeout=LIMIT)
        given: dict[str, Any] = {}
        if kind == "priority":
            given["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if kind == "local":
            given["use_local_synchronization"] = len(members) == dist.get_world_size()
        return dist.new_group(members, timeout=LIMIT, **given)

    def play(self) -> list[Any]:
        """The observations of this rank in each part, and at the end."""
        assert self.is_right()
        reloadpg.recovery.recover("a test")  # what a process creates once exists from now on
        self._cycle()
        before, stuck = held(), 0
        # The backends of the CPU stay, each with the store client that created it, where an
        # operation that has failed lets the next one connect new clients.
        stores = 0 if self._program.backend == "nccl" else len(self._groups)
        seen: list[Any] = []
        for part in self._program.parts:
            result = self._play(part)
            self._cycle()
            if may_stay(part):
                stuck += len(self._groups)
            seen.append((result, left_over(before, stuck, stores)))
            self._meetings.meet()
        reloadpg.offload()
        if "strategy" not in self._program.options:
            seen.append(standins.communicators() <= stuck)
        dist.destroy_process_group()
        return [*seen, standins.communicators() <= stuck]

    def _cycle(self) -> None:
        """Offload and reload: each thread that creates groups then has its store client."""
        reloadpg.offload()
        reloadpg.reload()
        assert self.is_right()
        self._meetings.meet()  # a rank that ends a collective may still be needed by another

    def _play(self, part: Part) -> tuple[Any, ...]:
        if part.instruction == "reload":
            reloadpg.offload()
        self._meetings.meet()
        if self._rank == 0:
            standins.inject(part.fault)
        self._meetings.meet()
        if part.instruction == "use":
            return self._use()
        error = ""
        try:
            if part.instruction == "offload":
                reloadpg.offload()
            elif part.instruction == "reload":
                reloadpg.reload(connect=part.connect)
            else:
                reloadpg.recovery.recover("a test")
        except (reloadpg.ReloadpgError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        state = reloadpg.status().state
        self._meetings.meet()
        standins.clear_faults()
        self._meetings.meet()
        if (error and part.mend == "recover") or breaks_kept(part):
            reloadpg.recovery.recover("a test")
        else:
            reloadpg.reload()
        return bool(error), state, self.is_right(), error

    def _use(self) -> tuple[Any, ...]:
        self._set_timeout(SHORT)

        def step(number: int, attempt: int) -> bool:
            if attempt > 1:
                self._set_timeout(LIMIT)
            try:
                return self.is_right()
            finally:  # a call that hangs holds its rank: the others have seen it by now
                if attempt > 1 or reloadpg.recovery.recovery_requested():
                    standins.clear_faults()

        ((attempts, right),) = repeat(step, 1)
        self._meetings.meet()
        standins.clear_faults()
        self._set_timeout(LIMIT)
        return attempts, reloadpg.status().state, right and self.is_right(), ""

    def _set_timeout(self, timeout: timedelta) -> None:
        for group, _ in self._groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def is_right(self) -> bool:
        """Whether an all-reduce and a ring of transfers on every group have the right values."""
        return all(
            summed(group, self._rank) == sum(member + 1 for member in members)
            and self._from_previous(group, members) == members[members.index(self._rank) - 1]
            for group, members in self._groups
        )

    def _from_previous(self, group: Any, members: tuple[int, ...]) -> float:
        place = members.index(self._rank)
        mine, received = torch.tensor([float(self._rank)]).cuda(), torch.empty(1).cuda()
        to, source = members[(place + 1) % len(members)], members[place - 1]
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, to, group=group),
                dist.P2POp(dist.irecv, received, source, group=group),
            ]
        ):
            work.wait()
        return received.item()


def play(rank: int, world_size: int, program: Program) -> list[Any]:
    return Player(rank, program).play()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_ranks_get_the_same_results_and_leave_nothing(seed: int, engine: str) -> None:
    """Whatever fails in NCCL on one rank: see the docstring of this file."""
    program = program_of(seed)
    variables = {**VARIABLES, **program.variables, **engine_variables(engine)}
    seen = run_ranks(
        play, program.size, args=(program,), standins=True, env=variables, timeout=280.0
    )
    shown = "\n".join(f"rank {rank}: {one}" for rank, one in enumerate(seen))
    for part, results in zip(program.parts, zip(*seen, strict=True), strict=False):
        ends, over = [result[:2] for result, _ in results], [rest for _, rest in results]
        where = f"{part}\n{program}\n{shown}"
        assert len(set(ends)) == 1, f"the ranks end differently: {where}"
        assert all(result[2] for result, _ in results), f"wrong values: {where}"
        assert not any(over), f"left over: {where}"
        if part.fault.action == "delay" and part.instruction != "use":
            assert not ends[0][0], f"a delay is no fault: {where}"
    for one in seen:
        assert all(one[len(program.parts) :]), f"communicators are left: {program}\n{shown}"
