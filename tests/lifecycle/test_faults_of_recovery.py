"""Faults of the recovery itself: deaths, interrupts, hangs, on several ranks, one after another."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fault_job import FaultJob
from recovery_job import (
    ALLOWANCE,
    BOUND,
    OFFLOAD_POINTS,
    RELOAD_POINTS,
    Job,
    Seen,
    attempt,
    backend_for,
    base_store,
    interfere,
    signalling,
    stop_interfering,
)
from sampling import sampled

import reloadpg
from reloadpg.testing import run_ranks

VICTIM = 2
FAULTY = 1

RECOVER_POINTS = (
    "recover.enter",
    "recover.agreed",
    "recover.group0",
    "recover.group3",
    "recover.check0",
    "recover.check3",
    "recover.rebuilt",
    "recover.callbacks",
    "recover.done",
)


class Injected(Exception):
    """The error of a fault that the tests bring about."""


def fail() -> None:
    raise Injected("injected")


# -- a rank that is killed ----------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def all_reduce_where_one_dies(job: Job, victim: int) -> None:
    """A training step's collective, in the middle of which one rank is killed."""
    if job.rank == victim:
        dist.all_reduce(torch.ones(1), group=job.groups[-1], async_op=True)
        die()
    dist.all_reduce(torch.ones(1), group=job.groups[-1])


def victim_dies(rank: int, size: int, point: str, victim: int) -> dict[str, Any]:
    """One rank dies at a point of an operation; the others recover, twice."""
    job = Job.start(rank, backend=backend_for(point))
    operation = point.partition(".")[0]
    if operation == "reload":
        reloadpg.offload()
    if rank == victim and operation != "step":
        interfere(point, die)
    if operation == "step":
        attempt(lambda: all_reduce_where_one_dies(job, victim))
    elif operation != "recover":
        attempt(getattr(reloadpg, operation))
    found = {"seen": [], "states": [], "pending": []}
    for _ in range(2):
        found["seen"].append(attempt(lambda: reloadpg.recover("test", wait_for_ranks=BOUND)))
        found["states"].append(job.states())
        found["pending"].append(reloadpg.fault_pending())
    return {**found, "refused": job.refused(), "status": reloadpg.status().state}


DEATHS = (
    ("step", VICTIM),
    *((point, VICTIM) for point in OFFLOAD_POINTS + RELOAD_POINTS + RECOVER_POINTS),
    ("recover.agreed", 0),  # the rank that reads what the others report
)


@pytest.mark.parametrize(
    "death",
    sampled(DEATHS, ("recover.group3", VICTIM)),
    ids=lambda death: f"{death[0]}-{death[1]}",
)
def test_a_rank_that_dies_is_named_within_the_bound(death: tuple[str, int]) -> None:
    """Wherever it dies, in a step, in an operation or in the recovery itself; and named again.

    No group is half used afterwards: each is failed on all survivors.
    """
    _, victim = death
    outcomes = run_ranks(victim_dies, 4, args=death, timeout=280, check=False)
    assert outcomes[victim].signal == signal.SIGKILL
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert [outcome.exception for outcome in survivors] == [None] * 3
    for found in (outcome.result for outcome in survivors):
        first, again = found["seen"]
        assert first.kind in {"RendezvousTimeoutError", "PeerFailedError", "RebuildError"}, first
        assert first.names(victim), first
        assert (again.kind, again.missing) == ("RendezvousTimeoutError", (victim,)), again
        assert max(first.seconds, again.seconds) < BOUND + ALLOWANCE
        assert found["states"] == [{"failed"}] * 2
        assert found["pending"] == [True] * 2
        assert found["refused"]
        assert found["status"] == "failed"


def loop_where_one_dies(rank: int, size: int) -> dict[str, Any]:
    """A loop whose second step one rank does not survive."""
    reloadpg.install(backends={worlds.BACKEND}, timeout=BOUND)
    worlds.init(timeout=timedelta(seconds=5))
    recoveries: list[str] = []
    reloadpg.on_report(lambda report: recoveries.append(report.operation))
    attempts = []

    def loop() -> None:
        for step in reloadpg.retrying(range(3)):
            with step:
                attempts.append((step.number, step.attempt))
                if rank == VICTIM and step.number == 1:
                    die()
                dist.all_reduce(torch.ones(1))

    return {"seen": attempt(loop), "attempts": attempts, "recoveries": recoveries}


@pytest.mark.slow
def test_a_loop_ends_when_a_rank_has_died() -> None:
    """It recovers once, waits for the rank as long as that does, and names it."""
    outcomes = run_ranks(loop_where_one_dies, 4, timeout=280, check=False)
    assert outcomes[VICTIM].signal == signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            assert outcome.exception is None
            found = outcome.result
            assert found["seen"].kind == "RendezvousTimeoutError", found
            assert found["seen"].missing == (VICTIM,)
            assert found["attempts"] == [(0, 1), (1, 1)]
            assert found["recoveries"] == ["recover"]


# -- a recovery that is interrupted, hangs, or fails on two ranks ---------------------------------


def recover_badly(rank: int, size: int, faults: list[dict[int, tuple[str, str]]]) -> list[Any]:
    """For each of these: fail on some ranks at some points of the recovery; then recover."""
    job = FaultJob(rank, size, "faulty")
    found = []
    for number, places in enumerate(faults):
        if rank in places:
            point, kind = places[rank]
            interrupt = signalling(signal.SIGINT, KeyboardInterrupt())
            interfere(point, {"raise": fail, "interrupt": interrupt}[kind])
        seen = attempt(lambda: reloadpg.recover("first"))
        stop_interfering()
        states = {str(group.state) for group in job.groups}
        job.meet(f"failed {number}")
        reloadpg.recover("again")
        found.append({"seen": seen, "states": states, "after": job.whole()})
        job.meet(f"recovered {number}")
    return found


