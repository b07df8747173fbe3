"""The drop-in for slime over torch's NCCL engines on the stand-ins, which connect as NCCL does."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import LIMIT, Meetings, engine_variables, on_ranks

from reloadpg.integrations.slime import (
    destroy_process_groups,
    monkey_patch_torch_dist,
    register_default_process_group,
    reload_process_groups,
)

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

BLOCKED_S = 2.0
"""Seconds after which an exchange that has not returned is blocked; it takes milliseconds."""


def exchange(rank: int) -> float:
    """The first operation of a pipeline step: stages 0 and 1, and 2 and 3, exchange a tensor."""
    torch.cuda.set_device(rank)  # of this thread
    sent, received = torch.full((2,), rank, dtype=torch.float32, device="cuda").chunk(2)
    peer = rank ^ 1
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received.item()


@pytest.mark.parametrize("options", [{}, {"connect": "none"}], ids=["default", "none"])
@on_ranks(4, RELOADPG_STANDIN_CONNECT="1", **engine_variables("legacy"))
def test_two_of_four_stages_exchange_first(options: Any, rank: int) -> None:
    """They need no barrier on WORLD before, as slime's actor has, and do not wait for the others.

    With ``connect="none"`` they wait: a pipeline in which stage 3 first needs stage 0 hangs.
    """
    torch.cuda.set_device(rank)
    monkey_patch_torch_dist()
    dist.init_process_group("nccl", timeout=LIMIT)
    register_default_process_group(timedelta(minutes=10))
    dist.barrier()
    meetings = Meetings(4)
    destroy_process_groups()
    reload_process_groups(**options)
    found: list[float] = []
    if rank < 2:
        first = threading.Thread(target=lambda: found.append(exchange(rank)), daemon=True)
        first.start()
        first.join(BLOCKED_S if options else LIMIT.total_seconds())
        assert first.is_alive() == bool(options)
    meetings.meet()
    if rank < 2:
        first.join(LIMIT.total_seconds())
    else:
        found.append(exchange(rank))
    assert found == [rank ^ 1]
