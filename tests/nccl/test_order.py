"""Which NCCL calls may wait for peers at the same time, on each of torch's engines.

``ncclCommDestroy`` of a connected communicator returns when its peers on the node have closed it
too (failure 34). An engine that holds one lock for several communicators then lets two ranks wait
for each other if their threads acquire it in different orders (:mod:`reloadpg.c10d.nccl`).
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import eventually
from helpers.nccl_job import (
    CAN_SUSPEND,
    HAS_NCCL2,
    engine_variables,
    held,
    left_over,
    on_engines,
    on_ranks,
    start,
    summed,
)

import reloadpg
from reloadpg.c10d import backends, nccl
from reloadpg.testing import standins
from reloadpg.testing.faults import Fault, inject

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

GROUPS = 12
WARM = 5
DELAY_S = 0.3
"""Seconds for which a thread of torch does not run."""
BLOCKED_S = 2.0
"""Seconds after which a call that has not returned is blocked; it takes milliseconds."""
SOON_S = 100.0
"""Seconds within which a call returns that nothing blocks, also on a loaded machine."""
bound_or_not = pytest.mark.parametrize("bound", [True, False])


@bound_or_not
@pytest.mark.parametrize("reloaded", [False, True])
@on_engines(2)
def test_the_lock_of_each_engine(engine: str, reloaded: bool, bound: bool, rank: int) -> None:
    """While a destroy hangs in one group, another group is blocked only if they share a lock."""
    start(rank, bound=bound)
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if reloaded:
        reloadpg.offload()
        reloadpg.reload()
    assert summed(first, rank) == summed(second, rank) == 3.0
    device = torch.device("cuda", rank)
    backend = type(second._get_backend(device)).__name__  # type: ignore[attr-defined]
    shares = not reloaded and backend in nccl.SHARES_LOCK
    with ThreadPoolExecutor(2) as pool:
        with inject(Fault("nccl", "stall", operation="destroy")):
            destroy = pool.submit(first._managed.communicator.shutdown)  # type: ignore[attr-defined]
            assert not wait([destroy], BLOCKED_S).done
            other = pool.submit(second.allreduce, [torch.ones(1, device=device)])
            returned = wait([other], BLOCKED_S if shares else SOON_S).done
            assert bool(returned) != shares
        assert not wait([destroy, other], SOON_S).not_done


@pytest.mark.skipif(not HAS_NCCL2, reason="no engine of this torch shares a lock")
@on_ranks(2, **engine_variables("nccl2"))
def test_releases_run_in_parallel(rank: int) -> None:
    """A destroy that takes long delays no other one, although their communicators share a lock."""
    start(rank)
    for group in [dist.new_group([0, 1]) for _ in range(4)]:
        assert summed(group, rank) == 3.0
    assert summed(None, rank) == 3.0
    fault = Fault("nccl", "stall", operation="destroy", rank=0)
    with inject(fault) if rank == 0 else nullcontext():  # rank 1 waits there for rank 0
        pending = reloadpg.offload(wait=False)
        assert eventually(lambda: standins.communicators() <= 2)  # it, and WORLD, which is last
    pending.result()
    assert standins.communicators() == 0


@bound_or_not
@pytest.mark.parametrize("how", ["none", "eager", "canary", "recover", "suspend"])
@on_engines(2)
def test_any_number_of_connected_groups(engine: str, how: Any, bound: bool, rank: int) -> None:
    """Cycles of connected groups complete with default options, on any engine.

    With more groups than threads, the threads of two ranks almost never acquire a shared lock in
    the same order.
    """
    if how == "suspend" and not CAN_SUSPEND:
        pytest.skip("torch 2.12 and later can suspend")
    strategy = "suspend" if how == "suspend" else "recreate"
    start(rank, bound=bound, strategy=strategy, timeout=timedelta(seconds=30))
    groups = [None, *(dist.new_group([0, 1]) for _ in range(GROUPS))]
    for _ in range(3):
        assert [summed(group, rank) for group in groups] == [3.0] * len(groups)
        if how == "recover":
            reloadpg.recovery.recover("a test")
            continue
        report = reloadpg.offload()
        assert report.released_bytes
        if how != "suspend":
            assert standins.communicators() == 0
        reloadpg.reload(connect="none" if how == "suspend" else how)
        # A group that is created now is split from the rebuilt default group, if it is bound.
        groups.append(dist.new_group([0, 1]))


@on_engines(2)
def test_a_release_leaves_nothing_over(engine: str, rank: int, tmp_path: Path) -> None:
    """Communicators of the first generation leave no thread, descriptor or memory.

    Nor do they write a message of torch's to stderr (failure 43).
    """
    errors = tmp_path / f"{rank}"
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    start(rank)
    before = held()
    for cycle in range(WARM + 3):
        group = dist.new_group([0, 1])
        assert summed(None, rank) == summed(group, rank) == 3.0
        reloadpg.offload()
        if cycle == WARM:  # each thread that creates groups has its store client
            before = held()
        elif cycle > WARM:
            assert left_over(before) == ""
        reloadpg.reload()
        dist.destroy_process_group(group)
    gc.collect()
    told = errors.read_text()
    assert "finalize" not in told
    assert "frame #" not in told


@bound_or_not
@on_engines(2)
def test_a_release_waits_for_no_thread_of_torch(engine: str, bound: bool, rank: int) -> None:
    """The thread that monitors a group misses the signal to end while it starts.

    It then ends minutes later, and the destructor of ``ProcessGroupNCCL`` waits (failure 41).
    """
    limit = timedelta(seconds=20)
    start(rank, bound=bound, timeout=limit, recoverable=True)
    group = dist.new_group([0, 1])
    assert summed(None, rank) == summed(group, rank) == 3.0
    reloadpg.offload()
    delay = Fault("nccl", "stall", operation="monitor", times=None, seconds=DELAY_S)
    with inject(delay):
        reloadpg.reload()
        reloadpg.recovery.recover("a test")
        reloadpg.offload()
        assert eventually(lambda: not monitors())
        # As after its timeout. A mock would keep the groups, for any thread to destroy later.
        with patch.object(backends, "await_monitors", lambda *_: None):
            reloadpg.reload()
            reloadpg.offload()
        late = len(monitors())
        reloadpg.reload()
        assert summed(None, rank) == summed(group, rank) == 3.0
        reloadpg.offload()
        reloadpg.reload()
        dist.destroy_process_group()
    assert eventually(lambda: len(monitors()) == late)


def monitors() -> list[str]:
    """The threads with which torch monitors groups."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name == "pt_nccl_heartbt"]


EIGHT = [
    *([rank, (rank + 1) % 8] for rank in range(8)),
    *([rank, (rank + 3) % 8] for rank in range(8)),
    *([rank, rank + 2, rank + 4, rank + 6] for rank in range(2)),
    *([rank, rank + 1, rank + 2, rank + 3] for rank in (0, 4)),
]
"""20 overlapping groups of 8 ranks."""


@on_engines(8)
def test_eight_ranks_with_twenty_overlapping_groups(engine: str, rank: int) -> None:
    """Their offload and a reload in the background complete with default options."""
    start(rank)
    groups = [(dist.new_group(sorted(members)), members) for members in EIGHT]
    mine = [(group, sum(members) + len(members)) for group, members in groups if rank in members]
    for _ in range(2):
        assert [summed(group, rank) for group, _ in mine] == [total for _, total in mine]
        reloadpg.offload()
        assert standins.communicators() == 0
        reloadpg.reload(wait=False).result()
