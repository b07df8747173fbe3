"""The mesh: rules for its dimensions, its groups, and seeds that follow its coordinates.

``init_device_mesh`` creates its groups with torch's default timeout (30 minutes for gloo, 10 for
NCCL), whatever the timeout of WORLD. So the groups are created here and passed to
``DeviceMesh.from_group``. The rules do not import torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from ..errors import InvalidOptionError
from ..settings import as_integer
from ..texts import did_you_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh order, outermost first: neighbouring ranks share the innermost dimension."""

_NUMPY_SEEDS = 1 << 32
_TORCH_SEEDS = 1 << 64


def resolve_mesh_dims(dims: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Sizes of the mesh dimensions, in mesh order, for a world of ``world_size`` ranks.

    Local, pure. One size may be -1: it is inferred from the others.

    The names of :data:`MESH_ORDER` have rules: they are put in that order; those of size 1 are
    dropped, except ``dp_shard`` with ``tp`` or ``ep``, where FSDP needs a mesh to wrap over; if
    none is left, the mesh is ``dp_shard`` over the world. Any other name is the caller's: it keeps
    its place and stays at size 1, as in ``init_device_mesh``, and no dimension is added to it.

    Args:
        dims: size by name, outermost first.
        world_size: number of ranks.

    Raises:
        InvalidOptionError: not a mapping, a misspelt name, a size that is not a positive number or
            -1, more than one -1, a world size that is not divisible, or a product that differs from
            the world size. Also a ValueError.
    """
    if not isinstance(dims, Mapping):
        raise InvalidOptionError(
            f"mesh_dims={dims!r} is not a mapping of names to sizes. No group was created. Pass "
            f"for example {{'dp_shard': -1, 'tp': 2}}."
        )
    own = [name for name in dims if name not in MESH_ORDER]
    for name in own:
        if not isinstance(name, str) or not name:
            raise _no_mesh(f"{name!r} is not a name of a dimension", dims)
        if name.startswith("dp_") and (similar := did_you_mean(name, MESH_ORDER)):
            raise _no_mesh(f"Unknown mesh dimension {name!r}{similar}; known: {MESH_ORDER}", dims)
    given = {name: as_integer(size) for name, size in dims.items()}
    for name, size in given.items():
        if size is None or size == 0 or size < -1:
            raise _no_mesh(f"{name}={dims[name]!r} is neither a positive number nor -1", dims)
    world = as_integer(world_size)
    if world is None or world < 1:
        raise _no_mesh(f"world_size={world_size!r} is not a positive number", dims)
    ordered = iter([name for name in MESH_ORDER if name in given])
    order = [name if name in own else next(ordered) for name in given]
    sizes: dict[str, int] = {name: given[name] or 1 for name in order}
    inferred = [name for name in given if sizes[name] == -1]
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
    elif product != world and (own or product != 1):
        raise _no_mesh(f"The product of the sizes is {product}, but world_size={world}", dims)
    elif product == 1 and not own:
        return {"dp_shard": world}
    parallel = {name for name, size in sizes.items() if size > 1}
    if parallel & {"tp", "ep"} and (not own or "dp_shard" in sizes):
        parallel.add("dp_shard")
        sizes = {name: sizes.get(name, 1) for name in ([*sizes] if own else MESH_ORDER)}
    resolved = {name: size for name, size in sizes.items() if name in parallel or name in own}
    return resolved or {"dp_shard": world}


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


def set_seed(
    seed: int, mesh: DeviceMesh | None = None, distinct_dims: Sequence[str] = ("pp",)
) -> int:
    """Seed Python, NumPy's legacy generator (if installed), torch's CPU and all its devices.

    Local, non-blocking, idempotent; not thread-safe, since the generators belong to the process.
    Ranks that differ in a distinct dimension get different seeds; all others get equal seeds.
    Devices that torch has not initialized are seeded when they are.

    Args:
        seed: from 0 to 2**64 - 1, equal on all ranks. NumPy gets it modulo 2**32.
        mesh: the mesh of the job, with named dimensions; with None all ranks get ``seed``.
        distinct_dims: names of the dimensions along which seeds differ. A dimension that the mesh
            has dropped (size 1) is allowed; without a mesh, any name is.

    Returns:
        The seed of this rank.

    Raises:
        InvalidOptionError: the seed is out of range, a dimension is not a name or unknown, or this
            rank is not in the mesh; nothing was seeded. Also a ValueError.
    """
    if isinstance(distinct_dims, str):
        raise _no_seed(f"distinct_dims={distinct_dims!r} is one name; pass a sequence of names")
    if mesh is None:  # the names are unknown; they need not be those of bring-up
        mine = seed_for(seed, {}, {}, ())
    else:
        names = mesh.mesh_dim_names
        coordinate = mesh.get_coordinate()
        if names is None or coordinate is None:
            reason = "has no dimension names" if names is None else "does not contain this rank"
            raise _no_seed(f"The mesh {reason}")
        sizes = dict(zip(names, mesh.shape, strict=True))
        mine = seed_for(seed, sizes, dict(zip(names, coordinate, strict=True)), distinct_dims)
    _seed_all(mine)
    return mine


def seed_for(
    seed: int,
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    distinct_dims: Sequence[str],
) -> int:
    """The seed of the rank at ``coordinate``. Local, pure.

    The coordinates along the distinct dimensions are the digits of one number, which is added to
    ``seed``. So no two seeds collide, as they do with ``seed + 100 * pp + tp`` from tp=100 on.
    """
    number = as_integer(seed)
    if number is None or not 0 <= number < _TORCH_SEEDS:
        raise _no_seed(f"seed={seed!r} is not a number in 0..2**64-1")
    unknown = [name for name in distinct_dims if name not in sizes and name not in MESH_ORDER]
    if unknown:
        raise _no_seed(f"distinct_dims names {unknown[0]!r}; the mesh has {tuple(sizes)}")
    offset = 0
    for name in sizes:
        if name in distinct_dims:
            offset = offset * sizes[name] + coordinate[name]
    return (number + offset) % _TORCH_SEEDS


def _seed_all(seed: int) -> None:
    import torch

    random.seed(seed)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


def _no_seed(what: str) -> InvalidOptionError:
    return InvalidOptionError(f"{what}. Nothing was seeded. Correct the argument.")
