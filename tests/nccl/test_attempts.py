"""Attempts of a reload whose communicators cannot be created, or connected, for a moment."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import held, left_over, on_engines, start, summed

import reloadpg
from reloadpg.testing import standins
from reloadpg.testing.faults import Fault, clear_faults, inject

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]


@pytest.mark.parametrize("call", ["init", "collective"])
@pytest.mark.parametrize("bound", [True, False])
@on_engines(2)
def test_a_reload_tries_again_after_a_call_of_nccl_has_failed(
    engine: str, bound: bool, call: str, rank: int
) -> None:
    """On one rank, in each of two attempts: values are right, and no communicator is left, but that
    in whose creation the peer stays.
    """
    start(rank, bound=bound)
    group = dist.new_group()
    assert [summed(None, rank), summed(group, rank)] == [3.0, 3.0]
    reloadpg.offload()
    reloadpg.reload(connect="eager")
    live = held()
    reloadpg.offload()
    if rank == 1:
        inject(Fault("nccl", operation=call, rank=1, times=2))
    report = reloadpg.reload(connect="eager", attempts=4)
    clear_faults()
    assert 1 <= len(report.retries) <= 3
    assert "RebuildError: reload failed at" in report.retries[0]
    assert [summed(None, rank), summed(group, rank)] == [3.0, 3.0]
    stuck = 2 if call == "init" else 0
    assert not left_over(live, stuck)
    reloadpg.offload()
    assert standins.communicators() <= stuck
