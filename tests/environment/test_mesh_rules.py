"""Mesh dimensions: the table of rules and of every error."""

from __future__ import annotations

from typing import Any

import pytest

from reloadpg.environment import resolve_mesh_dims
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
    ({"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1}, 2, {"dp_replicate": 2}),
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
