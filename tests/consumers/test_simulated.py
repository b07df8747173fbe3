"""Consumers on the simulated accelerator, with ``install()`` as it is by default.

Its groups are reloadable and gloo's are not, as NCCL's and gloo's are in a real job. Its results
are gloo's, so they are compared with those of plain torch on gloo.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worlds
from consumer_run import SIM_PLAIN, SIM_RELOADED, Run, scratch
from consumer_tests import Consumer, ConsumerTests
from test_ddp import ddp_program
from test_fsdp import fsdp2_program
from test_megatron import LAYOUTS, megatron_program
from test_mesh import mesh_program
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@pytest.mark.slow
@pytest.mark.matrix
class TestDDP(ConsumerTests):
    consumer = Consumer(ddp_program, 3, reloaded=SIM_RELOADED, groups=2)


@pytest.mark.slow
class TestFSDP2(ConsumerTests):
    consumer = Consumer(fsdp2_program, 4, reloaded=SIM_RELOADED, groups=3)


@pytest.mark.slow
class TestDeviceMesh(ConsumerTests):
    consumer = Consumer(mesh_program, 4, reloaded=SIM_RELOADED, groups=5)


@pytest.mark.slow
class TestMegatron(ConsumerTests):
    consumer = Consumer(
        megatron_program, 4, reloaded=SIM_RELOADED, cycles=3 * len(LAYOUTS), groups=6
    )


def checkpoint_program(run: Run) -> dict[str, Any]:
    """Save through a gloo group while the accelerator's groups are offloaded."""
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    ranks = list(range(run.world_size))
    gloo, background = (dist.new_group(ranks, backend="gloo") for _ in range(2))
    model, other = (fully_shard(nn.Linear(8, 4), mesh=mesh) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Any] = []
    with scratch(run, gloo) as root:
        for step in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + run.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = get_model_state_dict(model)
            pending = dcp.async_save(
                state, checkpoint_id=root / f"async{step}", process_group=background
            )

            def inside(state=state, step=step, pending=pending) -> None:
                dcp.save(state, checkpoint_id=root / f"offloaded{step}", process_group=gloo)
                loaded = get_model_state_dict(other)
                dcp.load(loaded, checkpoint_id=root / f"offloaded{step}", process_group=gloo)
                pending.result()

            run.cycle(inside)
            for kind in ("offloaded", "async"):
                loaded = get_model_state_dict(other)
                dcp.load(loaded, checkpoint_id=root / f"{kind}{step}", process_group=gloo)
                results.append({key: whole(value) for key, value in loaded.items()})
            results.append({key: whole(value) for key, value in model.state_dict().items()})
    return {"results": results}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@worlds.unbound_only
class TestCheckpointWhileOffloaded(ConsumerTests):
    """Sharded state is saved, loaded and saved asynchronously while offloaded."""

    consumer = Consumer(checkpoint_program, 2, plain=SIM_PLAIN, reloaded=SIM_RELOADED)