INTERRUPTS = [
    {FAULTY: (point, "interrupt")} for point in RECOVER_POINTS if "callbacks" not in point
]
TWO_RANKS = [
    {0: ("recover.group1", "raise"), 3: ("recover.group1", "raise")},
    {1: ("recover.group2", "raise"), 2: ("recover.rebuilt", "raise")},
    {0: ("recover.agreed", "raise"), 3: ("recover.enter", "interrupt")},
    {1: ("recover.check2", "raise"), 2: ("recover.done", "raise")},
]


@pytest.mark.parametrize(
    "faults",
    sampled([INTERRUPTS, TWO_RANKS, TWO_RANKS[1:2]], TWO_RANKS[1:2]),
    ids=["interrupts", "two ranks", "two ranks, once"],
)
def test_all_ranks_end_a_bad_recovery_alike(faults: list[dict[int, tuple[str, str]]]) -> None:
    """Each rank at fault raises its own error, the others name one; the next recovery succeeds."""
    results = run_ranks(recover_badly, 4, args=(faults,), timeout=280)
    for rank, result in enumerate(results):
        for places, found in zip(faults, result, strict=True):
            seen: Seen = found["seen"]
            if rank not in places:  # an interrupted rank goes before the others have heard of it
                assert seen.kind in {"PeerFailedError", "RebuildError"}, (places, seen)
                assert any(seen.names(one) for one in places), (places, seen)
            elif len(places) == 1:
                assert seen.kind == "KeyboardInterrupt", (places, seen)
            else:
                assert seen.kind, places
            assert found["states"] == {"failed"}, (places, seen)
            assert found["after"]["sums"]
            assert found["after"]["states"] == {"live"}
            assert not found["after"]["pending"]
            assert found["after"]["generations"] == {found["after"]["generation"]}


def hang(rank: int, size: int, point: str) -> dict[str, Any]:
    """One rank stands still at a point of the recovery for longer than the bound."""
    job = Job.start(rank, backend=backend_for(point))
    store = base_store().clone()
    if rank == FAULTY:
        interfere(point, lambda: store.wait(["test/gave up"]))
    seen = attempt(lambda: reloadpg.recover("test", wait_for_ranks=BOUND))
    stop_interfering()
    states = job.states()
    if rank != FAULTY and store.add("test/seen", 1) == size - 1:
        store.set("test/gave up", "1")
    store.wait(["test/gave up"])
    reloadpg.recover("again", wait_for_ranks=ALLOWANCE)
    return {"seen": seen, "states": states, "sums": job.sums(), "live": job.states()}


@pytest.mark.slow
@pytest.mark.parametrize("point", ["recover.enter", "recover.group2", "recover.rebuilt"])
def test_a_rank_that_hangs_in_a_recovery_is_named(point: str) -> None:
    """The others raise at the bound; when it goes on, the next recovery succeeds."""
    for rank, found in enumerate(run_ranks(hang, 4, args=(point,), timeout=280)):
        seen = found["seen"]
        assert seen.kind == "RendezvousTimeoutError", seen
        assert seen.names(FAULTY), seen
        assert seen.seconds < 2 * BOUND + ALLOWANCE or rank == FAULTY
        assert found["states"] == {"failed"}
        assert found["sums"]
        assert found["live"] == {"live"}


# -- one recovery after the other -----------------------------------------------------------------


def several(rank: int, size: int) -> dict[str, Any]:
    """Recoveries with nothing between them, with an offload between them, and on one rank first."""
    job = FaultJob(rank, size)
    found = {}
    reports = [reloadpg.recover(f"number {number}") for number in range(3)]
    found["at once"] = {**job.whole(), "reported": [r.generation for r in reports]}
    job.meet("at once")

    reloadpg.recover("before")
    reloadpg.offload()
    reloadpg.recover("while offloaded")
    reloadpg.recover("and again")
    found["offloaded"] = job.whole()
    job.meet("offloaded")

    reloadpg.recover("together")
    if rank == FAULTY:  # it is in trouble again before the others have begun anything
        seen = attempt(lambda: reloadpg.recover("alone", wait_for_ranks=0.5))
        assert seen.kind == "RendezvousTimeoutError", seen
        assert seen.missing == (0, 2, 3)
    job.meet("one is in trouble")
    found["called"] = {"pending": reloadpg.fault_pending()}
    report = reloadpg.recover()
    found["called"]["reasons"] = [fault.reason for fault in report.faults]
    found["once more"] = job.whole()
    job.meet("called")

    if rank != FAULTY:  # the work is dropped at once, as gloo needs it
        dist.all_reduce(torch.ones(1), group=job.ring, async_op=True)
    reloadpg.recover("the next collective hangs")
    reloadpg.recover("so does the one after")
    found["end"] = job.whole()
    return found


def test_recoveries_one_after_the_other() -> None:
    """Twice and three times in a row, offloaded or not, and by a rank that others do not hear."""
    results = run_ranks(several, 4, timeout=280)
    for rank, found in enumerate(results):
        assert found["called"]["pending"]
        for name, expected in (("at once", 3), ("offloaded", 6), ("once more", 8), ("end", 10)):
            after = found[name]
            assert after["same"], name
            assert after["states"] == {"live"}, name
            assert after["sums"], name
            assert not after["pending"], name
            assert after["generation"] == results[0][name]["generation"], (rank, name)
            assert after["generations"] == {after["generation"]}, name
            assert after["generation"] >= expected, name
        assert found["at once"]["reported"] == [1, 2, 3]
