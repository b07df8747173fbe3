"""Suspend and resume: faults of the accelerator, misuse, and moments that only a suspend has.

Ranks that fail, hang or die in a suspend are scenarios of ``test_faults.py``.
"""

from __future__ import annotations

import os
from typing import Any

import moments
import pytest
import torch
import torch.distributed as dist
from suspend_job import HELD, STAYS, Job, attempt, chosen, reasons

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.lifecycle import memory
from reloadpg.testing import run_ranks, simulated

FAULTY = 1
BOUND = 60.0
"""Seconds; no rank reaches it."""
DONE = ("", "")


def failing(rank: int, size: int, at: str) -> tuple[Any, ...]:
    moments.wait_for_answers()
    job = Job("suspend", bound=BOUND)
    if at != "suspend":
        reloadpg.offload()
    if rank == FAULTY and at == "no memory":
        # There was room when all agreed, and another process took it since.
        memory.free_bytes = lambda: None  # type: ignore[method-assign]
        simulated.configure(capacity_bytes=simulated.stats().held_bytes + (HELD - STAYS))
    elif rank == FAULTY:
        simulated.inject(simulated.Fault(at, "raise", group="g2"))  # type: ignore[arg-type]
    error = attempt(reloadpg.offload if at == "suspend" else reloadpg.reload)
    states = {state for state, _ in job.facts().values()}, simulated.stats().held_bytes
    simulated.clear_faults()
    simulated.configure(capacity_bytes=0)
    reloadpg.reload()
    sums = job.sums()
    then = reloadpg.offload()
    back = reloadpg.reload()
    return error, states, sums and job.sums(), then, chosen(back), list(job.groups)


@pytest.mark.parametrize("at", ["suspend", "resume", "no memory"])
def test_the_job_recreates_after_a_failure(at: str) -> None:
    """All groups are failed, without memory; the next offload gives the reason in one warning."""
    for error, states, sums, then, back, names in run_ranks(failing, 3, args=(at,), timeout=200):
        assert ("out of memory" if at == "no memory" else "injected fault") in error[1]
        assert states == ({"failed"}, 0)
        assert sums
        assert chosen(then) == back == dict.fromkeys(names, "recreate")
        phase = "'suspended'" if at == "suspend" else "'resumed'"
        assert all(phase in reason for reason in reasons(then).values())
        (said,) = [w for w in then.warnings if "recreated, not suspended" in w]
        assert said.startswith(f"{len(names)} groups are recreated")


def misused(rank: int, size: int, what: str) -> tuple[str, bool]:
    job = Job("suspend", bound=BOUND)
    backend = job.groups["WORLD"]._get_backend(torch.device("cpu"))
    if what == "suspended before":
        backend.suspend()
        error = attempt(reloadpg.offload)
    else:
        reloadpg.offload()
        backend.resume()  # behind the library's back, on all ranks
        assert job.refused()
        error = attempt(reloadpg.reload)
    reloadpg.reload()
    return error[1], job.sums()


@pytest.mark.parametrize("what", ["suspended before", "resumed behind our back"])
def test_misuse_of_a_backend_fails(what: str) -> None:
    """Suspended twice, or resumed when live: all ranks raise; a reload recreates the groups."""
    for text, sums in run_ranks(misused, 3, args=(what,), timeout=200):
        assert "invalid usage" in text
        assert sums


def without_cumem(rank: int, size: int) -> tuple[Any, int, bool]:
    if rank == 0:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    job = Job("suspend", subgroups=((0, 1), (1, 2)))
    report = reloadpg.offload()
    held = simulated.stats().held_bytes
    reloadpg.reload()
    return report, held, job.sums()


def test_a_rank_without_cumem_makes_the_members_of_its_groups_recreate() -> None:
    """A suspend would succeed and give nothing back; g1, of other ranks, is suspended."""
    for rank, (report, held, sums) in enumerate(run_ranks(without_cumem, 3, timeout=200)):
        expected = {"WORLD": "recreate"}
        expected |= {"g0": "recreate"} if rank < 2 else {}
        expected |= {"g1": "suspend"} if rank > 0 else {}
        assert chosen(report) == expected
        for name, reason in reasons(report).items():
            assert ("NCCL_CUMEM_ENABLE=0" in reason) == (expected[name] == "recreate"), name
        assert held == (STAYS if rank > 0 else 0)
        assert sums


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
