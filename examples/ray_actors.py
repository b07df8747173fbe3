"""Ray actors as the ranks of one job; the driver offloads and reloads all of them::

    python examples/ray_actors.py

The driver decides when the trainers' groups are released, as a single-controller framework does.
Needs ``pip install 'reloadpg[ray]'``.

On GPUs: ``@ray.remote(num_gpus=1)`` for the actors, ``init_process_group("nccl")``, and no
``backends`` for ``install``; actors of several nodes work as actors of one. Here, without a GPU,
the groups are gloo's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.integrations.ray import offload_all, reload_all, setup_actors

GPU = torch.cuda.is_available()
RANKS, ITERATIONS = 2, 2


class Trainer:
    """One rank."""

    def start(self) -> None:
        reloadpg.install(backends=None if GPU else {"gloo"})
        dist.init_process_group("nccl" if GPU else "gloo")
        self.device = torch.device("cuda" if GPU else "cpu")
        self.group = dist.new_group(list(range(dist.get_world_size())))
        self.weight = torch.zeros(1, device=self.device)

    def train(self, samples: list[float]) -> float:
        update = torch.tensor([samples[dist.get_rank()]], device=self.device)
        dist.all_reduce(update, group=self.group)
        self.weight += update
        return self.weight.item()

    def stop(self) -> None:
        dist.destroy_process_group()


def generate(step: int) -> list[float]:
    """Stand for the rollout engine: a sample for each rank."""
    return [float(step + rank) for rank in range(RANKS)]


def drive() -> list[list[float]]:
    """The driver's loop; the ranks' weights after each iteration."""
    remote: Any = ray.remote(num_gpus=1)(Trainer) if GPU else ray.remote(Trainer)
    actors = [remote.remote() for _ in range(RANKS)]  # the place in the list is the rank
    setup_actors(actors)  # rank, size and address, as torchrun would set them
    ray.get([actor.start.remote() for actor in actors])
    weights = []
    for step in range(ITERATIONS):
        reports = offload_all(actors)  # each wait is bounded; an actor that fails is named
        samples = generate(step)
        reload_all(actors)
        weights.append(ray.get([actor.train.remote(samples) for actor in actors]))
        print(f"step {step}: {len(reports[0].groups)} groups a rank, weights {weights[-1]}")
    ray.get([actor.stop.remote() for actor in actors])
    return weights


def main() -> None:
    # The actors are sent by reference to this module: they must be able to import it.
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    ray.init(num_cpus=RANKS, include_dashboard=False, runtime_env={"env_vars": path})
    try:
        drive()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
