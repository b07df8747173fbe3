"""Requests to the store have a deadline and a grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import BOUND, FAR, attempt
from helpers.watched_store import WatchedStore

import reloadpg
from reloadpg.c10d import stores
from reloadpg.rendezvous import store_client
from reloadpg.rendezvous.store_client import StoreClient
from reloadpg.testing import run_ranks
from reloadpg.threads import Deadline


def _stopped_after_the_deadline(rank, world_size):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # Continues this process 4 s after it has closed the pipe and stopped itself.
    command = f"read _; while sleep 4 && kill -CONT {os.getpid()}; do :; done"
    waker = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE)
    pause, pauses = Deadline.pause, []

    def counted(deadline, *args):
        pauses.append(deadline)
        return pause(deadline, *args)

    def until_the_next_pause():
        before = len(pauses)
        while len(pauses) == before:
            time.sleep(0.01)

    def answer(own):
        until_the_next_pause()  # the deadline has passed, and the grace period has begun
        waker.stdin.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        until_the_next_pause()  # the waiting thread has read its clock since
        return own.add("answers", 1)

    client = StoreClient(lambda: store)
    client.ask(
        lambda own: None, Deadline("connect", 60.0)
    )  # the server looks up a host name for it
    Deadline.pause = counted
    return client.ask(answer, Deadline("test", 0.1))


@pytest.mark.slow
def test_a_stopped_process_does_not_use_up_the_grace_period() -> None:
    """A loaded or suspended machine is not an unresponsive store."""
    assert run_ranks(_stopped_after_the_deadline, 1, timeout=240) == [1]


def _creates_with_clients(rank, world_size, file, fault):
    os.environ |= worlds.SILENCE
    made, doing, released = [], [], threading.Event()

    class Slow(WatchedStore):
        """Its first client is that of the barriers, its second one that of the creating thread."""

        def clone(self):
            made.append(self)
            if len(made) > 1:
                doing.append(reloadpg.status().running.doing)
            if rank == 1 and len(made) == 2 and fault == "refused":
                raise RuntimeError("the connection was refused")
            if rank == 1 and len(made) == 2 and fault == "hangs":
                released.wait()
            return super().clone()

    reloadpg.install(backends={"gloo"}, timeout=BOUND if fault == "hangs" else FAR)
    store = Slow(dist.FileStore(file, world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.new_group([0, 1])
    reloadpg.offload()
    clients, seen = [len(made)], attempt(reloadpg.reload)
    released.set()
    for _ in range(2):
        clients.append(len(made))
        reloadpg.reload()
        reloadpg.offload()
    dist.destroy_process_group()
    return seen.kind, seen.text, clients, doing


@pytest.mark.parametrize("fault", ["", "refused", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_creating_thread_connects_once_and_names_the_store_if_it_cannot(
    tmp_path: Path, fault: str
) -> None:
    """Its client is kept for later reloads, and replaced after a failure. An offload makes none.

    The store may accept no further connection, or not respond, while those of the barriers work.
    """
    args = (str(tmp_path / "store"), fault)
    found = run_ranks(_creates_with_clients, 2, args=args, timeout=240)
    kinds, texts, clients, doing = zip(*found, strict=True)
    expected, said = {
        "": (("", ""), ""),
        "refused": (
            ("PeerFailedError", "RebuildError"),
            "RuntimeError: the connection was refused",
        ),
        "hangs": (("RendezvousTimeoutError",) * 2, "> (connecting to the store)"),
    }[fault]
    assert kinds == expected
    assert all(said in text for text in texts)
    assert clients[1] == ([1, 2, 3] if fault else [1, 2, 2])
    for text in (*doing[0], *doing[1]):
        assert text.endswith("> (connecting to the store)")


@pytest.mark.parametrize("executed", [False, True])
def test_only_a_request_that_may_be_repeated_is_repeated_on_a_new_connection(
    executed: bool,
) -> None:
    """Once, whether the connection was reset before it was executed or after that."""
    sent: list[str] = []
    resets = iter([False, True, True, False, False])  # of the first connection: two are reset

    def watch(method: str, key: str) -> None:
        sent.append(key)
        if not executed and next(resets, False):
            raise RuntimeError("Connection reset by peer")

    def answered(method: str, key: str) -> None:
        if executed and next(resets, False):
            raise RuntimeError("Connection reset by peer")

    store = WatchedStore(dist.HashStore(), watch, answered)
    client = StoreClient(lambda: store)
    deadline = Deadline("test", FAR)
    assert client.ask(lambda own: own.add("connects", 1), deadline) == 1
    with pytest.raises(reloadpg.ReloadpgError, match="the rendezvous store is lost: Connection"):
        client.ask(lambda own: own.add("n", 1), deadline)
    # The connection is new now. It is not repeated on another one.
    with pytest.raises(reloadpg.ReloadpgError, match="the rendezvous store is lost: Connection"):
        client.ask(lambda own: own.compare_set("a", "", "1"), deadline, repeats=True)
    assert client.ask(lambda own: own.add("m", 1), deadline) == 1
    resets = iter([True])
    assert client.ask(lambda own: own.compare_set("b", "", "1"), deadline, repeats=True) == b"1"
    assert sent == ["connects", "n", "a", "m", "b", "b"]


@pytest.mark.parametrize("repeats", [False, True])
def test_an_idle_connection_that_does_not_respond_is_replaced(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall may drop what is sent on it. Requests that may not be repeated are sent after a
    check.
    """
    silent, ended, added = threading.Event(), threading.Event(), []

    class First(WatchedStore):
        """Its first clone gets no response once `silent` is set."""

        def clone(self) -> WatchedStore:
            first = not self._clones
            wait = lambda method, key: silent.is_set() and first and ended.wait(FAR)  # noqa: E731
            self._clones.append(WatchedStore(self._store, wait))
            return self._clones[-1]

    store = First(dist.HashStore())
    client = StoreClient(lambda: store)
    assert client.ask(lambda own: own.add("n", 1), Deadline("test", FAR)) == 1
    monkeypatch.setattr(stores, "IDLE_S", 0.0)  # instead of seconds
    monkeypatch.setattr(store_client, "_CHECK_S", 0.2)
    silent.set()

    def add(own: dist.Store) -> int:
        added.append(own)
        return own.add("n", 1)

    try:
        assert client.ask(add, Deadline("test", FAR), repeats=repeats) == 2
    finally:
        ended.set()
    assert len(added) == 1 + repeats
