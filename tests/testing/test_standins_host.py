"""The stand-in for NCCL behaves as NVIDIA's host code, as seen with NCCL 2.30.7 on one host."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nccl_job import MIB, on_ranks, signals
from testing.nccl_calls import SUCCESS, Nccl, Running, device_mib

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
        assert device_mib() == 0
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


@pytest.mark.parametrize("call", ["AllReduce", "CommSuspend"])
@on_ranks(2, RELOADPG_STANDIN_CONNECT="1")
def test_an_abort_in_a_group_call_that_fails_ends_waits_and_frees_nothing(
    call: str, rank: int
) -> None:
    """Its flag is set at once, which ends a call that waits for a peer; a second abort frees."""
    nccl = Nccl(rank, 2)
    comm = nccl.create() if call == "AllReduce" else nccl.connected()
    nccl.meet()
    if rank == 0:
        first = call == "AllReduce"  # the first operation connects
        waits = Running(nccl.all_reduce, comm) if first else Running(nccl, call, comm, 1)
        assert waits.returned(WHILE) is None
        assert nccl("GroupStart") == SUCCESS
        assert nccl("CommAbort", comm) == SUCCESS
        assert nccl("AllReduce", None, None, ctypes.c_size_t(0), 0, 0, None, None) != SUCCESS
        assert waits.returned(SOON) not in (None, SUCCESS)
        assert nccl("GroupEnd") != SUCCESS
        assert standins.communicators() == 1
        assert device_mib() > 0
    nccl.meet()
    assert nccl("CommAbort", comm) == SUCCESS
    assert standins.communicators() == 0
    assert device_mib() == 0


def ends_without_its_peer(rank: int, size: int, call: str) -> int | None:
    nccl = Nccl(rank, size)
    comm = nccl.connected()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    result = Running(nccl, call, comm).returned(SOON)
    assert call == "CommFinalize" or standins.communicators() == 0
    return result


@pytest.mark.parametrize("call", ["CommDestroy", "CommAbort"])
@on_ranks(2)
def test_communicators_end_in_any_order_in_a_group_call(call: str, rank: int) -> None:
    """The calls return at once, and the end of the group call meets the peers of all."""
    nccl = Nccl(rank, 2)
    comms = [nccl.connected(), nccl.connected()]
    nccl.meet()
    assert nccl("GroupStart") == SUCCESS
    for comm in comms if rank else reversed(comms):
        assert nccl(call, comm) == SUCCESS
    nccl.meet()
    assert standins.communicators() == 2
    assert nccl("GroupEnd") == SUCCESS
    assert standins.communicators() == 0


@pytest.mark.parametrize("call", ["CommDestroy", "CommFinalize", "CommAbort"])
def test_a_peer_that_was_killed_is_not_waited_for(call: str) -> None:
    settings: Any = {"standins": True, "timeout": 240.0, "check": False}
    first, second = run_ranks(ends_without_its_peer, 2, args=(call,), **settings)
    assert second.signal == signal.SIGKILL
    assert first.result == SUCCESS, first.exception


# ---------------------------------------------------------------------------------------------
# memory


SIZES = {  # ranks, connected at creation, NVLS: MiB created, connected, suspended, of the network
    (1, False, False): (388, 388, 4, 0),
    (2, False, False): (196, 484, 4, 0),
    (2, False, True): (230, 518, 38, 0),
    (2, True, False): (740, 740, 260, 256),
    (4, False, False): (196, 484, 4, 0),
    (4, True, True): (1142, 1142, 422, 256),
}
PINNED = 1179652
"""Bytes of host memory that a communicator pins while it lives."""


def on_size(size: int, whole: bool, nvls: bool) -> Any:
    variables = {
        "NCCL_RUNTIME_CONNECT": f"{int(not whole)}",
        "RELOADPG_STANDIN_NVLS": f"{int(nvls)}",
    }
    return pytest.param(size, whole, nvls, marks=on_ranks(size, **variables))


@pytest.mark.parametrize(("size", "whole", "nvls"), [on_size(*key) for key in SIZES])
def test_memory_is_that_which_was_measured(size: int, whole: bool, nvls: bool, rank: int) -> None:
    """A suspend copies what it releases to pinned host memory; NCCL reports no network buffers."""
    created, connected, left, network = SIZES[size, whole, nvls]
    nccl = Nccl(rank, size)
    comm = nccl.create()
    if rank and size > 2 and standins.NCCL in os.environ and network:
        created = connected = device_mib()  # its ranks differ
    assert device_mib() == created
    assert nccl.all_reduce(comm) == SUCCESS
    torch.cuda.synchronize()
    assert device_mib() == connected
    suspendable = connected - left
    stats = [nccl.memory_stat(comm, what) / MIB for what in range(4)]
    assert stats == [suspendable, 0, left - network, connected - network]
    assert nccl("CommSuspend", comm, 1) == SUCCESS
    nccl.meet()
    assert device_mib() == left
    assert standins.pinned_bytes() == suspendable * MIB + PINNED
    assert nccl("CommResume", comm) == SUCCESS
    assert device_mib() == connected
    assert standins.pinned_bytes() == PINNED
    assert nccl("CommDestroy", comm) == SUCCESS
    assert device_mib() == 0
    assert standins.pinned_bytes() == 0


@pytest.mark.parametrize("call", ["CommDestroy", "CommAbort"])
@on_ranks(2)
def test_a_communicator_that_ends_while_suspended_leaves_memory(call: str, rank: int) -> None:
    """4 MiB, and 1.1 MiB of pinned host memory."""
    nccl = Nccl(rank, 2)
    comm = nccl.connected()
    assert nccl("CommSuspend", comm, 1) == SUCCESS
    assert nccl(call, comm) == SUCCESS
    assert (device_mib(), standins.pinned_bytes()) == (4, PINNED)
    assert standins.left_bytes() == 4 * MIB


# ---------------------------------------------------------------------------------------------
# threads, descriptors, files


def resources() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param((1, 5), marks=on_ranks(2)),
        pytest.param((0, 0), marks=on_ranks(2, NCCL_RAS_ENABLE="0"), id="off"),
    ],
)
def test_what_stays_after_the_last_communicator(kept: tuple[int, int], rank: int) -> None:
    """A thread and five descriptors, one of which listens: NCCL's RAS."""
    nccl = Nccl(rank, 2)
    before = resources()
    for _ in range(3):
        assert nccl("CommDestroy", nccl.create()) == SUCCESS
        threads, descriptors = resources()
        assert (threads - before[0], descriptors - before[1]) == kept


