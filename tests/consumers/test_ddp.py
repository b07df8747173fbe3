"""DistributedDataParallel: its reducer and its hooks keep the group object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from consumer_run import Consumer, ConsumerTests, Run
from helpers import worlds
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class Branches(nn.Module):
    """Two branches, of which a step uses one; a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.left, self.right = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        return (self.left if left else self.right)(self.stem(x))


def deep() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 3))


def batch(run: Run, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = worlds.generator(1000 * step + run.rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def ddp_program(run: Run) -> dict[str, Any]:
    """Six models in one process, on WORLD and on a subgroup, trained through the same cycles."""
    torch.manual_seed(run.rank)  # DDP must broadcast rank 0's parameters
    group = dist.new_group(list(range(run.world_size)), backend=run.backend)
    models: dict[str, DistributedDataParallel] = {
        "buckets": DistributedDataParallel(deep(), bucket_cap_mb=0.001),
        "subgroup": DistributedDataParallel(
            deep(), process_group=group, gradient_as_bucket_view=True
        ),
        "no_sync": DistributedDataParallel(deep(), process_group=group, bucket_cap_mb=0.001),
        "unused": DistributedDataParallel(Branches(), find_unused_parameters=True),
        "static": DistributedDataParallel(deep(), static_graph=True, bucket_cap_mb=0.001),
        "hook": DistributedDataParallel(deep(), bucket_cap_mb=0.001),
    }
    models["hook"].register_comm_hook(group, allreduce_hook)
    optimizers = {n: torch.optim.Adam(m.parameters(), lr=0.01) for n, m in models.items()}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in models}

    def step(number: int) -> None:
        for name, model in models.items():
            if name == "no_sync":
                continue
            x, y = batch(run, number)
            out = model(x, number % 2 == 0) if name == "unused" else model(x)
            loss = (out - y).square().mean()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].append(loss)

    def accumulate(number: int) -> None:
        x, y = batch(run, number)
        loss = (models["no_sync"](x) - y).square().mean()
        loss.backward()
        losses["no_sync"].append(loss)

    for number in range(8):
        with models["no_sync"].no_sync():
            accumulate(2 * number)
        if number in (1, 3, 5):
            run.cycle()  # gradients accumulated before it are reduced after it
        accumulate(2 * number + 1)
        optimizers["no_sync"].step()
        optimizers["no_sync"].zero_grad()
        step(number)
    return {
        name: {"losses": losses[name], "state": dict(model.module.state_dict())}
        for name, model in models.items()
    }


@pytest.mark.matrix
class TestDDP(ConsumerTests):
    consumer = Consumer(ddp_program, 3, groups=2)
