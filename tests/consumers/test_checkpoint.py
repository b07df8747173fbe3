"""``torch.distributed.checkpoint``: save, load and async save around and during an offload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worlds
from consumer_run import Run, Setting, scratch
from consumer_tests import Consumer, ConsumerTests
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def checkpoint_program(run: Run) -> dict[str, Any]:
    """Train, save, go through a cycle, load into another model, compare; three times."""
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    own = dist.new_group(list(range(run.world_size)), backend=run.backend)
    model, other = (fully_shard(nn.Linear(8, 4), mesh=mesh) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
            dcp.save(state, checkpoint_id=root / f"world{step}")
            dcp.save(state, checkpoint_id=root / f"group{step}", process_group=own)
            pending = dcp.async_save(state, checkpoint_id=root / f"async{step}", process_group=own)
            pending.result()
            run.cycle()
            for kind in ("world", "group", "async"):
                loaded = {"model": get_model_state_dict(other), "step": torch.tensor(-1)}
                dcp.load(
                    loaded,
                    checkpoint_id=root / f"{kind}{step}",
                    process_group=None if kind == "world" else own,
                )
                set_model_state_dict(other, loaded["model"])
                results.append({"kind": kind, "step": loaded["step"], "loaded": full(other)})
            results.append({"kind": "trained", "step": torch.tensor(step), "loaded": full(model)})
    return {"results": results}


@worlds.unbound_only
class TestCheckpoint(ConsumerTests):
    # An asynchronous save needs a backend for the CPU, whose connections an offload leaves alone.
    plain = Setting(backend=worlds.WITH_CPU)
    reloaded = replace(plain, reloadable=True, backends=frozenset({worlds.BACKEND}))
    kept = 2 * 2 if worlds.NCCL else 0
    consumer = Consumer(checkpoint_program, 2, plain, reloaded, groups=2, kept_sockets=kept)
