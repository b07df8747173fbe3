"""Schedules of ``torch.distributed.pipelining``: point-to-point between stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from consumer_run import Consumer, ConsumerTests, Run
from helpers import worlds
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

WIDTH, MICROBATCHES = 6, 4


def chunk(index: int) -> nn.Module:
    torch.manual_seed(100 + index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def loss_function(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def pipelining_program(run: Run) -> dict[str, Any]:
    """GPipe on WORLD, 1F1B on a subgroup, interleaved 1F1B with two stages a rank."""
    size, rank = run.world_size, run.rank
    group = dist.new_group(list(range(size)))
    modules: dict[str, list[nn.Module]] = {
        "gpipe": [chunk(rank)],
        "1f1b": [chunk(rank)],
        "interleaved": [chunk(rank), chunk(rank + size)],
    }
    groups = {"gpipe": None, "1f1b": group, "interleaved": group}
    stages = {
        name: [
            PipelineStage(
                part, rank + index * size, size * len(parts), run.device, group=groups[name]
            )
            for index, part in enumerate(parts)
        ]
        for name, parts in modules.items()
    }
    schedules: dict[str, Any] = {
        "gpipe": ScheduleGPipe(stages["gpipe"][0], MICROBATCHES, loss_fn=loss_function),
        "1f1b": Schedule1F1B(stages["1f1b"][0], MICROBATCHES, loss_fn=loss_function),
        "interleaved": ScheduleInterleaved1F1B(
            stages["interleaved"], MICROBATCHES, loss_fn=loss_function
        ),
    }
    parameters = {n: [p for m in ms for p in m.parameters()] for n, ms in modules.items()}
    optimizers = {name: torch.optim.SGD(ps, lr=0.2) for name, ps in parameters.items()}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in schedules}
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in schedules}
    for step in range(5):
        generator = worlds.generator(step)
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
        y = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
        for name, schedule in schedules.items():
            seen: list[torch.Tensor] = []
            inputs = (x,) if rank == 0 else ()
            last = {"target": y, "losses": seen} if rank == size - 1 else {}
            out = schedule.step(*inputs, **last)
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].extend(seen)
            if out is not None:
                outputs[name].append(out)
        if step in (0, 1, 3):
            run.cycle()
    return {"losses": losses, "outputs": outputs, "parameters": parameters}


@pytest.mark.slow
class TestPipelining(ConsumerTests):
    consumer = Consumer(pipelining_program, 3, groups=2)
