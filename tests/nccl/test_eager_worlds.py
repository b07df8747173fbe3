"""Default groups that are bound to a device, from which torch splits all other groups.

On each of torch's NCCL engines, over the stand-ins: the creation of each group connects it, and a
reload creates it by its members only.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_job import Meetings, eventually, held, left_over, on_engines, start, summed
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.testing import standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

CYCLES = int(os.environ.get("NCCL_CYCLES", "10"))
WARM = 5
"""Cycles after which each thread that creates groups has its store client."""
ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def total(ranks: list[list[int]], rank: int) -> float:
    """The sum of ``rank + 1`` over this rank's part."""
    return next(sum(part) + 2.0 for part in ranks if rank in part)


@pytest.mark.parametrize("how", ["reload", "recover"])
@pytest.mark.parametrize("made_by", ["split", "mesh"])
@on_engines(4)
def test_cycles_of_split_groups_leave_nothing(
    engine: str, made_by: str, how: str, rank: int
) -> None:
    """An offload leaves no communicator; sums and timeouts are right after each cycle.

    Communicators, bytes, threads and descriptors are those of the fifth cycle. So are keys in the
    store, but for those of the last barriers, which a rank may not have deleted yet.
    """
    start(rank, bound=True)
    if made_by == "mesh":
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("column", "row"))
        row, column = mesh.get_group("row"), mesh.get_group("column")
    else:
        row, column = (dist.split_group(split_ranks=part) for part in (ROWS, COLUMNS))
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=71), row)
    meetings = Meetings(4)
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]

    def keys() -> int:
        return int(store.num_keys()) - 2 * meetings.number  # each meeting leaves two

    for cycle in range(1, CYCLES + 1):
        if how == "recover":
            reloadpg.recover("a test")
        reloadpg.offload()
        assert standins.communicators() == 0
        reloadpg.reload()
        sums = [summed(group, rank) for group in (None, row, column)]
        assert sums == [10.0, total(ROWS, rank), total(COLUMNS, rank)]
        meetings.meet()
        if cycle == WARM:
            before, keys_before = held(), keys()
            meetings.meet()
    assert left_over(before) == ""
    assert before.communicators == 3
    meetings.meet()
    assert eventually(lambda: keys() < keys_before + 5)
    backend: Any = row._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    assert backend.options._timeout == timedelta(seconds=71)
    assert made_by == "split" or mesh.get_group("row") is row


@pytest.mark.parametrize("when", ["live", "offloaded"])
@on_engines(4)
def test_a_split_is_reloaded_after_its_parent_was_destroyed(
    engine: str, when: str, rank: int
) -> None:
    start(rank, bound=True)
    parent = dist.split_group(split_ranks=[[0, 1, 2, 3]])
    child = dist.split_group(parent, split_ranks=ROWS)
    assert summed(child, rank) == total(ROWS, rank)
    for cycle in range(2):
        if cycle == 0 and when == "live":
            dist.destroy_process_group(parent)
        reloadpg.offload()
        if cycle == 0 and when == "offloaded":
            dist.destroy_process_group(parent)
        reloadpg.reload()
        assert summed(child, rank) == total(ROWS, rank)
