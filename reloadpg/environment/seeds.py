"""Seeds: equal where ranks must draw alike, distinct where they must not."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from reloadpg.environment.mesh import MESH_ORDER
from reloadpg.errors import InvalidOptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["seed_for", "set_seed"]

_NUMPY_SEEDS = 1 << 32
_TORCH_SEEDS = 1 << 64


def set_seed(
    seed: int, mesh: DeviceMesh | None = None, distinct_dims: Sequence[str] = ("pp",)
) -> int:
    """Seed Python, NumPy's legacy generator (if installed), torch's CPU and all its devices.

    Local, non-blocking, idempotent; not thread-safe, as the generators are the process's. Ranks
    that differ only in other dimensions of the mesh get equal seeds (data-parallel replicas
    initialise alike), ranks that differ in a distinct dimension get different ones. Devices that
    torch has not initialised yet are seeded when they are.

    Args:
        seed: from 0 to 2**64 - 1, equal on all ranks. NumPy gets it modulo 2**32.
        mesh: the mesh of the job, with named dimensions; None gives all ranks ``seed`` itself.
        distinct_dims: names of the dimensions along which seeds differ. One that the mesh has
            dropped, being of size 1, is fine; without a mesh, any name is.

    Returns:
        The seed of this rank.

    Raises:
        InvalidOptionError: the seed is out of range, a dimension is no name or unknown, or this
            rank is not in the mesh; nothing was seeded. Also a ValueError.
    """
    distinct = _names(distinct_dims)
    if mesh is None:  # its names, which need not be those of bring-up, are not known then
        mine = seed_for(seed, {}, {}, ())
    else:
        names = mesh.mesh_dim_names
        coordinate = mesh.get_coordinate()
        if names is None or coordinate is None:
            reason = "has no dimension names" if names is None else "does not contain this rank"
            raise _error(f"The mesh {reason}")
        sizes = dict(zip(names, mesh.shape, strict=True))
        mine = seed_for(seed, sizes, dict(zip(names, coordinate, strict=True)), distinct)
    _seed_all(mine)
    return mine


def seed_for(
    seed: int,
    sizes: Mapping[str, int],
    coordinate: Mapping[str, int],
    distinct_dims: Sequence[str],
) -> int:
    """The seed of the rank at ``coordinate``. Local, pure.

    The coordinates along the distinct dimensions are read as the digits of one number, which is
    added to ``seed``: no two of them can collide, as ``seed + 100 * pp + tp`` did from tp=100 on.

    Raises:
        InvalidOptionError: the seed is out of range or a dimension is unknown.
    """
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)  # NumPy's integers too
    except TypeError:
        number = -1
    if not 0 <= number < _TORCH_SEEDS:
        raise _error(f"seed={seed!r} is not a number in 0..2**64-1")
    unknown = [name for name in distinct_dims if name not in sizes and name not in MESH_ORDER]
    if unknown:
        raise _error(f"distinct_dims names {unknown[0]!r}; the mesh has {tuple(sizes)}")
    offset = 0
    for name in sizes:
        if name in distinct_dims:
            offset = offset * sizes[name] + coordinate[name]
    return (number + offset) % _TORCH_SEEDS


def _names(distinct_dims: Sequence[str]) -> tuple[str, ...]:
    if isinstance(distinct_dims, str):
        raise _error(f"distinct_dims={distinct_dims!r} is one name; give a sequence of names")
    names = tuple(distinct_dims) if isinstance(distinct_dims, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise _error(f"distinct_dims={distinct_dims!r} is not a sequence of names")
    return names  # type: ignore[return-value]


def _seed_all(seed: int) -> None:
    import torch

    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


def _error(what: str) -> InvalidOptionError:
    return InvalidOptionError(f"{what}. Nothing was seeded. Correct the argument.")
