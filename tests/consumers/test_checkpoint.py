"""``torch.distributed.checkpoint``: save, load and async save around and during an offload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consumer_run import Consumer, ConsumerTests, Run, Setting, scratch
from helpers import worlds
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def checkpoint_program(run: Run) -> dict[str, Any]:
    """Train, save, go through a cycle, load into another model, compare; three times."""
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    ranks = list(range(run.world_size))
    own, background = (dist.new_group(ranks, backend=run.backend) for _ in range(2))
    model, other = (fully_shard(nn.Linear(8, 4), mesh=mesh) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = {"world": None, "own": own}
    results: list[Any] = []

    def full(module: nn.Module) -> dict[str, torch.Tensor]:
        return {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in module.state_dict().items()
        }

    with scratch(run) as root:
        for step in range(3):
            x = torch.randn(6, 8, generator=worlds.generator(10 * step + run.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": get_model_state_dict(model), "step": torch.tensor(step)}
            at = root / str(step)
            for kind, group in groups.items():
                dcp.save(state, checkpoint_id=at / kind, process_group=group)
            pending = dcp.async_save(state, checkpoint_id=at / "async", process_group=background)
            pending.result()
            run.cycle()
            for kind in (*groups, "async"):
                loaded = {"model": get_model_state_dict(other), "step": torch.tensor(-1)}
                group = groups.get(kind, own)
                dcp.load(loaded, checkpoint_id=at / kind, process_group=group)
                set_model_state_dict(other, loaded["model"])
                results.append({kind: (loaded["step"], full(other))})
            results.append({"trained": (torch.tensor(step), full(model))})
    return {"results": results}


@worlds.unbound_only
class TestCheckpoint(ConsumerTests):
    # An asynchronous save needs a backend for the CPU, whose connections an offload leaves alone.
    plain = Setting(backend=worlds.WITH_CPU)
    reloaded = replace(plain, reloadable=True, backends=frozenset({worlds.BACKEND}))
    consumer = Consumer(checkpoint_program, 2, plain, reloaded, groups=3)
