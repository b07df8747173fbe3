"""The library over torch's own NCCL engines, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import attempt
from helpers.nccl_job import (
    LIMIT,
    Meetings,
    eventually,
    held,
    left_over,
    on_engines,
    start,
    summed,
)
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.testing import standins
from reloadpg.testing.faults import Fault, inject

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

HANG_S = 120.0
SHORT = timedelta(seconds=5)
"""A timeout that is reached."""
BOUND = timedelta(seconds=10)
"""The timeout of an operation that reaches it."""
CYCLES = int(os.environ.get("NCCL_CYCLES", "10"))
WARM = 5
"""Cycles after which each thread that creates groups has its store client."""
ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
bound_or_not = pytest.mark.parametrize("bound", [True, False])


def total(ranks: list[list[int]], rank: int) -> float:
    """The sum of ``rank + 1`` over this rank's part."""
    return next(sum(part) + 2.0 for part in ranks if rank in part)


@pytest.mark.parametrize("how", ["reload", "recover"])
@pytest.mark.parametrize("made_by", ["new_group", "new_group, bound", "split", "mesh"])
@on_engines(4)
def test_cycles_leave_nothing_over(engine: str, made_by: str, how: str, rank: int) -> None:
    """An offload leaves no communicator; sums and timeouts are right after each cycle.

    Communicators, bytes, threads and descriptors are those of the fifth cycle. So are keys in the
    store, but for those of the last barriers, which a rank may not have deleted yet. Torch splits
    the groups of a default group that is bound to a device, and connects them at their creation.
    """
    start(rank, bound=made_by != "new_group")
    if made_by == "mesh":
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("column", "row"))
        row, column = mesh.get_group("row"), mesh.get_group("column")
    elif made_by == "split":
        row, column = (dist.split_group(split_ranks=part) for part in (ROWS, COLUMNS))
    else:
        row, column = (dist.new_subgroups_by_enumeration(part)[0] for part in (ROWS, COLUMNS))
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=71), row)
    meetings = Meetings(4)
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]

    def keys() -> int:
        return int(store.num_keys()) - 2 * meetings.number  # each meeting leaves two

    def timeout() -> timedelta:
        backend: Any = row._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        found: timedelta = backend.options._timeout
        return found

    for cycle in range(1, CYCLES + 1):
        if how == "recover":
            reloadpg.recovery.recover("a test")
        assert timeout() == timedelta(seconds=72 if cycle > WARM else 71)
        reloadpg.offload()
        assert standins.communicators() == 0
        if cycle == WARM:
            for group in (row, column):  # torch 2.8 lets splits of a parent share their options
                set_timeout(timedelta(seconds=72), group)
        reloadpg.reload()
        sums = [summed(group, rank) for group in (None, row, column)]
        assert sums == [10.0, total(ROWS, rank), total(COLUMNS, rank)]
        meetings.meet()
        if cycle == WARM:
            before, keys_before = held(), keys()
            meetings.meet()
    assert left_over(before) == ""
    assert before.communicators == 3
    meetings.meet()
    assert eventually(lambda: keys() < keys_before + 5)
    assert made_by != "mesh" or mesh.get_group("row") is row


@pytest.mark.parametrize("when", ["live", "offloaded"])
@on_engines(4)
def test_a_split_is_reloaded_after_its_parent_was_destroyed(
    engine: str, when: str, rank: int
) -> None:
    start(rank, bound=True)
    parent = dist.split_group(split_ranks=[[0, 1, 2, 3]])
    child = dist.split_group(parent, split_ranks=ROWS)
    assert summed(child, rank) == total(ROWS, rank)
    for cycle in range(2):
        if cycle == 0 and when == "live":
            dist.destroy_process_group(parent)
        reloadpg.offload()
        if cycle == 0 and when == "offloaded":
            dist.destroy_process_group(parent)
        reloadpg.reload()
        assert summed(child, rank) == total(ROWS, rank)


