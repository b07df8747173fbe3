"""A training script that releases its groups itself: ``with_reloadpg.py DIRECTORY CYCLES``.

The same line starts it under torchrun and under srun, which says rank and address differently.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import reloadpg


def main():
    cycles = int(sys.argv[2])
    reloadpg.install(backends={"gloo"})
    with reloadpg.init_distributed("gloo", timeout=60, seed=7) as context:
        rank = context.environment.rank
        tail = dist.new_group([0, 1], group_desc="tail")
        model = DistributedDataParallel(torch.nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(rank)
        losses, sums = [], []
        for step in range(8):
            batch = torch.randn(4, 6, generator=generator)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            number = torch.tensor([2.0**rank])
            dist.all_reduce(number, group=tail)
            sums.append(number.item())
            if step < cycles:
                with reloadpg.offloaded():
                    pass
        result = {
            "rank": rank,
            "losses": losses,
            "sums": sums,
            "weights": [parameter.flatten().tolist() for parameter in model.parameters()],
        }
        facts = {
            "launcher": context.environment.source,
            "world size": dist.get_world_size(),
            "generation": tail.generation,
        }
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / f"training.{rank}.json").write_text(json.dumps(result))
    (folder / f"facts.{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
