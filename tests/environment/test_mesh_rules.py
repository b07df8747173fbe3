"""Mesh dimensions: the table of rules and of every error."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from reloadpg.environment import resolve_mesh_dims
from reloadpg.environment.mesh import MESH_ORDER
from reloadpg.errors import InvalidOptionError

GOOD = [
    ({}, 1, {"dp_shard": 1}),
    ({}, 8, {"dp_shard": 8}),
    ({"dp_shard": -1}, 1, {"dp_shard": 1}),
    ({"tp": 2, "dp_shard": -1, "pp": 2}, 8, {"pp": 2, "dp_shard": 2, "tp": 2}),
    ({"tp": 4}, 4, {"dp_shard": 1, "tp": 4}),
    ({"ep": 4}, 4, {"dp_shard": 1, "ep": 4}),
    ({"cp": 4}, 4, {"cp": 4}),
    ({"dp_replicate": -1, "tp": 2}, 8, {"dp_replicate": 4, "dp_shard": 1, "tp": 2}),
    ({"pp": -1}, 8, {"pp": 8}),
    (
        {"tp": 2, "ep": 2, "cp": 2, "dp_shard": 2, "dp_replicate": 2, "pp": 2},
        64,
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2, "tp": 2},
    ),
    # With another name, the dimensions are those that were given.
    ({"tp": 1, "dp": 2, "dp_shard": 2}, 4, {"tp": 1, "dp": 2, "dp_shard": 2}),
    ({"replicate": 2, "shard": -1}, 8, {"replicate": 2, "shard": 4}),
]

BAD = [
    ({"dp_shard": -1, "pp": -1}, 8, ["dp_shard and pp are -1"]),
    ({"pp": 4, "tp": 4}, 8, ["product of the sizes is 16", "world_size=8"]),
    ({"tp": 16, "dp_shard": -1}, 8, ["world_size=8", "16"]),
    ({"tp": -2}, 8, ["tp=-2"]),
    ({"tp": 2.0}, 8, ["tp=2.0"]),
    ({"tp": True}, 8, ["tp=True"]),
    ({"dp": 2, "tp": 2}, 8, ["product of the sizes is 4", "world_size=8"]),
    ({"dp": 1}, 8, ["product of the sizes is 1"]),
    ({}, 0, ["world_size=0"]),
    ([2], 8, ["mesh_dims=[2] is not a mapping"]),
]


@pytest.mark.parametrize(("dims", "world_size", "expected"), GOOD)
def test_dimensions_are_resolved_in_mesh_order(
    dims: dict[str, int], world_size: int, expected: dict[str, int]
) -> None:
    """Order, inference, dropped dimensions of size 1, and the two exceptions."""
    before = dict(dims)
    assert list(resolve_mesh_dims(dims, world_size).items()) == list(expected.items())
    assert dims == before


@pytest.mark.parametrize(("dims", "world_size", "parts"), BAD)
def test_dimensions_that_do_not_fit_the_world_are_refused_with_the_numbers(
    dims: Any, world_size: int, parts: list[str]
) -> None:
    """Every error is a ValueError and names dimension and numbers."""
    with pytest.raises(InvalidOptionError) as caught:
        resolve_mesh_dims(dims, world_size)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


def test_every_mesh_of_up_to_64_ranks_follows_the_rules() -> None:
    """For all factorisations: product, order, dropped sizes, and inference of -1."""
    checked = 0
    for world_size in (1, 2, 6, 8, 12, 64):
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        for sizes in itertools.product(divisors, repeat=4):
            if math.prod(sizes) != world_size:
                continue
            dims = dict(zip(("pp", "dp_replicate", "dp_shard", "tp"), sizes, strict=True))
            resolved = resolve_mesh_dims(dims, world_size)
            checked += 1
            assert math.prod(resolved.values()) == world_size
            assert sorted(resolved, key=MESH_ORDER.index) == list(resolved)
            assert resolve_mesh_dims(resolved, world_size) == resolved
            kept = {name for name, size in resolved.items() if size == 1}
            assert kept <= {"dp_shard"}
            assert ("dp_shard" in kept) == ((sizes[2] == 1 and sizes[3] > 1) or world_size == 1)
            for name in dims:
                assert resolve_mesh_dims({**dims, name: -1}, world_size) == resolved
    assert checked > 150
