"""Ranks whose calls differ: all raise the same error, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import ALLOWANCE, FAR, Job, attempt

import reloadpg

pytestmark = pytest.mark.matrix

# -- differences: each function prepares one, yields the call and its error, and removes it --------

Difference = Iterator[tuple[Callable[[], object], str]]


def one_calls_reload(job: Job) -> Difference:
    call = reloadpg.reload if job.rank == 2 else reloadpg.offload
    yield call, "offload() on ranks 0-1 and reload() on rank 2"


def a_group_destroyed_on_one_rank(job: Job) -> Difference:
    doomed = job.groups.pop("g3")
    if job.rank == 1:
        dist.destroy_process_group(doomed)
    yield reloadpg.offload, "of ranks 0-2 exists on ranks 0, 2 and not on rank 1"
    if job.rank != 1:
        dist.destroy_process_group(doomed)


def a_pair_destroyed_on_one_member(job: Job) -> Difference:
    pair = job.groups.pop("g2", None)
    if job.rank == 0:
        dist.destroy_process_group(pair)
    yield reloadpg.offload, "of ranks 0, 2 exists on rank 2 and not on rank 0"
    if job.rank == 2:
        dist.destroy_process_group(pair)


def a_group_shut_down_on_one_rank(job: Job) -> Difference:
    """The other members would hang in a collective."""
    doomed = job.groups.pop("g4")
    if job.rank == 1:
        doomed.shutdown()
    yield reloadpg.offload, "communicator is in use on ranks 0, 2 and shut down on rank 1"
    dist.destroy_process_group(doomed)


def other_options_on_one_rank(job: Job) -> Difference:
    """Each one that differs is named."""

    def install(**options: Any) -> None:
        if job.rank == 0:
            reloadpg.uninstall()
            reloadpg.install(backends={worlds.BACKEND}, **options)

    install(timeout=10, exclude="none", min_size=1, parallelism=3, sets={"none": "none"})
    differences = {
        "exclude": "['none'] on rank 0 and [] on ranks 1-2",
        "min_size": "1 on rank 0 and 2 on ranks 1-2",
        "parallelism": "3 on rank 0 and default on ranks 1-2",
        "sets": "{'none': ('none',)} on rank 0 and {} on ranks 1-2",
        "timeout_s": "10.0 on rank 0 and 100.0 on ranks 1-2",
    }
    yield reloadpg.offload, "; ".join(f"{name} is {text}" for name, text in differences.items())
    install(timeout=FAR)


def other_creations_on_one_rank(job: Job) -> Difference:
    """Create two groups in different orders, so their names differ."""
    backends = ["gloo", "cpu:gloo"]
    made: list[Any] = [
        dist.new_group([0, 1, 2], backend=backend)
        for backend in (backends if job.rank else reversed(backends))
    ]
    yield reloadpg.offload, "backend is cpu:gloo"
    for group in made:
        dist.destroy_process_group(group)


def another_generation_on_one_rank(job: Job) -> Difference:
    now = max(job.generations())
    if job.rank == 1:
        job.groups["g0"]._managed.generation -= 1
    yield reloadpg.offload, f"generation is {now} on rank 0 and {now - 1} on rank 1"
    if job.rank == 1:
        job.groups["g0"]._managed.generation += 1


DIFFERENCES = [
    one_calls_reload,
    a_group_destroyed_on_one_rank,
    a_pair_destroyed_on_one_member,
    a_group_shut_down_on_one_rank,
    other_options_on_one_rank,
    another_generation_on_one_rank,
]
if not worlds.NCCL:  # there, such groups connect at their creation, or do not differ
    DIFFERENCES.append(other_creations_on_one_rank)


@pytest.mark.guarantees
@worlds.unbound_only
@pytest.mark.ranks(3)
def test_ranks_that_disagree_all_raise_and_change_nothing() -> None:
    """The text is the same on all ranks (failure 12). Without the cause, the job continues."""
    job = Job(subgroups=((0, 1), (1, 2), (0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)))
    for number, differ in enumerate(DIFFERENCES):
        difference = differ(job)
        call, said = next(difference)
        before = job.snapshot()
        seen = attempt(call)
        assert seen.kind == "DisagreementError", seen
        assert said in seen.text
        assert seen.seconds < ALLOWANCE
        assert job.snapshot() == before
        job.agree(f"{number}", seen.text.split(": ", 1)[1].split(" Nothing")[0])
        job.meet(f"{number}")
        next(difference, None)
        job.cycle()