@on_engines(2)
def test_a_batch_that_fails_does_not_stop_later_collectives(engine: str, rank: int) -> None:
    """Torch leaves NCCL's group call open, which then collects the thread's calls."""
    start(rank, recoverable=True)
    group: Any = dist.group.WORLD
    summed(None, rank)

    def exchanged() -> tuple[float, float]:
        mine, received = torch.tensor([float(rank)]).cuda(), torch.empty(1).cuda()
        operations = [
            dist.P2POp(dist.isend, mine, 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return summed(None, rank), received.item()

    dist.distributed_c10d._set_pg_timeout(SHORT, group)
    if rank == 1:
        inject(Fault("nccl", operation="send", rank=1))
    assert attempt(exchanged).kind or rank == 0
    # The rebuilt group has the timeout of the failed one, and connects.
    dist.distributed_c10d._set_pg_timeout(LIMIT, group)
    reloadpg.recovery.recover()
    assert exchanged() == (3.0, 1.0 - rank)
    reloadpg.offload()
    reloadpg.reload()
    assert summed(None, rank) == 3.0  # by a communicator that this thread creates


@on_engines(2)
def test_a_reload_after_a_failed_recovery_rebuilds_all_backends_of_mixed_groups(
    engine: str, rank: int
) -> None:
    """A recovery aborts the backends of the CPU, too."""
    start(rank, bound=True, backend="cpu:gloo,cuda:nccl", timeout=BOUND)
    group: Any = dist.new_group([0, 1])
    summed(group, rank)
    if rank == 0:
        inject(Fault("nccl", operation="init", rank=0))
    with pytest.raises(reloadpg.ReloadpgError):
        reloadpg.recovery.recover("a test")
    reloadpg.reload()
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert (value.item(), summed(group, rank), group.state) == (2.0, 3.0, "live")


@pytest.mark.parametrize("drops", [True, False])
@on_engines(2)
def test_a_captured_cuda_graph_holds_its_communicator(engine: str, drops: bool, rank: int) -> None:
    """An offload is complete if the program drops the graph in a callback.

    Otherwise it reaches its timeout, and the error names this cause.
    """
    start(rank, timeout=LIMIT if drops else BOUND)
    group: Any = dist.new_group([0, 1])
    tensor = torch.tensor([1.0]).cuda()
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(graphs[0]):
        dist.all_reduce(tensor, group=group)
    for _ in range(2):
        graphs[0].replay()
    assert tensor.item() == 8.0
    if drops:
        reloadpg.on_offload(graphs.clear)
    offload = attempt(reloadpg.offload)
    assert offload.kind == ("" if drops else "RendezvousTimeoutError"), offload
    assert drops or "a CUDA graph" in offload.text
    graphs.clear()
    assert eventually(lambda: standins.communicators() == 0)
    reloadpg.reload()
    assert summed(group, rank) == 3.0


@on_engines(2)
def test_an_offload_does_not_hide_an_aborted_collective(engine: str, rank: int) -> None:
    """Its communicator holds the error: it is raised, and nothing is released."""
    start(rank, recoverable=True)
    group: Any = dist.group.WORLD
    summed(None, rank)
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(SHORT, group)
        dist.all_reduce(torch.ones(1).cuda())  # rank 1 does not take part
    here = pytest.raises(dist.DistBackendError, match=r"^a collective was aborted on this rank")
    with here if rank == 0 else pytest.raises(reloadpg.PeerFailedError):
        reloadpg.offload()
    assert group.state == "live"
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(LIMIT, group)
    reloadpg.recovery.recover()
    reloadpg.offload()
    reloadpg.reload()
    assert summed(None, rank) == 3.0


@on_engines(2)
def test_recover_ends_the_operation_that_an_offload_has_waited_for(engine: str, rank: int) -> None:
    """It still runs on the device, so the next step would wait for it: the error names the call."""
    start(rank, timeout=BOUND)
    group: Any = dist.new_group([0, 1])
    assert summed(group, rank) == summed(None, rank) == 3.0
    if rank == 0:
        dist.all_reduce(torch.ones(1).cuda(), group=group, async_op=True)  # not on rank 1
    with pytest.raises(reloadpg.RendezvousTimeoutError, match=r"recover\(\) ends it"):
        reloadpg.offload()
    assert not reloadpg.reload().changed
    reloadpg.recovery.recover()
    assert summed(group, rank) == 3.0
    reloadpg.offload()
    assert standins.communicators() == 0
    reloadpg.reload()


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "shrink_group"), reason="this torch cannot shrink groups"
)
@pytest.mark.parametrize("whole", [True, False])
@on_engines(3)
def test_a_shrunk_group_is_named(engine: str, whole: bool, rank: int) -> None:
    """``shrink_group`` is not patched: its group works, and ``status().unmanaged`` has it."""
    start(rank, bound=True)  # else torch gives the shrunk group to the CPU
    group = None if whole else dist.new_group([0, 1, 2])
    summed(group, rank)
    torch.cuda.synchronize()  # torch refuses to shrink while work is pending
    if rank == 2:
        dist.destroy_process_group()  # NCCL's destroy on the other ranks waits for this one
        return
    shrunk = dist.distributed_c10d.shrink_group([2], group=group)
    status = reloadpg.status()
    assert list(status.unmanaged) == [shrunk.group_name]
    assert "does not patch" in status.unmanaged[shrunk.group_name]
    assert len(status.groups) == (0 if whole else 1)
    assert summed(shrunk, rank) == 3.0
