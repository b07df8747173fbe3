"""Strategy ``suspend`` where it cannot be used: ``nccl/test_suspend.py`` has it over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import Job, reasons

import reloadpg
from reloadpg.c10d import memory
from reloadpg.lifecycle.job import jobs

pytestmark = pytest.mark.matrix


@pytest.mark.ranks(2)
def test_groups_of_a_backend_that_cannot_suspend_are_recreated() -> None:
    """The report gives the reason, and one warning."""
    reloadpg.install(backends={worlds.BACKEND}, strategy="suspend")
    worlds.init()
    report = reloadpg.offload()
    reloadpg.reload()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
    assert "cannot suspend" in reasons(report)["WORLD"]
    assert any("1 group is recreated, not suspended" in text for text in report.warnings)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["offload", "reload"])
def test_a_callback_can_destroy_a_group(when: str) -> None:
    job = Job(subgroups=((0, 1),))
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
@pytest.mark.parametrize("what", ["source", "no source"])
def test_a_memory_source_that_fails_ends_no_operation(rank: int, what: str) -> None:
    """Its value is missing in the report."""

    def broken() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    job = Job("sim", subgroups=())
    if what == "source" and rank == 1:
        memory.add_source("mine", memory.Source(broken))
    elif what == "no source":
        memory.in_use = dict  # type: ignore[assignment]
    reloadpg.offload()
    reloadpg.reload()
    assert job.sums()
    assert not jobs.busy
