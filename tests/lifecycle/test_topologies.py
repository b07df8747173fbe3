"""Topologies in which naive orders of rebuilding deadlock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import PARALLELISM, Job

import reloadpg

PIPELINE = (
    *((rank,) for rank in range(4)),  # tensor parallel of one: bypassed
    (0, 1, 2, 3),  # pipeline
    (0, 3),  # embedding: first and last stage
    (0,),  # position embedding: first stage only
    (0, 1, 2, 3),  # a second pipeline group, as Megatron creates for another layout
)
RINGS = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("topology", "local"),
    [(PIPELINE, False), (RINGS, False), (RINGS, True)],
    ids=["pp4", "rings", "local"],
)
def test_three_cycles(rank: int, topology: Any, local: bool) -> None:
    """Each group is rebuilt by its members only, and sums over them (failures 12, 14, 16)."""
    job = Job("gloo", subgroups=() if local else topology, parallelism=PARALLELISM)
    if local:
        # Names are hashes of the members and of the number of known groups, which must be equal on
        # all members. Their order is not that of the creations.
        for batch in (topology[0:1] + topology[2:3], topology[1:2] + topology[3:4], topology[4:6]):
            for ranks in batch:
                if rank in ranks:
                    job.add(dist.new_group(sorted(ranks), use_local_synchronization=True))
    for _ in range(3):
        job.cycle()


@pytest.mark.ranks(4)
def test_a_partial_batch_as_the_first_operation_on_world(rank: int) -> None:
    """Ranks 0 to 2 exchange tensors, without rank 3, as in a pipeline (failure 15)."""
    Job(subgroups=())
    reloadpg.offload()
    reloadpg.reload()
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < 3] if rank < 3 else []
    received = {peer: torch.zeros(1) for peer in peers}
    ops = []
    for peer in peers:
        ops.append(dist.P2POp(dist.isend, torch.tensor([float(rank)]), peer))
        ops.append(dist.P2POp(dist.irecv, received[peer], peer))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    assert {peer: value.item() for peer, value in received.items()} == {one: one for one in peers}
    worlds.barrier()
