"""megatron-core's parallel state, released and rebuilt behind the groups that Megatron holds::

    torchrun --nproc-per-node 4 examples/megatron_parallel.py

An MLP split over the tensor-parallel group and trained data-parallel. megatron-core keeps its
groups in module globals; they stay the same objects, and work again after each reload. Needs
``pip install 'reloadpg[megatron]'``.

On GPUs: ``backend="nccl"``, one rank a GPU; a trainer of this kind has tens of groups, each with an
NCCL communicator on every GPU. Here, without a GPU, the groups are gloo's.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn

import reloadpg
from reloadpg.integrations.megatron import initialize_model_parallel

GPU = torch.cuda.is_available()
WIDTH, ITERATIONS = 16, 3


class ParallelMLP(nn.Module):
    """A column-parallel layer, then a row-parallel one; their sum over the tensor group."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        rank = parallel_state.get_tensor_model_parallel_rank()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        whole = torch.Generator().manual_seed(0)  # each rank draws all and keeps its part
        first = torch.randn(4 * WIDTH, WIDTH, generator=whole) / WIDTH**0.5
        second = torch.randn(WIDTH, 4 * WIDTH, generator=whole) / WIDTH
        self.first = nn.Parameter(first.chunk(ranks, dim=0)[rank].clone().to(device))
        self.second = nn.Parameter(second.chunk(ranks, dim=1)[rank].clone().to(device))

    def forward(self, inputs: Tensor) -> Tensor:
        copied = mappings.copy_to_tensor_model_parallel_region(inputs)
        hidden = torch.relu(copied @ self.first.T)
        return mappings.reduce_from_tensor_model_parallel_region(hidden @ self.second.T)


def groups() -> list[dist.ProcessGroup]:
    """The groups that Megatron holds and this program uses."""
    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    ]


def train(model: ParallelMLP, step: int, device: torch.device) -> float:
    """Take a step, with gradients averaged over the data-parallel group."""
    data = parallel_state.get_data_parallel_group()
    seed = 100 * step + data.rank()
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
    loss = (model(inputs) - inputs.flip(-1)).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)
            parameter -= 0.1 * parameter.grad / data.size()
            parameter.grad = None
    return loss.item()


def main() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    reloadpg.install(backends=None if GPU else {"gloo"})
    dist.init_process_group("nccl" if GPU else "gloo")
    tensor = 2 if dist.get_world_size() % 2 == 0 else 1
    # Leaving the block destroys all of its groups; Megatron's own function leaves most alive.
    with initialize_model_parallel(
        tensor_model_parallel_size=tensor, create_gloo_process_groups=False
    ):
        model = ParallelMLP(device)
        held = groups()
        for step in range(ITERATIONS):
            with reloadpg.offloaded() as report:
                pass  # the rollout engine has the memory
            loss = train(model, step, device)
            same = all(one is before for one, before in zip(groups(), held, strict=True))
            if dist.get_rank() == 0:
                print(
                    f"step {step}: loss {loss:.6f}, {len(report.groups)} groups released, "
                    f"Megatron's are {'the same objects' if same else 'OTHERS'}",
                    flush=True,
                )
        del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
