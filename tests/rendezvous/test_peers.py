"""A process on the same host that has ended is found at once, and named as dead on all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

import reloadpg
from reloadpg.rendezvous.peers import Peers
from reloadpg.testing import run_ranks

BOUND_S = 300.0
"""Seconds; longer than the test may last: no rank reaches it."""


def killed(
    rank: int, size: int, port: int, victim: int, when: str
) -> tuple[str, str, tuple[int, ...]]:
    reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=BOUND_S))
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    reloadpg.offload()
    reloadpg.reload()
    if rank == victim and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == victim:
        reloadpg.on_offload(lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        reloadpg.offload()
    except reloadpg.PeerFailedError as error:
        return type(error).__name__, str(error), error.missing
    return "", "", ()


@pytest.mark.parametrize("when", ["before", "in a callback"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named_as_dead(victim: int, when: str) -> None:
    """The others wait for it at a barrier, without the timeout of five minutes.

    Rank 0 is the leader of its host: the others have handed it their arrivals.
    """
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    args = (server.port, victim, when)
    outcomes = run_ranks(killed, 3, args=args, timeout=120, check=False)
    assert outcomes[victim].signal == signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        kind, text, missing = outcome.result
        assert kind == "PeerFailedError"
        assert f"rank {victim} died" in text
        assert "on the host of rank" in text
        assert missing == (victim,)


OTHER = """
from reloadpg.rendezvous.peers import Peers
print(Peers(1).entry(), end="", flush=True)
input()
"""


def test_only_the_very_process_that_was_published_is_watched() -> None:
    """Ids are used again: the start time tells processes apart. One's own is not watched."""
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            peers, deceived = Peers(0), Peers(2)
            entries = peers.entry() + other.stdout.readline()
            assert peers.meet(entries) == (0, 1)
            deceived.meet(f"{entries}1 {other.pid} 12345 x\n")  # its id was another process's
            alive = peers.dead()
        finally:
            other.kill()
            other.wait()
        assert (alive, peers.dead(), deceived.dead()) == ((), (1,), ())
        peers.forget()
