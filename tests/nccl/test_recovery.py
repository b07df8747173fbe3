"""Recovery over torch's ProcessGroupNCCL, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import RING, attempt, eventually
from helpers.nccl_job import held, on_engines, start, summed

import reloadpg
from reloadpg.environment import init_distributed
from reloadpg.testing import standins
from reloadpg.testing.faults import Fault, FaultAction, inject

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=8)


@on_engines(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fault_before_the_first_collective_of_a_rebuilt_group_is_recovered(
    engine: str, victim: int, rank: int
) -> None:
    """The other rank is in that collective, in a default group that is bound to no device.

    A recoverable job connects its groups in the reload: torch could not end their connection.
    """
    start(rank, recoverable=True, timeout=LIMIT)
    group: Any = dist.new_group([0, 1])
    assert summed(group, rank) == 3.0
    reloadpg.offload()
    reloadpg.reload()
    if rank != victim:
        # The peer does not come: a wait for the device lasts until this timeout, which the group
        # keeps in the recovery, where it must connect within it.
        dist.distributed_c10d._set_pg_timeout(SHORT, group)
        with suppress(RuntimeError):
            summed(group, rank)
    reloadpg.recovery.recover()
    dist.distributed_c10d._set_pg_timeout(LIMIT, group)
    for _ in range(2):
        assert summed(group, rank) == 3.0
        reloadpg.offload()
        reloadpg.reload()


ERRORS = ("RebuildError", "PeerFailedError", "RendezvousTimeoutError")
HOWS = pytest.mark.parametrize("how", ["reload", "recover"])
EACH = [(1, 0), (1, -1), (0, 0), (0, -1)]
"""A rank of two, and a group of those that it connects."""


def connections_fail(
    how: str,
    rank: int,
    faults: list[tuple[int, int]],
    size: int = 2,
    action: FaultAction = "raise",
    limit: timedelta = LIMIT,
) -> None:
    """A rank fails in the connection of a group; the next call of all ranks repairs that."""
    start(rank, recoverable=True, timeout=limit)
    members = [[0, 1]] * 2 if size == 2 else RING
    groups = [(None, range(size)), *((dist.new_group(list(part)), part) for part in members)]
    mine = [(group, sum(part) + len(part)) for group, part in groups if rank in part]

    def sums_right() -> bool:
        return all(summed(group, rank) == total for group, total in mine)

    def call() -> None:
        if how == "recover":
            reloadpg.recovery.recover("a test", timeout=limit)
        else:
            reloadpg.reload(connect="eager")

    for victim, group in faults:
        assert sums_right()
        if how == "reload":
            reloadpg.offload()
        if rank == victim:
            nth = range(len(mine))[group] + 1
            inject(Fault("nccl", action, operation="collective", rank=rank, nth=nth))
        assert attempt(call).kind in ERRORS
        call()
        assert sums_right()
        reloadpg.offload()
        assert held()[:2] == (0, 0)
        reloadpg.reload()


@HOWS
@on_engines(2, RELOADPG_STANDIN_CONNECT="1")
def test_a_connection_that_fails_on_one_rank_is_repaired(engine: str, how: str, rank: int) -> None:
    """Its peer is in that connection, and ``ProcessGroupNCCL2`` holds a lock there (failure 47)."""
    connections_fail(how, rank, EACH)


@HOWS
@on_engines(4, RELOADPG_STANDIN_CONNECT="1")
def test_a_failed_connection_is_repaired_in_overlapping_groups(
    engine: str, how: str, rank: int
) -> None:
    """As failure 47, with peers in different groups."""
    connections_fail(how, rank, [*EACH, (3, 1), (2, 2)], size=4)


@HOWS
@on_engines(2, RELOADPG_STANDIN_CONNECT="1")
def test_a_connection_that_hangs_on_one_rank_is_repaired(engine: str, how: str, rank: int) -> None:
    """The operation reaches its timeout (failure 47)."""
    connections_fail(how, rank, EACH[:1], action="stall", limit=SHORT)


@on_engines(2, RELOADPG_STANDIN_CONNECT="1")
def test_a_connection_that_fails_in_the_bring_up(engine: str, rank: int) -> None:
    """It raises on all ranks, and leaves no group and no communicator (failure 47)."""
    if rank == 1:
        inject(Fault("nccl", operation="collective", rank=1))
    error = reloadpg.ReloadpgError if rank == 1 else reloadpg.PeerFailedError
    with pytest.raises(error):
        init_distributed("nccl", connect="eager")
    assert not dist.is_initialized()
    assert eventually(lambda: standins.communicators() == 0)
