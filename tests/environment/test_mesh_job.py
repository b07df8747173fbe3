"""A pp x dp_shard x tp mesh on 8 ranks through reloads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reloadpg

pytestmark = pytest.mark.slow

SIZES = {"pp": 2, "dp_shard": 2, "tp": 2}
STRIDES = {"pp": 4, "dp_shard": 2, "tp": 1}
"""The layout: rank = 4 pp + 2 dp + tp."""


@pytest.mark.ranks(8, timeout=150)
def test_a_mesh_works_through_three_reloads(rank: int) -> None:
    """Sizes, seeds, sums, timeouts and objects hold in each generation.

    Training with FSDP2 and tensor parallelism through reloads is in ``tests/consumers``.
    """
    dims = {"tp": 2, "pp": 2, "dp_shard": -1}
    reloadpg.install(backends={"gloo"})
    with reloadpg.environment.init_distributed(
        timeout=1234, init_timeout=60, mesh_dims=dims, seed=3
    ) as context:
        mesh: Any = context.mesh
        assert torch.initial_seed() == 3 + rank // 4
        assert list(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) == list(SIZES.items())
        groups = {name: mesh.get_group(name) for name in SIZES}
        for cycle in range(4):
            if cycle:
                reloadpg.offload()
                reloadpg.reload()
            for name, group in groups.items():
                assert mesh.get_group(name) is group
                assert group.generation == cycle
                options = group._get_backend(torch.device("cpu")).options
                assert options._timeout == timedelta(seconds=1234)
                value = torch.tensor([float(rank)])
                dist.all_reduce(value, group=group)
                first = rank - (rank // STRIDES[name] % 2) * STRIDES[name]
                assert value.item() == 2 * first + STRIDES[name]
    assert not dist.is_initialized()
