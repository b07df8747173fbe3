"""A process on the same host that has ended is found at once, and named as dead on all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.rendezvous.peers import Peers
from reloadpg.testing import run_ranks

BOUND_S = 300.0
"""Seconds; longer than the test may last: no rank reaches it."""


def killed(rank: int, size: int, when: str) -> tuple[str, str, tuple[int, ...]]:
    reloadpg.install(backends={"gloo"}, timeout=timedelta(seconds=BOUND_S))
    worlds.init("gloo")
    reloadpg.offload()
    reloadpg.reload()
    if rank == 2 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        reloadpg.on_offload(lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        reloadpg.offload()
    except reloadpg.PeerFailedError as error:
        return type(error).__name__, str(error), error.missing
    return "", "", ()


@pytest.mark.parametrize("when", ["before", "in a callback"])
def test_a_rank_that_is_killed_is_named_as_dead(when: str) -> None:
    """The others wait for it at a barrier, without the timeout of five minutes."""
    outcomes = run_ranks(killed, 3, args=(when,), timeout=120, check=False)
    assert outcomes[2].signal == signal.SIGKILL
    for outcome in outcomes[:2]:
        kind, text, missing = outcome.result
        assert kind == "PeerFailedError"
        assert "rank 2 died" in text
        assert "on the host of rank" in text
        assert missing == (2,)


OTHER = """
import sys
import torch.distributed as dist
from reloadpg.rendezvous.peers import Peers
Peers(1).publish(dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False), "host")
print("here", flush=True)
input()
"""


def test_only_the_very_process_that_was_published_is_watched() -> None:
    """Ids are used again: the start time tells processes apart. One's own is not watched."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    command = [sys.executable, "-c", OTHER, str(store.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"here\n"
            peers, deceived = Peers(0), Peers(2)
            peers.publish(store, "host")
            assert peers.meet(store, "host") == (0, 1)
            store.append("host", f"1 {other.pid} 12345 x\n")  # as if its id had been another's
            deceived.meet(store, "host")
            alive = peers.dead()
        finally:
            other.kill()
            other.wait()
        assert (alive, peers.dead(), deceived.dead()) == ((), (1,), ())
