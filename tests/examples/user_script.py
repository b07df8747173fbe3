"""A plain torchrun script before reloadpg; ``test_new_user`` replaces the words in capitals."""

from __future__ import annotations

import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# IMPORT


def generate(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 4, generator=generator)


def main() -> None:
    # INSTALL
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with nullcontext():  # OFFLOAD
            rollouts = generate(step)
        loss = (model(rollouts) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    del model  # DDP's reducer must not be the last to hold a gloo group: its end can hang (torch)
    print(json.dumps({"rank": dist.get_rank(), "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
