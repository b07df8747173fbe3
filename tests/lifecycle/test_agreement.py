"""Ranks that ask for different things: all raise alike within seconds, and nothing was touched."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import moments
import pytest
import torch.distributed as dist
import worlds
from recovery_job import ALLOWANCE, FAR, PARALLELISM, Job, attempt, base_store, meet

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix

NOT_ON_NCCL = {"other creations on one rank"} if worlds.NCCL else set()


def disagreements(rank: int, size: int) -> dict[str, Any]:
    """Each disagreement in turn: what is raised, what changed, whether the job goes on."""
    moments.wait_for_answers()
    job = Job(rank, subgroups=((0, 1), (1, 2), (0, 2), (0, 1, 2), (0, 1, 2)), bound=FAR)
    found: dict[str, Any] = {}

    def differ(name: str, call: Any, fix: Any = None) -> None:
        before = job.snapshot()
        seen = attempt(call)
        untouched = job.snapshot() == before
        meet(name, size)
        if fix is not None:
            fix()
        found[name] = {"seen": seen, "untouched": untouched, "goes_on": job.cycle()}

    differ("one calls reload", reloadpg.reload if rank == 2 else reloadpg.offload)

    # A group of all three ranks: destroyed on rank 1 first, on the others once it is noticed.
    doomed = job.groups.pop(-2)
    if rank == 1:
        dist.destroy_process_group(doomed)
    differ(
        "group destroyed on one rank",
        reloadpg.offload,
        lambda: None if rank == 1 else dist.destroy_process_group(doomed),
    )
    pair = job.groups.pop(2) if rank != 1 else None
    if rank == 0:
        dist.destroy_process_group(pair)
    differ(
        "subset destroyed on one member",
        reloadpg.offload,
        lambda: dist.destroy_process_group(pair) if rank == 2 else None,
    )
    if rank == 0:
        reloadpg.uninstall()
        reloadpg.install(
            backends={worlds.BACKEND}, timeout=timedelta(seconds=10), parallelism=PARALLELISM
        )

    def agree_on_options() -> None:
        if rank == 0:
            reloadpg.uninstall()
            reloadpg.install(
                backends={worlds.BACKEND}, timeout=timedelta(seconds=FAR), parallelism=PARALLELISM
            )

    differ("other options on one rank", reloadpg.offload, agree_on_options)

    if worlds.NCCL:
        return found
    # Rank 0 makes its part of two groups the other way round: torch's counter goes apart.
    backends = ["gloo", "cpu:gloo"]
    for backend in backends if rank else reversed(backends):
        job.groups.append(dist.new_group([0, 1, 2], backend=backend))

    def destroy_both() -> None:
        for group in job.groups[-2:]:
            dist.destroy_process_group(group)
        del job.groups[-2:]

    differ("other creations on one rank", reloadpg.offload, destroy_both)
    return found


DIFFERENCES = {
    "one calls reload": ["offload() on ranks 0-1 and reload() on rank 2"],
    "group destroyed on one rank": ["of ranks 0-2 exists on ranks 0, 2 and not on rank 1"],
    "subset destroyed on one member": ["of ranks 0, 2 exists on rank 2 and not on rank 0"],
    "other options on one rank": ["10.0 on rank 0 and 100.0 on ranks 1-2", "give install()"],
    # On NCCL two groups that differ connect while they are made, or look alike.
    "other creations on one rank": ["created as cpu:gloo", "on rank 0 and"],
}


@worlds.unbound_only
def test_ranks_that_disagree_all_raise_and_nothing_is_touched() -> None:
    """With one text, which spells out all differences (failure 12: such ranks hung).

    The job continues once the cause is removed.
    """
    results = run_ranks(disagreements, 3, timeout=120)
    assert results[0].keys() == DIFFERENCES.keys() - NOT_ON_NCCL
    for case in results[0]:
        found = [result[case] for result in results]
        seen = [one["seen"] for one in found]
        assert [call.kind for call in seen] == ["DisagreementError"] * 3, case
        assert len({call.text.split(": ", 1)[1].split(" Nothing")[0] for call in seen}) == 1, case
        assert max(call.seconds for call in seen) < ALLOWANCE, case
        assert all(part in seen[0].text for part in DIFFERENCES[case]), seen[0]
        assert [(one["untouched"], one["goes_on"]) for one in found] == [(True, True)] * 3, case


def one_round_behind(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 misses a whole offload of the others, and comes to the next call with its first."""
    job = Job(rank, subgroups=((0, 1), (1, 2)))
    before = job.snapshot()
    alone = attempt(reloadpg.offload) if rank != 1 else None
    meet("behind", size)
    late = attempt(reloadpg.offload) if rank == 1 else None
    untouched = job.snapshot() == before
    meet("late", size)
    return {"alone": alone, "late": late, "untouched": untouched, "goes_on": job.cycle()}


def test_a_rank_one_call_behind() -> None:
    """It learns at once that the others have given up on it, and all meet in the next call."""
    results = run_ranks(one_round_behind, 3, timeout=120)
    for rank, result in enumerate(results):
        seen = result["late"] if rank == 1 else result["alone"]
        assert seen.kind == "RendezvousTimeoutError"
        assert seen.missing == (1,)
        assert result["untouched"]
        assert result["goes_on"]
    assert "This rank arrived too late" in results[1]["late"].text


def one_call_skipped(rank: int, size: int) -> list[Any]:
    """Rank 1 raises before its reload; then all call reload again, in step, as they are told."""
    job = Job(rank, subgroups=((0, 1), (1, 2)))
    job.cycle()
    reloadpg.offload()
    alone = attempt(reloadpg.reload) if rank != 1 else None
    store = base_store().clone()
    if rank == 0:
        threading.Thread(target=tell_when_waiting, args=(store,), daemon=True).start()
    if rank == 1:
        store.wait(["test/rank 0 waits"])
    again = attempt(reloadpg.reload)
    return [alone, again, job.cycle()]


def tell_when_waiting(store: Any) -> None:
    while (running := reloadpg.status().running) is None or not running.waiting:
        time.sleep(0.01)
    store.set("test/rank 0 waits", "1")


def test_a_rank_that_skipped_a_call_is_in_step_with_the_next_one() -> None:
    """It joins the others in the round that they are in, instead of staying one behind for good."""
    for rank, (alone, again, goes_on) in enumerate(run_ranks(one_call_skipped, 3, timeout=120)):
        assert rank == 1 or alone.kind == "RendezvousTimeoutError"
        assert again.kind == "", again
        assert goes_on


def one_cycle_ahead(rank: int, size: int) -> dict[str, Any]:
    """A rank whose groups are a generation behind the others' is not let in."""
    job = Job(rank, subgroups=((0, 1), (1, 2)), bound=10)
    job.cycle()
    groups = registry.managed()  # type: ignore[attr-defined]
    if rank == 1:
        groups[1].generation -= 1
    before = job.snapshot()
    seen = attempt(reloadpg.offload)
    untouched = job.snapshot() == before
    if rank == 1:
        groups[1].generation += 1
    meet("fixed", size)
    return {"seen": seen, "untouched": untouched, "goes_on": job.cycle()}


def test_a_group_one_generation_behind() -> None:
    """The generations are compared among a group's members, and both are named."""
    for result in run_ranks(one_cycle_ahead, 3, timeout=120):
        assert result["seen"].kind == "DisagreementError"
        assert "generation is 1 on rank 0 and 0 on rank 1" in result["seen"].text
        assert result["untouched"]
        assert result["goes_on"]
