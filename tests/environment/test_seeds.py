"""Seeds: equal where ranks must draw the same numbers, distinct elsewhere; for every mesh."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass

import numpy
import pytest
import torch

from reloadpg.environment import set_seed
from reloadpg.environment.mesh import MESH_ORDER, seed_for
from reloadpg.errors import InvalidOptionError


@dataclass
class Mesh:
    """What ``set_seed`` asks a DeviceMesh, at any coordinate, without ranks."""

    sizes: dict[str, int]
    coordinate: tuple[int, ...] | None

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


def meshes_up_to(ranks: int) -> list[dict[str, int]]:
    found = []
    for sizes in itertools.product(range(1, ranks + 1), repeat=4):
        if math.prod(sizes) <= ranks:
            found.append(dict(zip(("pp", "dp_shard", "cp", "tp"), sizes, strict=True)))
    return found


@pytest.mark.parametrize(
    ("distinct", "ranks"),
    [
        (("pp", "tp"), 24),
        ((), 8),
        pytest.param(("dp_shard", "pp"), 64, marks=pytest.mark.slow),
    ],
)
def test_seeds_differ_exactly_across_the_distinct_dimensions(
    distinct: tuple[str, ...], ranks: int
) -> None:
    """For every rank of every mesh of four dimensions with at most this many ranks."""
    meshes = meshes_up_to(ranks)
    assert len(meshes) > 5 * ranks
    for sizes in meshes:
        by_place: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for coordinate in itertools.product(*(range(size) for size in sizes.values())):
            at = dict(zip(sizes, coordinate, strict=True))
            by_place[tuple(at[name] for name in sorted(distinct))].add(
                seed_for(1234, sizes, at, distinct)
            )
        assert all(len(seeds) == 1 for seeds in by_place.values()), sizes
        assert len(set.union(*by_place.values())) == len(by_place), sizes


def test_seeds_of_neighbouring_stages_differ_modulo_2_32_and_beyond_2_64() -> None:
    """NumPy takes seeds of 32 bits."""
    sizes = {"pp": 64}
    for seed in (2**32 - 1, 2**64 - 1):
        seeds = [seed_for(seed, sizes, {"pp": pp}, ("pp",)) for pp in range(64)]
        assert len({value % 2**32 for value in seeds}) == 64
        assert all(0 <= value < 2**64 for value in seeds)


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_python_numpy_and_torch_are_seeded() -> None:
    """Each generator repeats after the same seed and differs after another one."""
    assert set_seed(7) == 7
    first = draws()
    assert set_seed(numpy.int64(7)) == 7  # type: ignore[arg-type]
    assert draws() == first
    set_seed(8)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_the_seed_depends_on_the_stage_and_not_on_an_absent_dimension() -> None:
    """A mesh without pp works with the default."""
    assert set_seed(7, Mesh({"pp": 2, "dp_shard": 2}, (0, 1))) == 7  # type: ignore[arg-type]
    stage_0 = draws()
    assert set_seed(7, Mesh({"pp": 2, "dp_shard": 2}, (1, 1))) == 8  # type: ignore[arg-type]
    assert draws() != stage_0
    assert set_seed(7, Mesh({"dp_shard": 4}, (3,))) == 7  # type: ignore[arg-type]
    assert draws() == stage_0


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True, None])
def test_a_bad_seed_is_refused_and_seeds_nothing(seed: object) -> None:
    """The generators continue unchanged."""
    set_seed(7)
    expected = draws()
    set_seed(7)
    with pytest.raises(InvalidOptionError, match="seed="):
        set_seed(seed)  # type: ignore[arg-type]
    assert draws() == expected


def test_without_a_mesh_any_dimension_name_is_accepted() -> None:
    """A script with its own dimension names also runs without a mesh."""
    assert set_seed(5, None, ("stage",)) == set_seed(5, None, ()) == 5
    assert set_seed(5, Mesh({"stage": 2}, (1,)), ("stage",)) == 6  # type: ignore[arg-type]


def test_an_unknown_dimension_or_a_rank_outside_the_mesh_is_refused() -> None:
    """A misspelt dimension would silently give equal seeds."""
    assert "pipeline" not in MESH_ORDER
    with pytest.raises(InvalidOptionError, match="pipeline"):
        set_seed(7, Mesh({"pp": 2}, (0,)), ("pipeline",))  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="one name"):
        set_seed(7, Mesh({"pp": 2}, (0,)), "pp")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="does not contain this rank"):
        set_seed(7, Mesh({"pp": 2}, None))  # type: ignore[arg-type]
