"""Stores and connections that fail in real processes: what ranks raise, and what repairs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers import jobs, worlds
from helpers.fault_job import BOUND, FAR, attempt, meet
from helpers.watched_store import WatchedStore

import reloadpg
from reloadpg.c10d import stores
from reloadpg.rendezvous.round import on_barrier
from reloadpg.testing import run_ranks


def cut_connections() -> None:
    """Shut all connections of this process to the server of the store."""
    stores.shut_store_connections(dist.distributed_c10d._get_default_store())


def at_barrier(place: str, moment: str, call: Callable[[], object]) -> None:
    """Call a function once when this rank reaches a barrier, ``operation.phase``."""
    left = [call]

    def hook(now: str, operation: str, phase: str, _: int) -> None:
        if (now, f"{operation}.{phase}") == (moment, place) and left:
            left.pop()()

    on_barrier(hook)


# -- connections that are reset --------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cut", [(1,), (0, 1)])
def test_a_connection_that_was_reset_while_idle_is_replaced(
    rank: int, cut: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the threads that create groups, too."""
    monkeypatch.setattr(stores, "IDLE_S", 0.0, raising=False)  # instead of minutes
    jobs.start(timeout=FAR)
    for _ in range(2):
        if rank in cut:
            cut_connections()
        reloadpg.offload()
        if rank in cut:
            cut_connections()
        reloadpg.reload()
        assert worlds.sums_right(None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("phase", ["enter", "released"])
def test_a_rank_whose_connection_is_cut_at_a_barrier_tells_the_others(
    rank: int, phase: str
) -> None:
    """On a new one. It may have been counted, so that request is not repeated."""
    os.environ |= worlds.SILENCE
    jobs.start(timeout=FAR)
    if rank == 1:
        at_barrier(f"offload.{phase}", "before", cut_connections)
    seen = attempt(reloadpg.offload)
    if rank == 1:
        assert (seen.kind, "the rendezvous store is lost" in seen.text) == ("ReloadpgError", True)
    else:
        assert (seen.kind, seen.rank) == ("PeerFailedError", 1), seen
    if phase == "enter":
        assert worlds.sums_right(None)  # nothing was changed
        reloadpg.offload()
    reloadpg.reload()
    assert worlds.sums_right(None)


# -- the process that hosts the store --------------------------------------------------------------

ENDS_FIRST = """
import os, sys
import torch.distributed as dist
from datetime import timedelta
import reloadpg
from reloadpg.rendezvous.round import on_barrier
rank, between, way = int(os.environ["RANK"]), dist.FileStore(sys.argv[1], 2), sys.argv[2]
reloadpg.install(backends={"gloo"}, timeout=200)
dist.init_process_group("gloo")
reloadpg.offload()
reloadpg.reload()
if rank == 1:
    on_barrier(lambda moment, operation, phase, rank: (
        between.set("waits", "1") if moment == "waiting" and phase == "released" else None))
else:
    on_barrier(lambda moment, operation, phase, rank: (
        between.wait(["polls"]) if moment == "before" and phase == "released" else None))
print("begins", file=sys.stderr, flush=True)
reloadpg.offload()
print("complete", flush=True)
if rank == 0 and way == "destroy":
    dist.destroy_process_group()
    print("destroyed", flush=True)
"""


@pytest.mark.parametrize("way", ["destroy", "exit"])
def test_the_host_of_the_store_stays_until_a_rank_that_polls_has_read_the_end(
    tmp_path: Path, free_port: int, way: str
) -> None:
    """The operation is complete. A rank polls after a long wait, and is stopped in a pause."""
    between = dist.FileStore(str(tmp_path / "between"), 2)
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(free_port)}
        env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "RELOADPG_LOG_WAIT_S": "1"}
        command = [sys.executable, "-c", ENDS_FIRST, str(tmp_path / "between"), way]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(
            subprocess.Popen(command, env=env | {"RELOADPG_GRACE_S": "60"}, text=True, **pipes)
        )
    try:
        between.wait(["waits"], timedelta(seconds=150))
        assert ranks[1].stderr is not None
        assert "begins\n" in ranks[1].stderr
        # The long wait has ended: it polls.
        assert any("phase released: waiting for" in line for line in ranks[1].stderr)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        between.set("polls", "1")
        assert ranks[0].stdout is not None
        assert any(
            line == "complete\n" for line in ranks[0].stdout
        )  # gloo of torch 2.8 writes, too
        time.sleep(2)
        left = ranks[0].poll()
        os.kill(ranks[1].pid, signal.SIGCONT)
        ends = [(one.communicate(timeout=150), one.returncode) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert left is None, ends
    assert [code for _, code in ends] == [0, 0], ends
    assert ends[1][0][0].endswith("complete\n")


@pytest.mark.ranks(2, store="rank0")
def test_a_store_whose_process_is_stopped_on_this_host_is_said_to_be(rank: int) -> None:
    """One reload repairs when it continues; the job is not lost."""
    os.environ |= worlds.SILENCE
    jobs.start(timeout=BOUND)
    between = dist.FileStore(os.path.join(os.environ["TMPDIR"], "between"), 2)
    between.set(f"pid {rank}", str(os.getpid()))
    other = int(between.get(f"pid {1 - rank}"))
    if rank == 0:
        at_barrier("offload.released", "before", lambda: between.wait(["continued"]))
        attempt(reloadpg.offload)  # rank 1 has arrived at the last barrier
    else:
        at_barrier("offload.released", "waiting", lambda: os.kill(other, signal.SIGSTOP))
        try:
            seen = attempt(reloadpg.offload)
        finally:
            os.kill(other, signal.SIGCONT)
        between.set("continued", "1")
        assert seen.kind == "RendezvousTimeoutError"
        assert "The process of rank 0, which usually has its server, is stopped" in seen.text
        assert "Continue it, then call reload() on all ranks" in seen.text
    reloadpg.reload()
    assert worlds.sums_right(None)


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
sys.stdin.read()
"""
CLIENT = """
import atexit, os, signal, sys, threading, time
left = lambda: [one.name for one in threading.enumerate() if one.name == "reloadpg-store"]
atexit.register(lambda: print("left", left(), flush=True))  # after those of reloadpg
import torch.distributed as dist
from reloadpg import threads
from reloadpg.rendezvous.store_client import StoreClient
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
client = StoreClient(lambda: store)
class Last:
    def __del__(self, kill=os.kill, host=int(sys.argv[2]), go=signal.SIGCONT, sleep=time.sleep):
        kill(host, go)  # in the finalization
        sleep(1)
sys.modules["last"] = Last()
client.ask(lambda own: own.add("n", 1), threads.Deadline("first", 60))
print("connected", flush=True)
sys.stdin.readline()
"""
CONNECTS = """
for number in range(2):
    try:
        client.ask(lambda own: own.add("n", 1), threads.Deadline("next", 1.0))
    except RuntimeError as error:
        print(str(error).split(". ")[0], flush=True)
"""
REQUESTS = """
threads._EXIT_S = 0.1
try:
    client.ask(lambda own: own.get("n"), threads.Deadline("test", 0.1))
except RuntimeError as error:
    print(type(error).__name__, left(), flush=True)
"""


def lines_of(client: str, number: int) -> list[str]:
    """What a client of a store prints that ends after the store's server has got a signal.

    A stopped server continues while the client is finalized.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:
        try:
            port = server.stdout.readline().strip()  # type: ignore[union-attr]
            command = [sys.executable, "-c", CLIENT + client, port, f"{server.pid}"]
            with subprocess.Popen(command, **pipes, stderr=subprocess.PIPE) as process:
                try:
                    assert process.stdout.readline() == "connected\n"  # type: ignore[union-attr]
                    server.send_signal(number)
                    os.waitpid(server.pid, os.WUNTRACED)  # until all of its threads have stopped
                    shown, errors = process.communicate("ended\n", timeout=120)
                finally:
                    process.kill()
        finally:
            server.kill()
    assert process.returncode == 0, errors
    return shown.splitlines()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_can_exit_while_a_connection_is_being_made(end: int) -> None:
    """Torch's call would return while the interpreter is finalized, which is a SIGABRT."""
    *shown, left = lines_of(CONNECTS, end)
    assert (len(shown), left) == (2, "left []")
    if end == signal.SIGKILL:
        assert "no server listens" in "".join(shown)


@pytest.mark.slow
def test_a_request_without_a_response_has_ended_when_the_process_ends() -> None:
    """Its C++ call would return while the interpreter is finalized: SIGABRT before Python 3.14."""
    shown = lines_of(REQUESTS, signal.SIGSTOP)
    assert shown == ["RendezvousTimeoutError ['reloadpg-store']", "left []"]


# -- stores that a program brings ------------------------------------------------------------------


class OwnStore(WatchedStore):
    """A store in Python that can neither be cloned nor delete keys."""

    clone = dist.Store.clone  # type: ignore[assignment]

    def deleteKey(self, key: str) -> bool:
        raise NotImplementedError


class Cloned(OwnStore):
    """It cannot delete keys."""

    def clone(self) -> Cloned:
        self._clones.append(Cloned(self._store.clone()))
        return self._clones[-1]  # type: ignore[return-value]


def on_own_store(rank: int, size: int, path: str, kind: type) -> list[str]:
    os.environ |= worlds.SILENCE
    reloadpg.install(backends={"gloo"}, timeout=FAR)
    dist.init_process_group(
        "gloo", store=kind(dist.FileStore(path, size)), rank=rank, world_size=size
    )
    texts = []
    for call in (reloadpg.offload, reloadpg.reload) * 2:
        texts.append(attempt(call).text)
        if kind is OwnStore:
            assert worlds.sums_right(None)  # nothing was changed
    assert worlds.sums_right(None)
    return texts


def test_a_store_without_a_method_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    """Its class and the methods are named, by each rank."""
    args = (str(tmp_path / "store"), OwnStore)
    for texts in run_ranks(on_own_store, 2, args=args, timeout=240):
        for text in texts:
            assert "OwnStore, does not define clone, which reloadpg needs" in text
            assert "no group was changed" in text
            assert "Restart" not in text


def test_a_store_that_cannot_delete_keys_can_be_used(tmp_path: Path) -> None:
    args = (str(tmp_path / "store"), Cloned)
    assert run_ranks(on_own_store, 2, args=args, timeout=240) == [[""] * 4] * 2


# -- the end of the job ----------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_callback_that_destroys_the_default_group_is_said_to_have(rank: int) -> None:
    """A new job can begin in the same processes."""
    jobs.start(timeout=FAR)
    meet("connected", 2)  # gloo fails on a rank that still connects when the other one destroys
    remove = reloadpg.on_offload(dist.destroy_process_group)
    seen = attempt(reloadpg.offload)
    assert seen.kind == "ReloadpgError"
    assert "the default group was destroyed" in seen.text
    assert "Call init_process_group() for a new job" in seen.text
    assert "Restart" not in seen.text
    remove()
    file = os.path.join(os.environ["TMPDIR"], "next")  # the other store has the keys of gloo
    worlds.init(store=dist.FileStore(file, 2), rank=rank, world_size=2)
    jobs.one_cycle()
    assert worlds.sums_right(None)
