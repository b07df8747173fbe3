"""The device mesh, built from groups that carry the caller's timeout.

``init_device_mesh`` gives its groups torch's default timeout (30 minutes for gloo, 10 for NCCL)
whatever WORLD was given, so the groups are made here and handed to ``DeviceMesh.from_group``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from reloadpg import c10d
from reloadpg.environment.errors import MeshDimensionError

__all__ = ["build_mesh"]


def build_mesh(sizes: Mapping[str, int], device_type: str, timeout: timedelta) -> DeviceMesh:
    """A mesh with these dimensions over all ranks. Collective over the job, blocking.

    A dimension as large as the world is WORLD itself, as torch has it. The groups are made
    through ``torch.distributed.new_group``, so they are reloadable where ``install`` says so.

    Args:
        sizes: size by name in mesh order, as ``resolve_mesh_dims`` returns it.
        device_type: type of the devices that the mesh is of.
        timeout: timeout of every group of the mesh.

    Raises:
        MeshDimensionError: the product of the sizes is not the world size.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    shape = tuple(sizes.values())
    if math.prod(shape) != world:
        raise MeshDimensionError(
            f"The mesh {dict(sizes)} has {math.prod(shape)} ranks, but world_size={world}. No "
            f"group was made. Use resolve_mesh_dims()."
        )
    ranks = torch.arange(world, dtype=torch.int).reshape(shape)
    groups = []
    for axis, (name, size) in enumerate(sizes.items()):
        if size == world:
            groups.append(_world())
            continue
        # All ranks make all groups of all dimensions, in one order: torch counts them for names.
        rows = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        made = [dist.new_group(row, timeout=timeout, group_desc=f"mesh_{name}") for row in rows]
        groups.append(next(group for row, group in zip(rows, made, strict=True) if rank in row))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(sizes))


def _world() -> ProcessGroup:
    world = c10d.world()
    if world is None:
        raise ValueError("There is no default group. Call init_distributed() first.")
    return world
