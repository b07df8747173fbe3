"""Mesh dimensions: from what the user names to what is built. No torch here: rules only."""

from __future__ import annotations

import math
from collections.abc import Mapping

from reloadpg.environment.errors import MeshDimensionError

__all__ = ["MESH_ORDER", "resolve_mesh_dims"]

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh order, outermost first: neighbouring ranks share the innermost dimension."""


def resolve_mesh_dims(dims: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Sizes of the mesh dimensions, in mesh order, for a world of ``world_size`` ranks.

    Local, pure. The order is :data:`MESH_ORDER` whatever the order of ``dims``; dimensions left
    out have size 1. One size may be -1: what the others leave. Dimensions of size 1 are dropped,
    except ``dp_shard`` beside ``tp`` or ``ep``, where FSDP needs a mesh to wrap over. If nothing
    is left, the mesh is flat: ``dp_shard`` over the world.

    Args:
        dims: size by name.
        world_size: number of ranks.

    Raises:
        MeshDimensionError: no mapping, unknown name, a size that is not a positive number or -1,
            more than one -1, a world that cannot be divided so, or a product that is not the world
            size. Also a ValueError.
    """
    if not isinstance(dims, Mapping):
        raise MeshDimensionError(
            f"mesh_dims={dims!r} is no mapping of names to sizes. No group was made. Give for "
            f"example {{'dp_shard': -1, 'tp': 2}}."
        )
    unknown = [name for name in dims if name not in MESH_ORDER]
    if unknown:
        raise _error(f"Unknown mesh dimension {unknown[0]!r}; known are {MESH_ORDER}", dims)
    for name, size in dims.items():
        if not _is_integer(size) or size == 0 or size < -1:
            raise _error(f"{name}={size!r} is neither a positive number nor -1", dims)
    if not _is_integer(world_size) or world_size < 1:
        raise _error(f"world_size={world_size!r} is not a positive number", dims)
    inferred = [name for name, size in dims.items() if size == -1]
    if len(inferred) > 1:
        raise _error(f"{' and '.join(inferred)} are -1; only one size can be inferred", dims)
    sizes = {name: dims.get(name, 1) for name in MESH_ORDER}
    known = math.prod(size for size in sizes.values() if size != -1)
    if inferred:
        if world_size % known:
            raise _error(
                f"{inferred[0]} cannot be inferred: world_size={world_size} is not divisible by "
                f"{known}, the product of the other sizes",
                dims,
            )
        sizes[inferred[0]] = world_size // known
    elif known == 1:
        return {"dp_shard": world_size}
    elif known != world_size:
        raise _error(f"The product of the sizes is {known}, but world_size={world_size}", dims)
    keep_shard = sizes["tp"] > 1 or sizes["ep"] > 1
    resolved = {
        name: size
        for name, size in sizes.items()
        if size > 1 or (name == "dp_shard" and keep_shard)
    }
    return resolved or {"dp_shard": world_size}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _error(what: str, dims: Mapping[str, int]) -> MeshDimensionError:
    return MeshDimensionError(
        f"{what} (asked for: {dict(dims)}). No group was made. Correct mesh_dims, or leave one "
        f"size at -1 to have it inferred."
    )
