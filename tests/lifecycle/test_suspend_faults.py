"""Failures and misuse of suspend and resume, and the fallback to recreate.

Ranks that fail, hang or die in a suspend are scenarios of ``test_faults.py``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import HELD, STAYS, TRIANGLE, Job, reasons, strategies

import reloadpg
from reloadpg.lifecycle import memory
from reloadpg.lifecycle.job import jobs
from reloadpg.testing import simulated

FAULTY = 1
SUSPENDS: dict[str, Any] = {"strategy": "suspend", "subgroups": TRIANGLE}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("at", ["suspend", "resume", "no memory"])
def test_the_job_recreates_after_a_failure(rank: int, at: str) -> None:
    """All groups are failed and hold no memory; the next offload warns once, with the reason."""
    job = Job("sim", **SUSPENDS)
    if at != "suspend":
        reloadpg.offload()
    if rank == FAULTY and at == "no memory":
        # Another process has allocated memory after the ranks agreed that there was enough.
        memory.free_bytes = lambda: None  # type: ignore[method-assign]
        simulated.configure(capacity_bytes=simulated.stats().held_bytes + (HELD - STAYS))
    elif rank == FAULTY:
        simulated.inject(simulated.Fault(at, "raise", group="g2"))  # type: ignore[arg-type]
    message = "out of memory" if at == "no memory" else "injected fault"
    with pytest.raises(reloadpg.ReloadpgError, match=message):
        (reloadpg.offload if at == "suspend" else reloadpg.reload)()
    assert job.states() == {"failed"}
    assert simulated.stats().held_bytes == 0
    simulated.clear_faults()
    simulated.configure(capacity_bytes=0)
    reloadpg.reload()
    assert job.sums()
    then = reloadpg.offload()
    assert (
        strategies(then) == strategies(reloadpg.reload()) == dict.fromkeys(job.groups, "recreate")
    )
    assert job.sums()
    phase = "'suspended'" if at == "suspend" else "'resumed'"
    assert all(phase in reason for reason in reasons(then).values())
    (warning,) = [text for text in then.warnings if "recreated, not suspended" in text]
    assert warning.startswith(f"{len(job.groups)} groups are recreated")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("operation", ["offload", "reload"])
def test_a_backend_that_the_program_has_suspended_or_resumed(operation: str) -> None:
    """A second suspend or resume raises on all ranks; a reload recreates the groups."""
    job = Job("sim", **SUSPENDS)
    backend = job.groups["WORLD"]._get_backend(torch.device("cpu"))
    if operation == "offload":
        backend.suspend()
    else:
        reloadpg.offload()
        backend.resume()
        assert job.refused()
    with pytest.raises(reloadpg.ReloadpgError, match="invalid usage"):
        getattr(reloadpg, operation)()
    reloadpg.reload()
    assert job.sums()


@pytest.mark.ranks(3)
def test_one_rank_without_cumem_is_enough_to_recreate_all_groups(rank: int) -> None:
    """A suspend would succeed there without releasing memory. All reports name that rank and why,
    also those of groups (g1) that it is no member of.
    """
    if rank == 0:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    job = Job("sim", **SUSPENDS | {"subgroups": ((0, 1), (1, 2))})
    report = reloadpg.offload()
    assert simulated.stats().held_bytes == 0
    reloadpg.reload()
    assert strategies(report) == dict.fromkeys(job.groups, "recreate")
    for reason in reasons(report).values():
        assert reason.startswith("rank 0: ")
        assert "NCCL_CUMEM_ENABLE=0" in reason
    (warning,) = [text for text in report.warnings if "recreated, not suspended" in text]
    assert warning.startswith(f"{len(job.groups)} groups are recreated, not suspended: rank 0: ")
    assert job.sums()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["offload", "reload"])
@pytest.mark.parametrize("strategy", ["recreate", "suspend"])
def test_a_callback_can_destroy_a_group(strategy: str, when: str) -> None:
    job = Job("sim", strategy=strategy, subgroups=((0, 1),))
    group = job.groups.pop("g0")
    if when == "offload":
        reloadpg.on_offload(lambda: dist.destroy_process_group(group))
    else:
        reloadpg.on_reload(lambda: dist.destroy_process_group(group), before=True)
    reloadpg.offload()
    reloadpg.reload()
    assert group.state == "destroyed"
    assert job.sums()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["source", "check", "no source"])
def test_a_memory_source_or_check_that_fails_ends_no_operation(rank: int, what: str) -> None:
    """Its value is missing in the report."""

    def broken() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    job = Job("sim", strategy="suspend", subgroups=())
    if what == "source" and rank == 1:
        memory.add_source("mine", memory.Source(broken))
    elif what == "check" and rank == 1:
        memory.add_check(broken)
    elif what == "no source":
        memory.in_use = dict  # type: ignore[assignment]
    reloadpg.offload()
    reloadpg.reload()
    assert job.sums()
    assert not jobs.busy
