"""Tests of somebody else's project, run by ``test_plugin.py``: with reloads between phases.

Each reloaded run writes what happened to a file, for the outer test to look at.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce  # an early alias, as Megatron has

import reloadpg

RECORDS = Path(os.environ["RECORDS"])


def record(name: str, rank: int) -> None:
    """What the library says at the end, in a file; the as-is run is not installed."""
    if reloadpg.is_installed():
        status = reloadpg.status()
        (RECORDS / f"{name}-{rank}").write_text(f"{status.cycles} {status.generation}")
    else:
        (RECORDS / f"{name}-as-is-{rank}").touch()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.reload_each_phase
def test_synchronous(rank):
    tensor = torch.ones(1)
    all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    dist.barrier()
    assert (tensor.item(), objects) == (2, [0, 1])
    record("synchronous", rank)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.reload_each_phase
def test_asynchronous(rank):
    first, second = torch.ones(1), torch.ones(1)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    gathered = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(gathered, torch.ones(1) * rank)  # while two are under way: no phase
    assert all(work.wait() for work in works)
    dist.all_reduce(first)
    assert (first.item(), second.item(), [g.item() for g in gathered]) == (4, 2, [0, 1])
    record("asynchronous", rank)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.reload_each_phase
def test_smaller_groups_and_sends(rank):
    groups = [dist.new_group([0]), dist.new_group([1])]
    tensor = torch.ones(1)
    if rank == 0:  # ranks may differ here
        dist.all_reduce(tensor, group=groups[0])
        dist.all_reduce(tensor, group=groups[0])
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    batch = [
        dist.P2POp(dist.isend, torch.ones(1), 1 - rank),
        dist.P2POp(dist.irecv, tensor, 1 - rank),
    ]
    works = dist.batch_isend_irecv(batch)
    for work in works:
        work.wait()
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    record("smaller", rank)


@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.reload_each_phase(every_group=True, options={"backends": "gloo", "min_size": 2})
def test_every_group(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = torch.ones(1) * rank
    dist.all_reduce(tensor, group=pairs[rank // 2])
    assert tensor.item() == (1 if rank < 2 else 5)
    record("every", rank)


@pytest.mark.ranks(2)
@pytest.mark.reload_each_phase
def test_simulated_with_points(rank, simulated_accelerator, assert_no_group_leaks, reload_point):
    dist.init_process_group("sim")
    for _ in range(3):
        reload_point()
    record("points", rank)
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.reload_each_phase
def test_body_installs_for_itself(rank):
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    dist.barrier()
    record("itself", rank)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.reload_each_phase
def test_without_a_phase(rank):
    record("without", rank)


@pytest.mark.ranks(2, backend="gloo", timeout=8)
@pytest.mark.reload_each_phase
def test_one_rank_alone(rank):
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()  # no phase: one is under way
        work.wait()
    else:
        dist.all_reduce(torch.ones(1))
        dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.reload_each_phase
def test_breaks_under_reloads(rank):
    """A backend object that is kept over a phase is one generation's: what the mark is to find."""
    group = dist.group.WORLD
    device = torch.device("cpu")
    dist.barrier()
    backend = group._get_backend(device)
    dist.barrier()
    assert group._get_backend(device) is backend
