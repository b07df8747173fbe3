"""FSDP2 (``fully_shard``), its state dicts gathered and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from consumer_run import Run, same_results
from helpers import worlds
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 24), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(10, 4))


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    generator = worlds.generator(1000 * step + run.rank)
    x = torch.randn(5, 10, generator=generator)
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def whole(value: Any) -> Any:
    """The full tensor of a DTensor: an all-gather on the mesh's groups."""
    return value.full_tensor() if isinstance(value, DTensor) else value


# With ``cpu_offload`` too, rank 0 alone would get it.
GATHER = StateDictOptions(full_state_dict=True)


def fsdp2_program(run: Run) -> dict[str, Any]:
    """Shard on a 1-D mesh and, with four ranks, on a 2-D mesh (replicate, shard)."""
    meshes = {"shard": init_device_mesh(run.device.type, (run.world_size,))}
    if run.world_size == 4:
        meshes["hybrid"] = init_device_mesh(
            run.device.type, (2, 2), mesh_dim_names=("replicate", "shard")
        )
    models, optimizers, results = {}, {}, {}
    for name, mesh in meshes.items():
        model = blocks()
        for layer in model[:2]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=name == "shard")
        fully_shard(model, mesh=mesh)
        models[name], optimizers[name] = model, torch.optim.AdamW(model.parameters(), lr=0.01)
        results[name] = {"losses": [], "gathered": []}
    for step in range(8):
        for name, model in models.items():
            if name == "hybrid" and step in (2, 3):  # accumulate across a cycle
                model.set_requires_gradient_sync(step == 3)
            results[name]["losses"].append(train(run, model, optimizers[name], step))
        if step in (2, 4, 6):
            run.cycle()
            for name, model in models.items():
                state, _ = get_state_dict(model, optimizers[name], options=GATHER)
                results[name]["gathered"].append(state)
    for name, model in models.items():
        _, state = get_state_dict(model, optimizers[name], options=GATHER)
        results[name]["optimizer"] = state["state"]
        sharded = get_state_dict(model, optimizers[name])
        set_state_dict(
            model, optimizers[name], model_state_dict=sharded[0], optim_state_dict=sharded[1]
        )
        results[name]["parameters"] = {k: whole(v) for k, v in model.state_dict().items()}
    return results


@pytest.mark.matrix
def test_fsdp2() -> None:
    same_results(fsdp2_program, 4, groups=3)
