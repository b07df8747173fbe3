"""A rank fails, is interrupted, hangs, or dies: all ranks get a result, and the job continues.

Programs of tables and random ones, on gloo; ``nccl/test_programs.py`` and ``test_two_hosts.py`` run
such programs elsewhere. ``FAULT_PROGRAMS`` is the number of random programs, of one seed each.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers import worlds
from helpers.fault_job import (
    BOUND,
    FAR,
    OFFLOAD_POINTS,
    PARALLELISM,
    RECOVER_POINTS,
    RELOAD_POINTS,
    Job,
    attempt,
    await_death,
    base_store,
    die,
    fail,
    interfere,
    survivors,
)
from helpers.program_ranks import run
from helpers.programs import (
    STATES,
    Fault,
    Program,
    every_end,
    every_fault,
    program_of,
)
from helpers.sampling import sampled
from torch.torch_version import TorchVersion

import reloadpg

PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "10"))
FAULTY, VICTIM = 1, 2
TWELVE = tuple((0, 1, 2) for _ in range(11))
"""With WORLD, twelve groups, of which all ranks are members."""
POINTS = OFFLOAD_POINTS + RELOAD_POINTS


def faults(action: str, *points: str, ranks: tuple[int, ...] = (FAULTY,)) -> list[Fault]:
    return [Fault(point, action, ranks) for point in points]


def each_group(operation: str, parallelism: int) -> Program:
    points = [f"{operation}.group{k}" for k in range(12)]
    return every_fault(faults("raise", *points), TWELVE, parallelism=parallelism)


EITHER = every_fault(
    [
        (Fault("offload.group1"), ("reload",)),
        (Fault("offload.callbacks"), ("reload", "offload", "reload")),
        (Fault("offload.released"), ("offload", "offload", "reload")),
        (Fault("reload.group1"), ("offload", "reload")),
        (Fault("reload.done"), ("offload", "offload", "reload")),
        (Fault("offload.group0"), ("recover",)),
        (Fault("reload.group0"), ("create", "reload")),  # the others have rebuilt WORLD
    ],
    eager=False,
)
SIGNALS = [Fault(p, ("interrupt", "terminate")[n % 2]) for n, p in enumerate(POINTS)]
COUNTED = [
    (Fault(point, "counted"), ("offload", "reload"))
    for point in ("offload.enter", "offload.released", "reload.enter", "reload.done")
]
TWO_RANKS = [
    Fault("recover.group2", "raise", (1, 2)),
    Fault("recover.enter", "interrupt", (0, 3)),
    Fault("recover.check2", "raise", (0, 1)),
]
CAN_SHORTEN = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch changes the timeout of a gloo group that exists; if not, each fault in a collective
lasts a minute."""
USES = [Fault("use", one) for one in ("raise", "skip", "abort", "disconnect", "coalesce")]
ALONE = Fault("recover.enter", "alone")
STALLS = faults(
    "stall",
    *["use"] * CAN_SHORTEN,
    "offload.group1",
    "reload.group1",
    "recover.enter",
    "recover.abort0",
    "recover.group2",
    "recover.done",
)
CUT = faults("cut", "offload.enter", "reload.enter", "reload.group1", "reload.done")
"""For longer than the timeout, so that the ranks end the operation differently (failure 35)."""
PAIRS = ((0, 1), (1, 0))
TABLES = {
    "either operation after a failure": EITHER,
    "signals": every_fault(SIGNALS, parallelism=PARALLELISM),
    "interrupts after the arrival": every_fault(COUNTED),
    "two ranks": every_fault(TWO_RANKS),
    "recoveries": every_fault(
        faults("raise", "recover.abort0", *RECOVER_POINTS), parallelism=PARALLELISM
    ),
    "collectives": every_fault([*USES * CAN_SHORTEN, ALONE]),
    "interrupts of recoveries": every_fault(faults("interrupt", *RECOVER_POINTS)),
    "each group of an offload": each_group("offload", 1),
    "each group of an offload, in parallel": each_group("offload", 8),
    "each group of a reload": each_group("reload", 1),
    "each group of a reload, in parallel": each_group("reload", 8),
    "stalls": every_fault(STALLS, timeout=BOUND),
    "link to the store": every_fault(CUT, PAIRS, timeout=BOUND),
}
DEFAULT = (
    "either operation after a failure",
    "signals",
    "interrupts after the arrival",
    "collectives",
    "two ranks",
    "link to the store",
)


@pytest.mark.matrix
@pytest.mark.parametrize("name", sampled(TABLES, *DEFAULT))
def test_all_ranks_get_a_consistent_result_and_the_job_continues(name: str) -> None:
    """The fault may be of any kind, at any point of an operation (failures 26 and 27)."""
    run(TABLES[name], **worlds.SILENCE)


@pytest.mark.parametrize("seed", sampled(range(PROGRAMS), 0))
def test_programs(seed: int) -> None:
    """Groups, generations, values and errors are as expected (failures 4 to 6, 12, 22 to 27)."""
    run(program_of(seed))


@pytest.mark.matrix
@pytest.mark.parametrize("state", sampled(STATES, "live"))
def test_ends(state: str) -> None:
    """The program's own error is raised, torch's tables are clean, and the process starts again."""
    run(every_end(state))


# -- dead ranks -----------------------------------------------------------------------------------

DEATHS = {
    point: every_fault([Fault(point, "die", (VICTIM,))], timeout=BOUND, parallelism=PARALLELISM)
    for point in ("use", *OFFLOAD_POINTS, *RELOAD_POINTS, *RECOVER_POINTS)
}


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.parametrize("death", sampled(DEATHS, "offload.released"))
def test_a_rank_that_dies_is_named_within_the_timeout(death: str) -> None:
    """It may die at any point; later recoveries name it as well (failures 14, 26, 27)."""
    run(DEATHS[death], **worlds.SILENCE)


def one_dies_and_one_fails(rank: int, size: int) -> None:
    """While all ranks rebuild the last group, rank 2 dies, and then rank 1 fails."""
    Job("sim", parallelism=PARALLELISM)
    reloadpg.offload()
    store = base_store().clone()
    if rank == VICTIM:
        store.set("test/victim", str(os.getpid()))
    actions = {
        VICTIM: lambda: (store.wait(["test/0", "test/1", "test/3"]), die()),
        FAULTY: lambda: (
            store.set("test/1", "here"),
            await_death(int(store.get("test/victim"))),
            fail(),
        ),
    }
    interfere("reload.group3", actions.get(rank, lambda: store.set(f"test/{rank}", "here")))
    seen = attempt(reloadpg.reload)
    # With several groups at a time, others may still connect to rank 2 when it dies.
    others = {"PeerFailedError"} | ({"RebuildError"} if PARALLELISM > 1 else set())
    # Before rank 1 has failed, another rank may see that the process of rank 2 has ended.
    assert seen.kind in others | ({"RebuildError"} if rank == FAULTY else set()), seen
    if rank == FAULTY and seen.kind == "RebuildError" and PARALLELISM == 1:
        assert "injected" in seen.cause
    assert seen.seconds < FAR
    assert seen.names(VICTIM), seen
    assert seen.kind != "PeerFailedError" or VICTIM in (seen.rank, *seen.missing), seen


def test_a_death_that_makes_another_rank_fail() -> None:
    """That failure ends the wait before the timeout, and the errors name the dead rank."""
    survivors(one_dies_and_one_fails, 4, dead=VICTIM)
