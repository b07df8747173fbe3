"""Recovery over torch's ProcessGroupNCCL, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import Injected
from helpers.nccl_job import on_engines
from helpers.repeating import repeat

import reloadpg

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=8)


def summed(group: Any) -> float:
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_engines(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fault_before_the_first_collective_of_a_rebuilt_group_is_recovered(
    engine: str, victim: int, rank: int
) -> None:
    """The other rank is in that collective, in a default group that is bound to no device.

    A recoverable job connects its groups in the reload: torch could not end their connection.
    """
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=True, timeout=60)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    group: Any = dist.new_group([0, 1])

    def step(number: int, attempt: int) -> float:
        fails = (number, attempt) == (1, 1)
        reloadpg.offload()
        reloadpg.reload()
        if fails and rank == victim:
            raise Injected
        # The rank whose peer does not come: a wait for the device lasts until this timeout, which
        # the group keeps in the recovery, where it must connect within it.
        dist.distributed_c10d._set_pg_timeout(SHORT if fails else LIMIT, group)
        return summed(group)

    assert repeat(step, 2) == [(1, 2.0), (2, 2.0)]


@on_engines(2)
@pytest.mark.parametrize("recoverable", [True, False])
def test_a_reload_warns_of_groups_that_cannot_be_ended_while_they_connect(
    engine: str, recoverable: bool, rank: int
) -> None:
    """In a recoverable job, with ``connect="none"``."""
    torch.cuda.set_device(rank)
    reloadpg.install(recoverable=recoverable, timeout=60)
    dist.init_process_group("nccl")

    def warned(**options: Any) -> bool:
        reloadpg.offload()
        report = reloadpg.reload(**options)
        summed(None)
        return "past every timeout" in "".join(report.warnings)

    summed(None)
    assert warned(connect="none") == recoverable
    assert not warned()
    assert not warned(connect="eager")
