"""Ranks whose calls differ: all raise the same error, and nothing is changed."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

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
    """Each disagreement: the error, whether anything changed, whether the job continues."""
    os.environ |= worlds.ALL_RESPOND
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

    # A group of all three ranks: destroyed on rank 1 first, on the others after the error.
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
    # Rank 0 creates two groups in the other order, so their names differ.
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
    # On NCCL two groups that differ connect while they are created, or look equal.
    "other creations on one rank": ["created as cpu:gloo", "on rank 0 and"],
}


@worlds.unbound_only
def test_ranks_that_disagree_all_raise_and_change_nothing() -> None:
    """The same text on all ranks, with all differences (failure 12: such ranks hung).

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


@pytest.mark.ranks(3)
def test_a_rank_one_call_late(rank: int, world_size: int) -> None:
    """Rank 1 makes its first call after the others' has timed out. It raises at once, and all ranks
    meet in the next call.
    """
    job = Job(rank, subgroups=((0, 1), (1, 2)))
    before = job.snapshot()
    if rank == 1:
        meet("others timed out", world_size)
    seen = attempt(reloadpg.offload)
    if rank != 1:
        meet("others timed out", world_size)
    assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (1,))
    assert ("This rank arrived too late" in seen.text) == (rank == 1)
    assert job.snapshot() == before
    meet("late", world_size)
    assert job.cycle()


def tell_when_waiting(store: Any) -> None:
    while (running := reloadpg.status().running) is None or not running.waiting:
        time.sleep(0.01)
    store.set("test/rank 0 waits", "1")


@pytest.mark.ranks(3)
def test_a_rank_that_skipped_a_call_joins_the_next_one(rank: int) -> None:
    """It takes part in the epoch of the other ranks, and does not stay one behind."""
    job = Job(rank, subgroups=((0, 1), (1, 2)))
    job.cycle()
    reloadpg.offload()
    if rank != 1:
        with pytest.raises(reloadpg.RendezvousTimeoutError):
            reloadpg.reload()
    store = base_store().clone()
    if rank == 0:
        threading.Thread(target=tell_when_waiting, args=(store,), daemon=True).start()
    if rank == 1:
        store.wait(["test/rank 0 waits"])
    reloadpg.reload()
    assert job.cycle()


@pytest.mark.ranks(3)
def test_generations_of_a_group_must_agree(rank: int, world_size: int) -> None:
    """Its members compare them; the error has both."""
    job = Job(rank, subgroups=((0, 1), (1, 2)), bound=10)
    job.cycle()
    groups = registry.managed()  # type: ignore[attr-defined]
    if rank == 1:
        groups[1].generation -= 1
    before = job.snapshot()
    with pytest.raises(reloadpg.DisagreementError, match="generation is 1 on rank 0 and 0 on rank"):
        reloadpg.offload()
    assert job.snapshot() == before
    if rank == 1:
        groups[1].generation += 1
    meet("fixed", world_size)
    assert job.cycle()
