"""A rank that is killed: the others raise within the bound and a little, and name it."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import Any

import pytest
from recovery_job import (
    ALLOWANCE,
    BOUND,
    FAR,
    OFFLOAD_POINTS,
    RELOAD_POINTS,
    Job,
    attempt,
    backend_for,
    base_store,
    interfere,
    meet,
)
from sampling import sampled

import reloadpg
from reloadpg.testing import run_ranks

VICTIM = 2
SURVIVORS = (0, 1, 3)


def victim_dies(rank: int, size: int, point: str) -> dict[str, Any]:
    job = Job.start(rank, backend=backend_for(point))
    if point.startswith("reload"):
        reloadpg.offload()
    before = job.snapshot()
    if rank == VICTIM:
        interfere(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
    operation = reloadpg.offload if point.startswith("offload") else reloadpg.reload
    seen = attempt(operation)
    return {
        "seen": seen,
        "states": job.states(),
        "untouched": job.snapshot() == before,
        "refused": "live" in job.states() or job.refused(),
        "status": reloadpg.status().state,
    }


def survivors_of(point: str) -> list[dict[str, Any]]:
    outcomes = run_ranks(victim_dies, 4, args=(point,), timeout=120, check=False)
    assert outcomes[VICTIM].signal == signal.SIGKILL
    assert [outcomes[rank].exception for rank in SURVIVORS] == [None] * len(SURVIVORS)
    return [outcomes[rank].result for rank in SURVIVORS]


def assert_all_raised_and_named_it(results: list[dict[str, Any]]) -> None:
    for result in results:
        seen = result["seen"]
        assert seen.kind in {"RendezvousTimeoutError", "PeerFailedError", "RebuildError"}, seen
        assert seen.seconds < BOUND + ALLOWANCE, seen
        assert seen.names(VICTIM), seen


@pytest.mark.parametrize("point", sampled(OFFLOAD_POINTS[:3], "offload.quiesced"))
def test_a_rank_killed_before_anything_is_released(point: str) -> None:
    """All survivors raise, name the dead rank, and keep every group as it was (failure 14)."""
    results = survivors_of(point)
    assert_all_raised_and_named_it(results)
    assert [result["untouched"] for result in results] == [True] * 3
    assert {result["status"] for result in results} == {"live"}


@pytest.mark.parametrize(
    "point", sampled(OFFLOAD_POINTS[3:] + RELOAD_POINTS[1:], "offload.released", "reload.group1")
)
def test_a_rank_killed_while_groups_are_touched(point: str) -> None:
    """All survivors raise, name the dead rank, and refuse every group (failures 14, 26, 27)."""
    results = survivors_of(point)
    assert_all_raised_and_named_it(results)
    assert [result["states"] for result in results] == [{"failed"}] * 3
    assert [result["refused"] for result in results] == [True] * 3
    assert {result["status"] for result in results} == {"failed"}


def test_a_rank_killed_before_a_reload_begins() -> None:
    """All survivors raise, name the dead rank, and stay offloaded."""
    results = survivors_of("reload.enter")
    assert_all_raised_and_named_it(results)
    assert [result["untouched"] for result in results] == [True] * 3
    assert {result["status"] for result in results} == {"offloaded"}


def one_dies_and_one_fails(rank: int, size: int) -> dict[str, Any]:
    """All are at the last group, of all ranks: rank 2 dies there, and rank 1 fails after that."""
    job = Job.start(rank, bound=FAR, backend="faulty")
    reloadpg.offload()
    store = base_store().clone()
    if rank == VICTIM:
        store.set("test/victim", str(os.getpid()))
    actions = {
        VICTIM: lambda: (store.wait(["test/0", "test/3"]), os.kill(os.getpid(), signal.SIGKILL)),
        1: lambda: (wait_for_death(int(store.get("test/victim"))), fail()),
    }
    interfere("reload.group3", actions.get(rank, lambda: store.set(f"test/{rank}", "here")))
    seen = attempt(reloadpg.reload)
    return {"seen": seen, "states": job.states()}


def wait_for_death(pid: int) -> None:
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        assert select.select([process], [], [], FAR)[0]
        os.close(process)


def fail() -> None:
    raise RuntimeError("connection reset by a peer")


def test_a_rank_whose_death_makes_another_fail_first() -> None:
    """The neighbour's failure ends the wait before the timeout, and the dead rank is named."""
    outcomes = run_ranks(one_dies_and_one_fails, 4, timeout=120, check=False)
    assert outcomes[VICTIM].signal == signal.SIGKILL
    kinds = {0: "PeerFailedError", 1: "RebuildError", 3: "PeerFailedError"}
    for rank, kind in kinds.items():
        seen = outcomes[rank].result["seen"]
        assert seen.kind == kind
        assert seen.seconds < FAR
        assert seen.names(VICTIM), seen
    failed = outcomes[1].result["seen"]
    assert "connection reset by a peer" in failed.text + failed.cause


def one_is_late(rank: int, size: int) -> dict[str, Any]:
    """Rank 2 is held up in a callback until the others have given it up, and then comes."""
    job = Job.start(rank)
    reloadpg.offload()
    store = base_store().clone()
    if rank == VICTIM:
        interfere("reload.callbacks", lambda: store.wait(["test/gave up"]))
    seen = attempt(reloadpg.reload)
    if rank != VICTIM and store.add("test/seen", 1) == size - 1:
        store.set("test/gave up", "1")
    failed = job.states()
    meet("late", size)
    again = attempt(reloadpg.reload)
    return {"seen": seen, "failed": failed, "again": again, "sums": job.sums()}


@pytest.mark.slow
def test_a_rank_that_comes_after_the_bound() -> None:
    """It gets the others' outcome as soon as it comes, and a second reload completes."""
    for result in run_ranks(one_is_late, 4, timeout=120):
        seen = result["seen"]
        assert seen.kind == "RendezvousTimeoutError"
        assert seen.missing == (VICTIM,)
        assert BOUND <= seen.seconds < BOUND + ALLOWANCE
        assert result["failed"] == {"failed"}
        assert result["again"].kind == ""
        assert result["sums"]
