"""Requests to the store have a deadline and a grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.fault_job import eventually
from helpers.watched_store import WatchedStore

import reloadpg
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


def _connects_in_the_reload(rank, world_size, file):
    connected, seen = [], []

    def reload_waits():
        running = reloadpg.status().running
        return running is not None and (running.operation, running.doing) == (
            "reload",
            "connecting to the store",
        )

    class Slow(WatchedStore):
        """Connects its first client, that of the barriers, and no other before a reload waits."""

        def clone(self):
            connected.append(self)
            if len(connected) > 1:
                seen.append(eventually(reload_waits))
            return super().clone()

    reloadpg.install(backends={"gloo"})
    store = Slow(dist.FileStore(file, world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.new_group([0, 1])
    reports = reloadpg.offload(), reloadpg.reload()
    dist.destroy_process_group()
    return [[span.name for span in one.spans].count("store") > 0 for one in reports], seen


def test_a_reload_connects_its_clients_and_an_offload_does_not_wait_for_them(
    tmp_path: Path,
) -> None:
    """The store's server looks up the host name of each new client, and serves none while it does.

    The clients are connected in the background after the offload. A reload that has to wait for
    them says so, and its report has it as a phase.
    """
    found = run_ranks(_connects_in_the_reload, 2, args=(str(tmp_path / "store"),), timeout=240)
    assert found == [([False, True], [True, True])] * 2


ENDS_WITH_A_REQUEST = """
import atexit, sys, threading
left = lambda: [one.name for one in threading.enumerate() if one.name == "reloadpg-store"]
atexit.register(lambda: print("left", left(), flush=True))  # after those of reloadpg
import torch.distributed as dist
from reloadpg import threads
from reloadpg.errors import RendezvousTimeoutError
from reloadpg.rendezvous.store_client import StoreClient
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
client = StoreClient(lambda: store)
client.ask(lambda own: own.set("key", "value"), threads.Deadline("connect", 60.0))
print("connected", flush=True)
sys.stdin.readline()
threads._EXIT_S = 0.1
try:
    client.ask(lambda own: own.get("key"), threads.Deadline("test", 0.1))
except RendezvousTimeoutError:
    print("silent", left(), flush=True)
"""


@pytest.mark.slow
def test_a_request_without_a_response_has_ended_when_the_process_ends() -> None:
    """Its C++ call would return while the interpreter is finalized: SIGABRT before Python 3.14."""
    server = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True)\n"
    server += "print(s.port, flush=True); sys.stdin.read()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", server], **pipes) as host:
        try:
            port = host.stdout.readline().decode().strip()
            command = [sys.executable, "-c", ENDS_WITH_A_REQUEST, port]
            pipes["stderr"] = subprocess.PIPE
            with subprocess.Popen(command, **pipes, text=True) as client:
                try:
                    assert client.stdout.readline() == "connected\n"
                    host.send_signal(signal.SIGSTOP)
                    os.waitpid(host.pid, os.WUNTRACED)  # until all of its threads have stopped
                    shown, errors = client.communicate("stopped\n", timeout=120)
                finally:
                    client.kill()
        finally:
            host.kill()
    assert shown == "silent ['reloadpg-store']\nleft []\n", errors
    assert client.returncode == 0
