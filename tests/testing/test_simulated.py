"""The simulated accelerator: results, memory, counters, and the arguments of replays."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import op_table

import reloadpg
from reloadpg.testing import simulated

MIB = 1 << 20


def start(*, installed: bool, bytes_per_communicator: int = MIB) -> None:
    """Begin a job on the simulated accelerator, with groups bare or behind proxies."""
    simulated.register()
    simulated.configure(bytes_per_communicator=bytes_per_communicator)
    if installed:
        reloadpg.install(timeout=timedelta(seconds=20))
    dist.init_process_group("sim")


IMPOSSIBLE = (
    *("fc.batch_p2p_ops_inplace", "ops.all_gather_into_tensor_out", "ops.batch_p2p_ops"),
    "monitored_barrier",
)
"""Operators that ask the C++ object of the group for its backend, which a group in Python lacks;
and a function of torch for groups of gloo alone."""


@pytest.mark.matrix
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "installed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bare", "installed"]
)
def test_each_operation_gives_the_values_of_gloo(
    installed: bool, rank: int, world_size: int
) -> None:
    """Every row of the operation table, as the first use of its group."""
    start(installed=installed)
    assert isinstance(dist.group.WORLD, reloadpg.ReloadableProcessGroup) == installed
    gloo: Any = dist.new_group(backend="gloo")
    created = 1
    for row, key, case in op_table.cases({"sub": (gloo, range(world_size))}, rank, 1):
        if key[1] != row.ways[0] or row.name.startswith(IMPOSSIBLE):
            continue
        expected = op_table.run_row(row, case)
        group: Any = dist.new_group()
        found = op_table.run_row(row, replace(case, group=group, notes=[]))
        created += 1
        if found.error:  # the gloo of this torch cannot do it either
            assert found.error == expected.error, (key, found.message)
        else:
            assert found.value == expected.value, key
        dist.destroy_process_group(group)
    assert created > 100
    dist.group.WORLD.monitored_barrier(timedelta(seconds=200), wait_all_ranks=True)
    dist.destroy_process_group()
    stats = simulated.stats()
    assert stats.created == stats.released == created
    assert (stats.live, stats.held_bytes) == (0, 0)


HELD = 96 * MIB


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_communicator_holds_resident_memory_until_its_release() -> None:
    """From its first use. An offload returns 95% of it to the operating system (failure 20)."""
    start(installed=True, bytes_per_communicator=HELD)
    group = dist.new_group([0, 1])
    # What any first collective costs (threads, pages of code) is not memory of a communicator.
    dist.all_reduce(torch.ones(8), group=dist.new_group(backend="gloo"))
    resident = psutil.Process().memory_info

    def use(*groups: Any) -> None:
        for one in groups:
            dist.all_reduce(torch.ones(8), group=one)

    for step, communicators, least, most in (
        (lambda: use(None, group), 2, 1.9, 2.2),
        (lambda: use(group), 2, -0.05, 0.05),
        (reloadpg.offload, 0, -3, -0.95 * 2),
        (reloadpg.reload, 0, -0.1, 0.1),
        (lambda: use(group), 1, 0.95, 1.1),
        (lambda: dist.destroy_process_group(group), 0, -2, -0.95),
    ):
        before = resident().rss
        step()
        assert simulated.stats().held_bytes == communicators * HELD
        assert least <= (resident().rss - before) / HELD <= most
