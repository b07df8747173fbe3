"""The stand-in for NCCL behaves as NVIDIA's host code, as seen with NCCL 2.30.7 on one host."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from nccl_calls import SUCCESS, Nccl, Running
from nccl_job import on_ranks

from reloadpg.testing import run_ranks, standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]
SOON = 60.0
"""Seconds within which a call returns that waits for no rank, also on a loaded machine."""
WHILE = 1.0
"""Seconds for which a call that waits for a rank is observed."""


# ---------------------------------------------------------------------------------------------
# the end of a communicator


@pytest.mark.parametrize("peers_call", ["CommDestroy", "CommAbort"])
@on_ranks(3)
def test_the_destroy_of_a_connected_communicator_waits_for_its_peers(
    peers_call: str, rank: int
) -> None:
    """It returns when each of them has destroyed or aborted it."""
    nccl = Nccl(rank, 3)
    comm = nccl.connected()
    if rank == 0:
        destroy = Running(nccl, "CommDestroy", comm)
        assert destroy.returned(WHILE) is None
    nccl.meet()
    if rank == 1:
        peer = Running(nccl, peers_call, comm)
        assert peer.returned(WHILE) == (SUCCESS if peers_call == "CommAbort" else None)
    elif rank == 0:
        assert destroy.returned(WHILE) is None
    nccl.meet()
    if rank == 2:
        assert nccl("CommDestroy", comm) == SUCCESS
    elif rank == 0:
        assert destroy.returned(SOON) == SUCCESS
    elif peers_call == "CommDestroy":
        assert peer.returned(SOON) == SUCCESS
    assert standins.communicators() == 0
    nccl.meet()


@on_ranks(2)
def test_the_destroy_of_a_communicator_that_was_not_used_returns_at_once(rank: int) -> None:
    nccl = Nccl(rank, 2)
    comm = nccl.create()
    if rank == 0:
        assert Running(nccl, "CommDestroy", comm).returned(SOON) == SUCCESS
    nccl.meet()
    assert rank == 0 or nccl("CommDestroy", comm) == SUCCESS


@on_ranks(3)
def test_a_transfer_connects_two_members_only(rank: int) -> None:
    nccl = Nccl(rank, 3)
    comm = nccl.create()
    if rank < 2:
        assert (nccl.send if rank == 0 else nccl.recv)(comm, 1 - rank) == SUCCESS
        torch.cuda.synchronize()
        destroy = Running(nccl, "CommDestroy", comm)
        assert destroy.returned(SOON) == SUCCESS
    nccl.meet()
    assert rank < 2 or nccl("CommDestroy", comm) == SUCCESS


@pytest.mark.parametrize("call", ["CommFinalize", "CommAbort"])
@on_ranks(2)
def test_finalize_and_abort_wait_for_no_peer(call: str, rank: int) -> None:
    nccl = Nccl(rank, 2)
    comm = nccl.connected()
    if rank == 0:
        assert Running(nccl, call, comm).returned(SOON) == SUCCESS
        assert standins.communicators() == (call == "CommFinalize")
    nccl.meet()
    if rank == 1 or call == "CommFinalize":
        assert nccl("CommDestroy", comm) == SUCCESS


@on_ranks(2)
def test_an_abort_by_another_thread_ends_a_destroy_that_waits(rank: int) -> None:
    nccl = Nccl(rank, 2)
    comm = nccl.connected()
    if rank == 0:
        destroy = Running(nccl, "CommDestroy", comm)
        assert destroy.returned(WHILE) is None
        assert Running(nccl, "CommAbort", comm).returned(SOON) == SUCCESS
        assert destroy.returned(SOON) == SUCCESS
        assert standins.communicators() == 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert total - free == torch.cuda.memory_reserved()
    nccl.meet()
    assert rank == 0 or nccl("CommDestroy", comm) == SUCCESS


@on_ranks(2)
def test_two_communicators_destroyed_in_opposite_order_hang(rank: int) -> None:
    """By one thread of each rank, until another thread aborts."""
    nccl = Nccl(rank, 2)
    comms = [nccl.connected(), nccl.connected()]
    first, second = comms if rank == 0 else comms[::-1]
    nccl.meet()
    destroys = Running(lambda: nccl("CommDestroy", first) or nccl("CommDestroy", second))
    assert destroys.returned(WHILE) is None
    assert standins.communicators() == 2
    nccl.meet()
    assert rank == 1 or nccl("CommAbort", first) == SUCCESS
    assert destroys.returned(SOON) == SUCCESS
    assert standins.communicators() == 0
    nccl.meet()


def ends_without_its_peer(rank: int, size: int, call: str) -> int | None:
    nccl = Nccl(rank, size)
    comm = nccl.connected()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    result = Running(nccl, call, comm).returned(SOON)
    assert call == "CommFinalize" or standins.communicators() == 0
    return result


@pytest.mark.parametrize("call", ["CommDestroy", "CommFinalize", "CommAbort"])
def test_a_peer_that_was_killed_is_not_waited_for(call: str) -> None:
    settings: Any = {"standins": True, "timeout": 240.0, "check": False}
    first, second = run_ranks(ends_without_its_peer, 2, args=(call,), **settings)
    assert second.signal == signal.SIGKILL
    assert first.result == SUCCESS, first.exception
