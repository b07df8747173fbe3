"""DTensor: operations on a mesh made before the cycles and on one made after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from consumer_run import Consumer, ConsumerTests, Run
from helpers import worlds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=worlds.generator(seed))


def operations(a: DTensor, b: DTensor) -> dict[str, Any]:
    """Placements changed in every direction, and operations that communicate."""
    mesh = a.device_mesh
    replicated = [Replicate()] * mesh.ndim
    rows, columns = [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim
    partial = DTensor.from_local(
        a.full_tensor() * (mesh.get_rank() + 1), mesh, [Partial()] * mesh.ndim
    )
    product = a.redistribute(placements=rows) @ b.redistribute(placements=replicated)
    inner = a.redistribute(placements=columns) @ b.redistribute(placements=rows)
    return {
        "replicate": a.redistribute(placements=replicated).to_local(),
        "transpose shards": a.redistribute(placements=columns).to_local(),
        "partial to shard": partial.redistribute(placements=rows).to_local(),
        "partial to replicate": partial.redistribute(placements=replicated).to_local(),
        "matmul": product.full_tensor(),
        "matmul to partial": inner.full_tensor(),
        "sum": a.sum().full_tensor(),
        "mean of rows": a.mean(dim=0).full_tensor(),
        "softmax": torch.softmax(a, dim=-1).full_tensor(),
        "max": a.max().full_tensor(),
        "local": a.to_local(),
    }


def made(mesh: DeviceMesh) -> tuple[DTensor, DTensor]:
    first = [Shard(0)] * mesh.ndim
    return (
        distribute_tensor(matrix(8, 12, 1), mesh, first),
        distribute_tensor(matrix(12, 8, 2), mesh, first),
    )


def dtensor_program(run: Run) -> dict[str, Any]:
    """Tensors on a 1-D and a 2-D mesh; equal meshes made again after each cycle."""
    device = run.device.type
    shapes: dict[str, tuple[int, ...]] = {"1d": (run.world_size,), "2d": (2, 2)}
    olds = {name: init_device_mesh(device, shape) for name, shape in shapes.items()}
    tensors = {name: made(mesh) for name, mesh in olds.items()}
    old: list[Any] = [{name: operations(*pair) for name, pair in tensors.items()}]
    again: list[Any] = []
    for _ in range(3):
        run.cycle()
        old.append({name: operations(*pair) for name, pair in tensors.items()})
        for name, shape in shapes.items():
            # DTensor caches by the layout of a mesh: this one is served by entries of the old.
            mesh = init_device_mesh(device, shape)
            new = made(mesh)
            a, b = tensors[name]
            again.append(
                {
                    "mesh": name,
                    "equal": mesh == olds[name],
                    "new": operations(*new),
                    "old and new": (a @ new[1]).full_tensor(),
                    "new and old": (new[0] @ b).full_tensor(),
                    "old plus new": (a + new[0]).full_tensor(),
                }
            )
    return {"old": old, "again": again}


@pytest.mark.slow
class TestDTensor(ConsumerTests):
    consumer = Consumer(dtensor_program, 4, groups=3)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel_program(run: Run) -> dict[str, Any]:
    """A column- and row-parallel feed-forward, plain and with sequence parallelism, trained."""
    mesh = init_device_mesh(run.device.type, (run.world_size,), mesh_dim_names=("tp",))
    plans: dict[str, dict[str, Any]] = {
        "tensor": {"up": ColwiseParallel(), "down": RowwiseParallel()},
        "sequence": {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    }
    models = {name: parallelize_module(FeedForward(), mesh, plan) for name, plan in plans.items()}
    models["distributed"] = distribute_module(FeedForward(), mesh)
    # Not foreach, the default on a device: it refuses tensors and DTensors in one list.
    optimizers = {
        n: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for n, m in models.items()
    }
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for step in range(7):
        x = torch.randn(2, 4, 8, generator=worlds.generator(step))
        for name, model in models.items():
            if name == "sequence":
                out = model(x.chunk(run.world_size, dim=1)[run.rank].contiguous())
            elif name == "distributed":
                out = model(distribute_tensor(x, mesh, [Shard(0)]))
            else:
                out = model(x)
            out = out.full_tensor() if isinstance(out, DTensor) else out
            loss = out.square().mean()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].append(loss)
        if step in (1, 3, 5):
            run.cycle()
    return {
        name: {
            "losses": losses[name],
            "parameters": {
                key: value.full_tensor() if isinstance(value, DTensor) else value
                for key, value in model.state_dict().items()
            },
        }
        for name, model in models.items()
    }


@pytest.mark.slow
class TestTensorParallel(ConsumerTests):
    """``parallelize_module``; its mesh of two ranks is WORLD itself."""

    consumer = Consumer(tensor_parallel_program, 2)
