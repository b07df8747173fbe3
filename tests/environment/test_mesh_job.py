"""A pp x dp_shard x tp mesh on 8 ranks, with FSDP2 and tensor parallelism, through reloads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.slow

TIMEOUT_S = 1234
CYCLES = 3
SIZES = {"pp": 2, "dp_shard": 2, "tp": 2}


def timeouts(mesh: Any) -> set[timedelta]:
    groups = [dist.group.WORLD, *(mesh.get_group(name) for name in mesh.mesh_dim_names)]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def expected_sums(rank: int) -> dict[str, float]:
    """Sum of the ranks along each dimension, from the layout: rank = 4 pp + 2 dp + tp."""
    strides = {"pp": 4, "dp_shard": 2, "tp": 1}
    found = {}
    for name, stride in strides.items():
        first = rank - (rank // stride % 2) * stride
        found[name] = float(first + first + stride)
    return found


def parallel(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def job(rank: int, world_size: int, reloads: bool) -> list[float]:
    """Check the mesh in each generation; return the losses of plain SGD, a step in each."""
    with (
        reloadpg.install(backends={"gloo"}),
        reloadpg.init_distributed(
            timeout=TIMEOUT_S, init_timeout=60, mesh_dims={"tp": 2, "pp": 2, "dp_shard": -1}, seed=3
        ) as context,
    ):
        mesh, losses = context.mesh, []
        assert mesh is not None
        assert torch.initial_seed() == 3 + rank // 4
        assert list(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) == list(SIZES.items())
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
        model = parallel(mesh)
        data = torch.linspace(-1, 1, 64).reshape(2, 4, 8)[mesh["dp_shard"].get_local_rank()]
        for cycle in range(CYCLES + 1):
            if cycle and reloads:
                reloadpg.offload()
                reloadpg.reload()
            assert timeouts(mesh) == {timedelta(seconds=TIMEOUT_S)}
            assert all(mesh.get_group(name) is group for name, group in groups.items())
            assert {group.generation for group in groups.values()} == {cycle if reloads else 0}
            sums = {}
            for name, group in groups.items():
                value = torch.tensor([float(rank)])
                dist.all_reduce(value, group=group)
                sums[name] = value.item()
            assert sums == expected_sums(rank)
            model.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            losses.append(loss.item())
    assert not dist.is_initialized()
    return losses


def test_a_mesh_with_fsdp2_and_tensor_parallel_modules_works_through_three_reloads() -> None:
    """Sizes, seeds, sums, timeouts and objects hold in each generation; losses are bit-equal."""
    unreloaded, reloaded = (run_ranks(job, 8, args=(one,), timeout=280) for one in (False, True))
    assert reloaded == unreloaded
    assert len(set(reloaded[0])) == CYCLES + 1


def flat(rank: int, world_size: int) -> tuple[bool, Any]:
    with reloadpg.init_distributed(init_timeout=30, mesh_dims={"dp_shard": -1}) as context:
        assert context.mesh is not None
        return context.mesh.get_group("dp_shard") is dist.group.WORLD, context.mesh.mesh.tolist()


def test_a_dimension_as_large_as_the_world_uses_world() -> None:
    """There is no second communicator over the same ranks."""
    assert run_ranks(flat, 2, timeout=240) == [(True, [0, 1])] * 2
