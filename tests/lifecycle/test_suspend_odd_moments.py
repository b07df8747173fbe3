"""Groups that others replay, proposals for other groups, interruptions, callbacks, bad readings."""

from __future__ import annotations

import os
from typing import Any

import moments
import pytest
import torch.distributed as dist
from suspend_job import Job, attempt, chosen

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.lifecycle import memory
from reloadpg.testing import run_ranks, simulated


def shared_creation(rank: int, size: int, case: str) -> dict[str, Any]:
    moments.wait_for_answers()
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    job = Job("recreate" if case == "made offloaded" else "suspend", subgroups=((0, 1),), bound=6)
    reloadpg.offload()
    if case == "failed" and rank == 1:
        simulated.inject(simulated.Fault("resume", group="g0"))
    if case == "failed":
        assert attempt(reloadpg.reload)[0] in ("RebuildError", "PeerFailedError")
    if case == "made offloaded":
        late = dist.new_group([0, 1], group_desc="late")
        if rank < 2:
            job.groups["late"] = late
    error = attempt(reloadpg.reload)
    return {
        "error": error,
        "states": {state for state, _ in job.facts().values()},
        "sums": job.sums(),
    }


@pytest.mark.parametrize("case", ["suspended", "failed", "made offloaded"])
def test_others_replay_only_what_members_rebuild(case: str) -> None:
    """Where torch wants all ranks in a creation, a rank that is no member takes part in that of a
    group that was recreated, and not of one that was resumed or lived all along.
    """
    for result in run_ranks(shared_creation, 3, args=(case,), timeout=200):
        assert result == {"error": ("", ""), "states": {"live"}, "sums": True}


def proposal_of_another(rank: int, size: int) -> dict[str, str]:
    if rank == 0:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    job = Job("suspend", subgroups=((0, 1), (1, 2)))
    found = chosen(reloadpg.offload())
    reloadpg.reload()
    assert job.sums()
    return found


def test_a_rank_speaks_for_its_own_groups_only() -> None:
    """Rank 0 cannot suspend: its groups are recreated, and g1, of others, is not."""
    for rank, found in enumerate(run_ranks(proposal_of_another, 3, timeout=200)):
        expected = {"WORLD": "recreate"}
        expected |= {"g0": "recreate"} if rank < 2 else {}
        expected |= {"g1": "suspend"} if rank > 0 else {}
        assert found == expected


def destroyed_in_callback(rank: int, size: int, strategy: str, when: str) -> dict[str, Any]:
    job = Job(strategy, subgroups=((0, 1),), bound=6)
    group = job.groups.pop("g0")
    if when == "offload":
        reloadpg.on_offload(lambda: dist.destroy_process_group(group))
    else:
        reloadpg.on_reload(lambda: dist.destroy_process_group(group), before=True)
    errors = [attempt(reloadpg.offload), attempt(reloadpg.reload)]
    return {"errors": errors, "state": str(group.state), "sums": job.sums()}


@pytest.mark.parametrize("when", ["offload", "reload"])
@pytest.mark.parametrize("strategy", ["recreate", "suspend"])
def test_a_callback_may_destroy_a_group(strategy: str, when: str) -> None:
    """It is forgotten, and the others go on."""
    for result in run_ranks(destroyed_in_callback, 2, args=(strategy, when), timeout=200):
        assert result == {"errors": [("", "")] * 2, "state": "destroyed", "sums": True}


def broken_reading(rank: int, size: int, what: str) -> dict[str, Any]:
    def broken() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    job = Job("suspend", subgroups=(), bound=6)
    if what == "source" and rank == 1:
        memory.add_source("mine", memory.Source(broken))
    elif what == "check" and rank == 1:
        memory.add_check(broken)
    elif what == "nobody":
        memory.in_use = dict  # type: ignore[assignment]
    errors = [attempt(reloadpg.offload), attempt(reloadpg.reload)]
    return {"errors": errors, "sums": job.sums(), "busy": registry.busy}


@pytest.mark.parametrize("what", ["source", "check", "nobody"])
def test_a_reading_that_fails_ends_no_operation(what: str) -> None:
    """A source or a check that raises, or no source at all, costs a figure and nothing else."""
    for result in run_ranks(broken_reading, 2, args=(what,), timeout=200):
        assert result == {"errors": [("", "")] * 2, "sums": True, "busy": False}
