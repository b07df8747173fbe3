"""A program for torchrun whose first start fails within its loop."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import reloadpg

reloadpg.install(backends={"gloo"}, recoverable=True)
dist.init_process_group("gloo")
rejoined = reloadpg.recovery.rejoin().changed
rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps = []
for step in reloadpg.recovery.retrying(range(3)):
    with step as number:
        steps.append(number)
        if (start, rank, number) == (0, 1, 1):
            os._exit(1)
        dist.all_reduce(torch.ones(1))
reloadpg.offload()
reloadpg.reload()
value = torch.ones(1)
dist.all_reduce(value)
dist.destroy_process_group()
print(f"start {start} rank {rank} rejoined {rejoined} steps {steps} sum {value.item()}", flush=True)
