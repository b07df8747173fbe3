"""The mesh: rules for its dimensions, its groups, and the seed of each pipeline stage.

``init_device_mesh`` creates its groups with torch's default timeout (30 minutes for gloo, 10 for
NCCL), whatever the timeout of WORLD. So the groups are created here and passed to
``DeviceMesh.from_group``. The rules do not import torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from ..errors import InvalidOptionError
from ..settings import as_integer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh order, outermost first: neighbouring ranks share the innermost dimension."""

_NUMPY_SEEDS = 1 << 32
_TORCH_SEEDS = 1 << 64


def resolve_mesh_dims(dims: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Sizes of the mesh dimensions, in mesh order, for a world of ``world_size`` ranks.

    Local, pure. One size may be -1: it is inferred from the others.

    If all names are of ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``ep`` and ``tp``, they are
    put in this order. Dimensions of size 1 are dropped, except ``dp_shard`` with ``tp`` or ``ep``:
    FSDP needs a mesh to wrap over. If no dimension is left, the mesh is ``dp_shard`` over the
    world. With any other name, the dimensions are used as given, as for ``init_device_mesh``.

    Args:
        dims: size by name, outermost first.
        world_size: number of ranks.

    Raises:
        InvalidOptionError: not a mapping, a size that is not a positive number or -1, more than one
            -1, a world size that is not divisible, or a product that differs from the world size.
            Also a ValueError.
    """
    if not isinstance(dims, Mapping):
        raise InvalidOptionError(
            f"mesh_dims={dims!r} is not a mapping of names to sizes. No group was created. Pass "
            f"for example {{'dp_shard': -1, 'tp': 2}}."
        )
    given = {name: as_integer(size) for name, size in dims.items()}
    sizes = {name: size for name, size in given.items() if size is not None}
    for name, size in given.items():
        if size is None or size == 0 or size < -1:
            raise _no_mesh(f"{name}={dims[name]!r} is neither a positive number nor -1", dims)
    world = as_integer(world_size)
    if world is None or world < 1:
        raise _no_mesh(f"world_size={world_size!r} is not a positive number", dims)
    known = all(name in MESH_ORDER for name in sizes)
    inferred = [name for name in sizes if sizes[name] == -1]
    if len(inferred) > 1:
        raise _no_mesh(f"{' and '.join(inferred)} are -1; only one size can be inferred", dims)
    product = math.prod(size for size in sizes.values() if size != -1)
    if inferred:
        if world % product:
            raise _no_mesh(
                f"{inferred[0]} cannot be inferred: world_size={world} is not divisible by "
                f"{product}, the product of the other sizes",
                dims,
            )
        sizes[inferred[0]] = world // product
    elif product != world and (product != 1 or not known):
        raise _no_mesh(f"The product of the sizes is {product}, but world_size={world}", dims)
    if not known:
        return sizes
    kept = {name for name, size in sizes.items() if size > 1}
    if kept & {"tp", "ep"}:
        kept.add("dp_shard")
    ordered = {name: sizes.get(name, 1) for name in MESH_ORDER if name in kept}
    return ordered or {"dp_shard": world}


def _no_mesh(what: str, dims: Mapping[str, int]) -> InvalidOptionError:
    return InvalidOptionError(
        f"{what} (mesh_dims={dict(dims)}). No group was created. Correct mesh_dims, or set one "
        f"size to -1 to infer it."
    )


def build_mesh(sizes: Mapping[str, int], device_type: str, timeout: timedelta) -> DeviceMesh:
    """Create a mesh with these dimensions over all ranks. Collective over the job, blocking.

    A dimension as large as the world is WORLD itself, as in torch. The groups are created with
    ``torch.distributed.new_group``, so they are reloadable if ``install`` selects them.

    ``sizes`` is what ``resolve_mesh_dims`` returned for this world.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    world, rank = dist.get_world_size(), dist.get_rank()
    whole = cast(dist.ProcessGroup, dist.group.WORLD)
    shape = tuple(sizes.values())
    ranks = torch.arange(world, dtype=torch.int).reshape(shape)
    groups = []
    for axis, (name, size) in enumerate(sizes.items()):
        if size == world:
            groups.append(whole)
            continue
        # All ranks create all groups of all dimensions in one order, since torch numbers them.
        rows = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        made = [dist.new_group(row, timeout=timeout, group_desc=f"mesh_{name}") for row in rows]
        groups.append(next(group for row, group in zip(rows, made, strict=True) if rank in row))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(sizes))


# -- seeds ------------------------------------------------------------------------------------


def set_seed(seed: int, mesh: DeviceMesh | None = None) -> int:
    """Seed Python, NumPy's legacy generator (if installed), torch's CPU and all its devices.

    Local, non-blocking, idempotent; not thread-safe, since the generators belong to the process.
    Ranks that differ in the dimension ``pp`` of the mesh get different seeds; all others get equal
    seeds. Devices that torch has not initialized are seeded when they are.

    Args:
        seed: from 0 to 2**64 - 1, equal on all ranks. NumPy gets it modulo 2**32.
        mesh: the mesh of the job, which contains this rank. Without a mesh, or a dimension ``pp``,
            all ranks get ``seed``. For other dimensions, add a rank's coordinate to the seed.

    Returns:
        The seed of this rank.

    Raises:
        InvalidOptionError: the seed is out of range; nothing was seeded. Also a ValueError.
    """
    mine = checked_seed(seed)
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        mine = (mine + mesh.get_local_rank("pp")) % _TORCH_SEEDS
    _seed_all(mine)
    return mine


def checked_seed(seed: object) -> int:
    """The seed, if it is one. Local, pure."""
    number = as_integer(seed)
    if number is None or not 0 <= number < _TORCH_SEEDS:
        raise InvalidOptionError(
            f"seed={seed!r} is not a number in 0..2**64-1. Nothing was seeded. Correct the seed."
        )
    return number


def _seed_all(seed: int) -> None:
    import torch

    random.seed(seed)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)
