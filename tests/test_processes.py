"""A process on the same host that has ended is detected at once, and named on all ranks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers.fault_job import die, survivors

import reloadpg
from reloadpg.processes import Peers, start_of
from reloadpg.testing import faults, simulated

TIMEOUT_S = 300.0
"""Longer than the time limit of the test."""


def killed(rank: int, size: int, port: int, victim: int, when: str) -> tuple[str, tuple[int, ...]]:
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=TIMEOUT_S))
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group(simulated.NAME, store=store, rank=rank, world_size=size)
    if when != "at first":
        reloadpg.offload()
        reloadpg.reload()
    store.set(f"test/connected/{rank}", "1")
    if rank == victim and when == "at first":
        store.wait([f"test/connected/{one}" for one in range(size)])
        die()
    if when == "at a barrier":  # the others are on their way to it: late ranks are missing, too
        key = "test/entered"
        others = [f"{key}/{one}" for one in range(size) if one != victim]
        if rank == victim:
            reloadpg.on_offload(lambda: (store.wait(others), die()))
        else:
            reloadpg.on_offload(lambda: store.set(f"{key}/{rank}", "1"))
    elif rank == victim:
        faults.inject(faults.Fault("create", "call", call=lambda _: die()))
    try:
        reloadpg.offload()
        reloadpg.reload()
    except reloadpg.PeerFailedError as error:
        return str(error), error.missing
    return "", ()


@pytest.mark.parametrize(
    ("victim", "when"),
    [(0, "at first"), (2, "at first"), (0, "at a barrier"), (2, "in a rebuild")],
)
def test_a_rank_that_is_killed_is_named_as_dead(victim: int, when: str) -> None:
    """It dies before its first operation, at a barrier, or during a rebuild."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    found = survivors(killed, 3, server.port, victim, when, dead=victim)
    for text, missing in found.values():
        assert f"rank {victim} died" in text
        assert "on the host of rank" in text
        assert missing == (victim,)


def killed_in_bring_up(rank: int, size: int, victim: int) -> tuple[str, tuple[int, ...]]:
    simulated.register()
    simulated.configure(eager=True)
    if rank == victim:
        faults.inject(faults.Fault("create", "call", call=lambda _: die()))
    try:
        reloadpg.environment.init_distributed(simulated.NAME, init_timeout=TIMEOUT_S)
    except reloadpg.PeerFailedError as error:
        return str(error), error.missing
    return "", ()


def test_a_rank_that_is_killed_in_bring_up_is_named_as_dead() -> None:
    """The other ranks are in torch's creating function, which would wait for minutes."""
    victim = 1
    for text, missing in survivors(killed_in_bring_up, 3, victim, dead=victim).values():
        assert f"init_distributed: rank {victim} died" in text
        assert missing == (victim,)


@pytest.mark.ranks(1)
def test_without_a_file_descriptor_no_process_counts_as_ended() -> None:
    """A process that looks up the others may have none left."""
    peers, other, parent = Peers(0), Peers(2), os.getppid()
    peers.meet(f"{peers.entry}1 {parent} {start_of(parent)} 1-1\n")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    dead, entry = peers.dead(), other.entry  # nor to look up itself, when it joins a job
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    peers.meet(entry)
    assert (len(before) > 3, dead, peers.dead()) == (True, (), ())


OTHER = """
from reloadpg.processes import Peers
print(Peers(1).entry, end="", flush=True)
input()
"""


@pytest.mark.slow
def test_a_process_is_identified_by_its_id_and_start_time() -> None:
    """An id may be reused. A process does not watch itself."""
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            peers, deceived = Peers(0), Peers(2)
            entries = peers.entry + other.stdout.readline()
            peers.meet(entries)
            deceived.meet(f"{entries}1 {other.pid} 12345 1-1\n")  # an earlier process had the id
            alive = peers.dead()
        finally:
            other.kill()
            other.wait()
        assert (alive, peers.dead(), deceived.dead()) == ((), (1,), ())
