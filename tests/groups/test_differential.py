"""A patched process without reloadable groups behaves as an unpatched one."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = [
    worlds.unbound_only,
    pytest.mark.matrix,
    pytest.mark.skipif(
        worlds.SPLITS_EVERY_GROUP,
        reason="its group that only members create waits indefinitely, also without the library",
    ),
]


def _error(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]


def _program(rank, world_size, installed):
    """Everything that a program can see of its groups, as plain values."""
    if installed:
        reloadpg.install(**worlds.BYPASSING)
    seen = {}
    worlds.init(timeout=timedelta(seconds=99))
    pair = dist.new_group([0, 1], timedelta(seconds=55), group_desc="pair")
    outside = dist.new_group([2])
    local = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    subgroup, subgroups = dist.new_subgroups(1)
    mesh = init_device_mesh(worlds.device().type, (3,), mesh_dim_names=("dp",))
    seen["types"] = [type(g).__name__ for g in (dist.group.WORLD, pair, outside, local, subgroup)]
    seen["non_member"] = [g is dist.GroupMember.NON_GROUP_MEMBER for g in (pair, outside, local)]
    seen["names"] = sorted(c10d._world.pg_names.values())
    seen["count"] = c10d._world.group_count
    seen["configs"] = sorted(c10d._world.pg_backend_config.values())
    seen["ranks"] = sorted(dist.get_process_group_ranks(g) for g in c10d._world.pg_map)
    seen["subgroups"] = [g is dist.GroupMember.NON_GROUP_MEMBER for g in subgroups]
    seen["mesh"] = [mesh.get_group().group_name, mesh.get_group() is dist.group.WORLD]
    tensor = torch.arange(3.0) + rank
    dist.all_reduce(tensor)
    seen["world sum"] = tensor.tolist()
    if rank < 2:
        part = torch.ones(2) * (rank + 1)
        dist.all_reduce(part, group=pair)
        seen["pair sum"] = part.tolist()
    seen["errors"] = [
        _error(dist.new_group, [7]),
        _error(dist.new_group, [0], timeout=5),
        _error(dist.new_group, [0], backend="nosuch"),
        _error(dist.new_group, [0], nosuch=1),
        _error(dist.init_process_group, worlds.BACKEND),
        _error(dist.split_group, None, None),
    ]
    store = c10d._get_default_store()
    worlds.barrier()
    seen["keys"] = store.num_keys()
    dist.barrier()
    seen["threads"] = threading.active_count()
    dist.destroy_process_group()
    seen["after"] = [dist.is_initialized(), len(c10d._world.pg_map), c10d._world.group_count]
    return seen


def test_the_same_program_sees_the_same_things_with_and_without_install():
    """Groups, names, tables, error texts, store keys, threads; the groups are torch's own."""
    plain, patched = (
        run_ranks(_program, 3, args=(installed,), timeout=240) for installed in (False, True)
    )
    for rank in range(3):
        assert patched[rank] == plain[rank]
    assert plain[0]["world sum"] == [3.0, 6.0, 9.0]
    assert plain[0]["pair sum"] == [3.0, 3.0]
    assert plain[0]["non_member"] == [False, True, False]
    assert len([e for e in plain[0]["errors"] if isinstance(e, tuple)]) == 6
