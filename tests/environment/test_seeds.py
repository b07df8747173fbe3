"""Seeds: equal where ranks must draw the same numbers, distinct for each pipeline stage."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.environment import set_seed
from reloadpg.errors import InvalidOptionError


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


@pytest.mark.ranks(4)
def test_seeds_differ_exactly_between_pipeline_stages(rank: int) -> None:
    """Also at the largest seed, and modulo 2**32, which NumPy takes. A mesh without pp has one."""
    dist.init_process_group("gloo")
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    for seed, others in ((7, 8), (2**32 - 1, 2**32), (2**64 - 1, 0)):
        mine = set_seed(seed, stages)
        assert mine == torch.initial_seed() == (seed if rank < 2 else others)
    everything = [None] * 4
    set_seed(2**32 - 1, stages)
    dist.all_gather_object(everything, draws())
    assert everything[0] == everything[1]
    assert everything[2] == everything[3]
    assert all(a != b for a, b in zip(everything[0], everything[2], strict=True))
    for mesh in (init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)), None):
        assert set_seed(7, mesh) == 7
    reloadpg.environment.destroy_distributed()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True, None])
def test_a_bad_seed_is_refused_and_seeds_nothing(seed: object) -> None:
    """The generators continue unchanged."""
    set_seed(7)
    expected = draws()
    set_seed(7)
    with pytest.raises(InvalidOptionError, match="seed="):
        set_seed(seed)  # type: ignore[arg-type]
    assert draws() == expected
