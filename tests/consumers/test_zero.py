"""ZeroRedundancyOptimizer: parameters broadcast by their owners, state consolidated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from consumer_run import Consumer, ConsumerTests, Run
from helpers import worlds
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def zero_program(run: Run) -> dict[str, Any]:
    """Optimizer state sharded over WORLD, and over a subgroup with parameters as bucket views."""
    group = dist.new_group(list(range(run.world_size)), backend=run.backend)
    results: dict[str, Any] = {"losses": [], "consolidated": []}
    pairs = []
    for process_group, views in ((None, False), (group, True)):
        layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)]
        model = DistributedDataParallel(nn.Sequential(*layers), process_group=process_group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.Adam,
            process_group=process_group,
            parameters_as_bucket_view=views,
            lr=0.01,
        )
        pairs.append((model, optimizer))
    for step in range(7):
        x = torch.randn(5, 6, generator=worlds.generator(10 * step + run.rank))
        for model, optimizer in pairs:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results["losses"].append(loss)
        if step in (1, 3, 5):
            run.cycle()
            for _, optimizer in pairs:
                optimizer.consolidate_state_dict(to=0)
                if run.rank == 0:
                    results["consolidated"].append(optimizer.state_dict()["state"])
    results["parameters"] = [list(model.module.parameters()) for model, _ in pairs]
    return results


@pytest.mark.slow
class TestZeroRedundancyOptimizer(ConsumerTests):
    consumer = Consumer(zero_program, 2, groups=2)
