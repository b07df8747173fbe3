"""Recovery over torch's ProcessGroupNCCL, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import on_engines

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

    assert summed(group) == 2.0
    reloadpg.offload()
    reloadpg.reload()
    if rank != victim:
        # The peer does not come: a wait for the device lasts until this timeout, which the group
        # keeps in the recovery, where it must connect within it.
        dist.distributed_c10d._set_pg_timeout(SHORT, group)
        with suppress(RuntimeError):
            summed(group)
    reloadpg.recovery.recover()
    dist.distributed_c10d._set_pg_timeout(LIMIT, group)
    for _ in range(2):
        assert summed(group) == 2.0
        reloadpg.offload()
        reloadpg.reload()
