"""A pytest suite for a trainer: does it keep working when its groups are released in between?

::

    pytest examples/test_with_reloads.py

The plugin comes with the package. ``ranks`` runs a test's body on real processes.

On GPUs nothing changes here: these are tests for a machine without one. ``backends={"gloo"}``
makes gloo groups reloadable; the simulated accelerator ("sim") has groups whose communicators
hold real memory and count what is created and released, as a test of memory needs.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reloadpg
from reloadpg.testing import simulated


def train_step(model: nn.Module) -> float:
    """Stand for the code under test."""
    loss = model(torch.full((2, 4), float(dist.get_rank()))).square().sum()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reloads", [False, True])
def test_a_sum_over_a_subgroup(reloads: bool) -> None:
    """Runs twice: as it is, and with a reload before the second sum."""
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    for _ in range(2):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
        if reloads:
            assert reloadpg.offload().changed
            reloadpg.reload()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_fsdp2_after_an_offload(rank: int, world_size: int) -> None:
    """The mesh and the sharded model are built once; the losses are those without an offload."""
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    before = train_step(model)
    with reloadpg.offloaded():
        assert reloadpg.status().state == "offloaded"
    assert train_step(model) == before
    assert reloadpg.status().generation == 1
    del model
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_the_memory_comes_back() -> None:
    """Each communicator of the simulated accelerator holds memory from its first use on."""
    simulated.register()
    reloadpg.install()
    dist.init_process_group("sim")
    dist.all_reduce(torch.ones(1))
    held = simulated.stats().held_bytes
    assert held > 0
    report = reloadpg.offload()
    assert report.released_bytes == held
    assert simulated.stats().held_bytes == 0
    reloadpg.reload()
    dist.destroy_process_group()
