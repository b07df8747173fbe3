"""slime's sequence: train, sleep, rollout, wake for a weight update, sleep again, wake to train::

    torchrun --nproc-per-node 2 examples/slime_sequence.py

The four names are those of slime's ``utils/reloadable_process_group.py``, so only the import
changes (miles does not use ``register_default_process_group``). The rest shows the order in which
slime's Megatron actor calls them.

On GPUs: ``backend="nccl"``, no options for ``monkey_patch_torch_dist``, and torch_memory_saver's
``pause`` and ``resume`` in the marked places: groups first, then pause; resume, then reload. Here,
without a GPU, the groups are gloo's.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import reloadpg
from reloadpg.integrations.slime import (  # was: slime.utils.reloadable_process_group
    destroy_process_groups,
    monkey_patch_torch_dist,
    register_default_process_group,
    reload_process_groups,
)

GPU = torch.cuda.is_available()
ITERATIONS = 2


class Trainer:
    """One rank of slime's trainer, reduced to its groups and a weight."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        options = {"backends": {"gloo"}}
        if GPU:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            options = {}
        monkey_patch_torch_dist(**options)  # before the groups are created
        dist.init_process_group("nccl" if GPU else "gloo")
        register_default_process_group(timedelta(minutes=10))
        self.group = dist.new_group(list(range(dist.get_world_size())), group_desc="data")
        self.weight = torch.ones(1, device=self.device)

    def sleep(self) -> None:
        destroy_process_groups()  # collective over all ranks; calling it twice does nothing
        # torch_memory_saver.pause()

    def wake_up(self) -> None:
        # torch_memory_saver.resume()
        reload_process_groups()  # connects all groups, so slime's barrier on WORLD can go

    def train(self, rollouts: Tensor) -> None:
        gradient = rollouts.mean().reshape(1)
        dist.all_reduce(gradient, group=self.group)
        self.weight -= 0.1 * gradient / self.group.size()

    def update_weights(self) -> Tensor:
        """Gather the weights for the engine: the groups are needed, the trainer's memory not."""
        reload_process_groups()
        whole = self.weight.clone()
        dist.broadcast(whole, src=0, group=self.group)
        destroy_process_groups()
        return whole


def generate(weights: Tensor, step: int) -> Tensor:
    """Stand for the rollout engine."""
    random = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return weights * torch.rand(16, generator=random).to(weights.device)


def main() -> None:
    trainer = Trainer()
    trainer.sleep()  # the engine starts first, with the trainer asleep
    for step in range(ITERATIONS):
        weights = trainer.update_weights()
        rollouts = generate(weights, step)  # the groups own no communicator here
        state = reloadpg.status().state
        trainer.wake_up()
        trainer.train(rollouts)
        trainer.sleep()
        if dist.get_rank() == 0:
            print(f"step {step}: weight {trainer.weight.item():.6f}, rollout {state}", flush=True)
    trainer.wake_up()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
