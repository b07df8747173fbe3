"""Default groups that are bound to a device, from which torch splits all other groups.

On each of torch's NCCL engines, over the stand-ins: the creation of each group connects it, and a
reload creates it by its members only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_job import ENGINES, Meetings, engine_variables, eventually, held, left_over, start, summed
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.testing import run_ranks, standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

CYCLES = int(os.environ.get("NCCL_CYCLES", "10"))
WARM = 5
"""Cycles after which each thread that creates groups has its store client."""
ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


@pytest.fixture(params=ENGINES)
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_ranks`` over the stand-ins with four ranks, on one of torch's engines."""
    env = engine_variables(request.param)

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(fn, 4, args=args, standins=True, env=env, timeout=280.0)

    return run


def _groups(made_by: str) -> Callable[[], list[Any]]:
    """Create a group for the row and one for the column; return a function that finds both."""
    if made_by == "mesh":
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("column", "row"))
        return lambda: [mesh.get_group("row"), mesh.get_group("column")]
    found = [dist.split_group(split_ranks=part) for part in (ROWS, COLUMNS)]
    return lambda: found


def _timeout(group: Any) -> float:
    return float(group._get_backend(torch.device("cuda")).options._timeout.total_seconds())


def _cycles(rank: int, world_size: int, made_by: str, how: str) -> dict[str, Any]:
    start(rank, bound=True)
    find = _groups(made_by)
    row, column = find()
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=71), row)
    meetings = Meetings(world_size)
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    offloaded, sums = set(), set()

    def keys() -> int:
        return int(store.num_keys()) - 2 * meetings.number  # each meeting leaves two

    for cycle in range(1, CYCLES + 1):
        if how == "recover":
            reloadpg.recover("a test")
        reloadpg.offload()
        offloaded.add(standins.communicators())
        reloadpg.reload()
        sums.add((summed(None, rank), summed(row, rank), summed(column, rank)))
        meetings.meet()
        if cycle == WARM:
            before, before_keys = held(), keys()
            meetings.meet()
    rest = left_over(before)
    meetings.meet()
    return {
        "same objects": all(map(lambda one, other: one is other, find(), (row, column))),
        "offloaded": offloaded,
        "sums": sums,
        "timeout": _timeout(row),
        "communicators": before.communicators,
        "rest": rest,
        "keys": "" if eventually(lambda: keys() < before_keys + 5) else (keys(), before_keys),
    }


@pytest.mark.parametrize("how", ["reload", "recover"])
@pytest.mark.parametrize("made_by", ["split", "mesh"])
def test_cycles_of_split_groups_leave_nothing(
    ranks: Callable[..., list[Any]], made_by: str, how: str
) -> None:
    """An offload leaves no communicator; sums and timeouts are right after each cycle.

    Communicators, bytes, threads and descriptors are those of the fifth cycle. So are keys in the
    store, but for those of the last barriers, which a rank may not have deleted yet.
    """
    for rank, seen in enumerate(ranks(_cycles, made_by, how)):
        row, column = [next(sum(p) + 2.0 for p in axis if rank in p) for axis in (ROWS, COLUMNS)]
        assert seen["sums"] == {(10.0, row, column)}
        assert seen["same objects"]
        assert seen["offloaded"] == {0}
        assert seen["timeout"] == 71.0
        assert seen["communicators"] == 3
        assert not seen["rest"]
        assert not seen["keys"]


def _without_parent(rank: int, world_size: int, when: str) -> list[float]:
    start(rank, bound=True)
    parent = dist.split_group(split_ranks=[[0, 1, 2, 3]])
    child = dist.split_group(parent, split_ranks=ROWS)
    seen = [summed(child, rank)]
    for cycle in range(2):
        if cycle == 0 and when == "live":
            dist.destroy_process_group(parent)
        reloadpg.offload()
        if cycle == 0 and when == "offloaded":
            dist.destroy_process_group(parent)
        reloadpg.reload()
        seen.append(summed(child, rank))
    return seen


@pytest.mark.parametrize("when", ["live", "offloaded"])
def test_a_split_is_reloaded_after_its_parent_was_destroyed(
    ranks: Callable[..., list[Any]], when: str
) -> None:
    assert ranks(_without_parent, when) == [[3.0] * 3] * 2 + [[7.0] * 3] * 2
