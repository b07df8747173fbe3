"""A rank fails, is interrupted, is slow, or dies: all ranks get a result, and the job continues.

Programs of tables and random ones, on gloo; ``nccl/test_programs.py`` and ``test_two_hosts.py`` run
such programs elsewhere. ``FAULT_PROGRAMS`` is the number of random programs, of one seed each.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import (
    ALLOWANCE,
    BOUND,
    FAR,
    OFFLOAD_POINTS,
    PARALLELISM,
    RECOVER_POINTS,
    RELOAD_POINTS,
    Job,
    Seen,
    attempt,
    await_death,
    backend_for,
    base_store,
    die,
    fail,
    interfere,
    meet,
    survivors,
)
from helpers.program_ranks import run
from helpers.programs import (
    STATES,
    UNTOUCHED,
    Fault,
    Program,
    check,
    every_end,
    every_fault,
    program_of,
)
from helpers.sampling import sampled

import reloadpg

PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "10"))
FAULTY, VICTIM = 1, 2
TWELVE = tuple((0, 1, 2) for _ in range(11))
"""With WORLD, twelve groups, of which all ranks are members."""
POINTS = OFFLOAD_POINTS + RELOAD_POINTS


def faults(kind: str, *points: str, ranks: tuple[int, ...] = (FAULTY,)) -> list[Fault]:
    return [Fault(point, kind, ranks) for point in points]


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
    ]
)
SIGNALS = [Fault(p, ("interrupt", "terminate")[n % 2]) for n, p in enumerate(POINTS)]
COUNTED = [
    (Fault(point, "counted"), ("offload", "reload"))
    for point in ("offload.enter", "offload.released", "reload.enter", "reload.done")
]
TWO_RANKS = [
    Fault("recover.group2", "raise", (1, 2)),
    Fault("recover.agreed", "interrupt", (0, 3)),
    Fault("recover.check2", "raise", (0, 1)),
]
LATE = faults("late", *(point for point in POINTS if point != "reload.done"))
HANGS = faults("hang", "reload.group1", "recover.enter", "recover.group2", "recover.done")
TABLES = {
    "either operation after a failure": EITHER,
    "signals": every_fault(SIGNALS, parallelism=PARALLELISM),
    "interrupts after the arrival": every_fault(COUNTED),
    "two ranks": every_fault(TWO_RANKS),
    "recoveries": every_fault(faults("raise", *RECOVER_POINTS), parallelism=PARALLELISM),
    "interrupts of recoveries": every_fault(faults("interrupt", *RECOVER_POINTS)),
    "each group of an offload": each_group("offload", 1),
    "each group of an offload, in parallel": each_group("offload", 8),
    "each group of a reload": each_group("reload", 1),
    "each group of a reload, in parallel": each_group("reload", 8),
    "late ranks": every_fault(LATE),
    "hangs": every_fault(HANGS, timeout=BOUND),
}
DEFAULT = ("either operation after a failure", "signals", "interrupts after the arrival")


@pytest.mark.matrix
@pytest.mark.parametrize("name", sampled(TABLES, *DEFAULT, "two ranks"))
def test_all_ranks_get_a_consistent_result_and_the_job_continues(name: str) -> None:
    """The fault may be of any kind, at any point of an operation (failures 26 and 27)."""
    variables = {"late ranks": {"RELOADPG_LOG_WAIT_S": "0.6"}, "hangs": worlds.SILENCE}.get(
        name, {}
    )
    check(TABLES[name], run(TABLES[name], env=variables))


@pytest.mark.parametrize("seed", sampled(range(PROGRAMS), 0))
def test_programs(seed: int) -> None:
    """Groups, generations, values and errors are the model's (failures 4 to 6, 9, 12, 22 to 27)."""
    check(program := program_of(seed), run(program))


@pytest.mark.matrix
@pytest.mark.parametrize("state", sampled(STATES, "live"))
def test_ends(state: str) -> None:
    """The program's own error is raised, torch's tables are clean, and the process starts again."""
    check(program := every_end(state), run(program))


# -- dead ranks -----------------------------------------------------------------------------------


def called(operation: str) -> Seen:
    if operation == "recover":
        return attempt(lambda: reloadpg.recovery.recover("test", timeout=BOUND))
    return attempt(getattr(reloadpg, operation))


def one_dies(rank: int, size: int, point: str, victim: int) -> None:
    """One rank dies; the others raise in the operation and in later recoveries, and name it."""
    os.environ |= worlds.SILENCE
    operation = point.partition(".")[0]
    backend = backend_for(point)
    job = Job(backend, timeout=BOUND, parallelism=PARALLELISM)
    if operation == "reload":
        reloadpg.offload()
    before = job.snapshot()
    if operation == "step":
        seen = attempt(lambda: all_reduce_where_one_dies(job, victim))
    else:
        if rank == victim:
            interfere(point, die)
        seen = called(operation)
        assert seen.kind in {"RendezvousTimeoutError", "PeerFailedError", "RebuildError"}, seen
        assert seen.names(victim), seen
        untouched = point in UNTOUCHED
        assert job.snapshot() == before if untouched else job.states() == {"failed"}
        began = "offloaded" if point == "reload.enter" else "live"
        assert reloadpg.status().state == (began if untouched else "failed")
    assert seen.seconds < BOUND + ALLOWANCE
    for number in range(2 if operation in ("recover", "step") else 1):
        if number or operation != "step":  # a collective may end only when others recover
            meet(f"survivors {number}", size - 1)
        seen = called("recover")
        assert seen.seconds < BOUND + ALLOWANCE
    assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (victim,)), seen
    assert job.refused()
    assert reloadpg.recovery.recovery_requested()


def all_reduce_where_one_dies(job: Job, victim: int) -> None:
    """A collective of a training step, during which one rank is killed."""
    if job.rank == victim:
        dist.all_reduce(torch.ones(1), group=job.ring, async_op=True)
        die()
    dist.all_reduce(torch.ones(1), group=job.ring)


DEATHS = (
    ("step", VICTIM),
    *((point, VICTIM) for point in OFFLOAD_POINTS + RELOAD_POINTS + RECOVER_POINTS),
    ("recover.agreed", 0),  # the rank that reads the reports of the others
)
DEFAULT_DEATHS = [("offload.released", VICTIM)]


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.parametrize(
    "death", sampled(DEATHS, *DEFAULT_DEATHS), ids=lambda death: f"{death[0]}-{death[1]}"
)
def test_a_rank_that_dies_is_named_within_the_timeout(death: tuple[str, int]) -> None:
    """It may die at any point; later recoveries name it as well (failures 14, 26, 27)."""
    survivors(one_dies, 4, *death, dead=death[1])


def one_dies_and_one_fails(rank: int, size: int) -> None:
    """While all ranks rebuild the last group, rank 2 dies, and then rank 1 fails."""
    Job("faulty", parallelism=PARALLELISM)
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
    assert seen.kind in ({"RebuildError"} if rank == FAULTY else others), seen
    assert rank != FAULTY or PARALLELISM > 1 or "injected" in seen.cause
    assert seen.seconds < FAR
    assert seen.names(VICTIM), seen
    assert seen.kind != "PeerFailedError" or VICTIM in (seen.rank, *seen.missing), seen


def test_a_death_that_makes_another_rank_fail() -> None:
    """That failure ends the wait before the timeout, and the errors name the dead rank."""
    survivors(one_dies_and_one_fails, 4, dead=VICTIM)