def shm_files() -> set[Path]:
    """Those of this job. NVIDIA's are next to those of other jobs: those that this rank maps."""
    if standins.NCCL not in os.environ:
        return set(Path(os.environ[standins.JOB]).glob("nccl-*"))
    return set(map(Path, re.findall(r"/dev/shm/nccl-\w+", Path("/proc/self/maps").read_text())))


@pytest.mark.parametrize("call", ["CommDestroy", "CommAbort"])
@on_ranks(2, NCCL_RUNTIME_CONNECT="0")
def test_a_communicator_with_network_transports_has_a_file_while_it_lives(
    call: str, rank: int
) -> None:
    nccl = Nccl(rank, 2)
    comms = [nccl.create(), nccl.create()]
    nccl.meet()
    files = shm_files()
    assert len(files) == (2 if standins.NCCL in os.environ else 4)
    nccl.meet()
    for comm in comms:
        assert nccl(call, comm) == SUCCESS
    nccl.meet()
    assert not any(path.exists() for path in files)


def ends_by_a_signal(rank: int, size: int) -> int:
    nccl = Nccl(rank, size)
    comm = nccl.connected()
    files = signals()
    files.set(f"files{rank}", "\n".join(map(str, shm_files())))
    nccl.meet()
    if rank > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    assert nccl("CommDestroy", comm) == SUCCESS
    names = {name for one in range(size) for name in files.get(f"files{one}").decode().split()}
    left = [Path(name) for name in names if Path(name).exists()]
    for path in left:
        path.unlink()
    return len(left)


def test_each_killed_rank_leaves_that_file() -> None:
    settings: Any = {"standins": True, "timeout": 240.0, "check": False}
    settings["env"] = {"NCCL_RUNTIME_CONNECT": "0"}
    outcome = run_ranks(ends_by_a_signal, 3, **settings)[0]
    assert outcome.result == 2, outcome.exception
