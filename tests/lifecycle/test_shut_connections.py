"""Connections that an abort of gloo groups shuts down."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import base_store, connections

import reloadpg
from reloadpg import c10d
from reloadpg.recovery import recovering
from reloadpg.rendezvous.worker_thread import Task
from reloadpg.testing import run_ranks

LIMIT = timedelta(seconds=20)
"""The timeout of collectives; only a rank that is not notified reaches it."""


@pytest.mark.ranks(3)
def test_a_connection_that_closes_during_the_search_does_not_keep_the_others_open() -> None:
    """Gloo's thread closes one of two; if the other stayed open, peers would wait for timeouts."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    found, fstat = [*filter(has_peer, connections())], os.fstat

    def look(descriptor: int) -> Any:
        if descriptor == min(found):
            raise OSError("closed")
        return fstat(descriptor)

    # Mocked, since gloo's threads would close the connections before they can be counted.
    with mock.patch.object(socket.socket, "shutdown") as shut, mock.patch.object(os, "fstat", look):
        c10d.shut_connections([], 1)
    assert len(found) - shut.call_count == 1


def test_a_wait_for_peers_ends_when_they_have_closed() -> None:
    """The connections are closed then, not at the timeout."""
    pairs = [socket.socketpair() for _ in range(2)]
    wait = Task(lambda: c10d.await_peers([mine for mine, _ in pairs], 1e4), "peers")
    for _, peer in pairs:
        peer.close()
    assert wait.wait(LIMIT.total_seconds() * 3)
    assert [mine.fileno() for mine, _ in pairs] == [-1, -1]


def has_peer(descriptor: int) -> bool:
    """Whether a socket is connected, and not listening."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        try:
            one.getpeername()
        except OSError:
            return False
        return True


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process with all of its threads within this block, as on a loaded machine."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ended(works: list[Any]) -> set[str]:
    """The results of works."""
    found = set()
    for work in works:
        try:
            work.wait()
            found.add("complete")
        except RuntimeError as error:
            found.add("timed out" if "Timed out" in str(error) else "closed")
    return found


def aborts(rank: int, size: int, what: str) -> set[str]:
    """Abort the group on rank 0 while rank 1 is stopped; return how the works end."""
    dist.init_process_group("gloo", timeout=LIMIT)
    dist.all_reduce(torch.ones(1))
    store, group = base_store().clone(), dist.group.WORLD
    if rank == 1:
        sends = range(20) if what == "peer's sends" else ()
        works = [dist.isend(torch.ones(1), 0, tag=tag) for tag in sends]
        store.set("pid", str(os.getpid()))
        store.wait(["aborted"])
        return ended(works)
    with stopped(int(store.get("pid"))):
        if what == "peer's sends":
            works = [dist.irecv(torch.ones(1), 1, tag=tag) for tag in range(20)]
        else:
            works = [dist.all_reduce(torch.ones(1), async_op=True)]
        held = c10d.shut_connections([group])
        found = ended(works)
        del works, group
        dist.destroy_process_group()
        gc.collect()
        store.set("aborted", "1")
    c10d.await_peers(held, LIMIT.total_seconds())
    return found


@pytest.mark.parametrize("what", ["own collective", "peer's sends"])
def test_no_pending_work_waits_for_its_timeout(what: str) -> None:
    """This holds for works of this rank and for sends that a peer has begun.

    Gloo drops a send that it cannot write because the connection is closed.
    """
    own, peer = run_ranks(aborts, 2, args=(what,), timeout=240)
    assert own == {"closed"}
    assert peer <= {"complete", "closed"}


def recovers(rank: int, size: int) -> set[str]:
    """Recover on rank 0 while rank 1 is stopped; return how the sends of rank 1 end."""
    reloadpg.install(backends={"gloo"}, timeout=60)
    dist.init_process_group("gloo", timeout=LIMIT)
    dist.all_reduce(torch.ones(1))
    store, found = base_store().clone(), set[str]()
    if rank == 1:
        works = [dist.isend(torch.ones(1), 0, tag=tag) for tag in range(20)]
        store.set("pid", str(os.getpid()))
        store.wait(["recovering"])
        found = ended(works)
        del works
    else:
        pid = int(store.get("pid"))
        os.kill(pid, signal.SIGSTOP)
        for tag in range(20):
            dist.irecv(torch.ones(1), 1, tag=tag)
        store.set("recovering", "1")
        threading.Timer(3.0, os.kill, (pid, signal.SIGCONT)).start()
    with mock.patch.object(recovering, "_SHUT_S", 0.0):  # as on a loaded machine
        reloadpg.recovery.recover("a test")
    dist.all_reduce(torch.ones(1))
    return found


def test_a_recovery_that_does_not_wait_for_peers_keeps_their_connections() -> None:
    """Their sends end before their timeout."""
    assert run_ranks(recovers, 2, timeout=240)[1] <= {"complete", "closed"}


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(1 - lazy, marks=pytest.mark.ranks(2, env={"TORCH_GLOO_LAZY_INIT": str(lazy)}))
        for lazy in (0, 1)
    ],
    ids=["eager", "lazy"],
)
def test_an_abort_does_not_keep_lazy_connections(rank: int, kept: int) -> None:
    """With a lazy connection, gloo's thread ends the process when the device is destroyed."""
    dist.init_process_group("gloo", timeout=LIMIT)
    dist.all_reduce(torch.ones(1))
    store = c10d.root_store(dist.group.WORLD)
    if rank == 0:  # the peer keeps its end open until then
        assert len(c10d.shut_connections([dist.group.WORLD])) == kept
        store.set("shut", "1")
        store.wait(["seen"])
    else:
        store.wait(["shut"])
        store.set("seen", "1")
