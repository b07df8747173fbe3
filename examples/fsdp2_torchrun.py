"""FSDP2 on a DeviceMesh under torchrun, with the groups released for each rollout::

    torchrun --nproc-per-node 4 examples/fsdp2_torchrun.py

Only the three lines with ``reloadpg`` in :func:`main` differ from the script without it: the mesh,
the sharded model and the optimizer are built once and stay.

On GPUs: one rank a GPU, the groups are NCCL's, and ``report.released_bytes`` is what the device
itself got back. Here, without a GPU, the groups are gloo's: they hold no device memory, and
``install`` names them, since gloo groups bypass (are left as torch makes them) by default.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reloadpg

GPU = torch.cuda.is_available()
WIDTH, ITERATIONS = 32, 3


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model over the mesh: in pairs, one copy for each pair."""
    ranks = dist.get_world_size()
    shape, names = (ranks,), ("shard",)
    if ranks >= 4 and ranks % 2 == 0:
        shape, names = (ranks // 2, 2), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(*layers).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rollout(step: int, device: torch.device) -> Tensor:
    """Stand for a rollout engine, which uses the memory that the groups have left."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(64, WIDTH, generator=generator).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Take a step; the mean loss of all ranks."""
    loss = (model(batch) - batch.cumsum(dim=-1) / WIDTH).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    reloadpg.install(backends=None if GPU else {"gloo"})  # before the groups are created
    dist.init_process_group("nccl" if GPU else "gloo")
    model, optimizer = build(device)
    for step in range(ITERATIONS):
        with reloadpg.offloaded():  # all ranks; reloaded at the end of the block
            batch = rollout(step, device)
        loss = train(model, optimizer, batch)
        if dist.get_rank() == 0:
            status = reloadpg.status()
            print(
                f"step {step}: loss {loss:.6f}, generation {status.generation} of "
                f"{len(status.groups)} groups",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
