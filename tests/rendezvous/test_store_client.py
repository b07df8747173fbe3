"""Bounded questions to the store."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch.distributed as dist

from reloadpg.rendezvous.store_client import StoreClient
from reloadpg.rendezvous.worker_thread import Wait
from reloadpg.testing import run_ranks


def _stopped_after_the_bound(rank, world_size):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # Lets this process run on 4 s after it has closed the pipe and stopped itself.
    command = f"read _; while sleep 4 && kill -CONT {os.getpid()}; do :; done"
    waker = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE)
    pause, pauses = Wait.pause, []

    def counted(wait, *args):
        pauses.append(wait)
        return pause(wait, *args)

    def until_the_next_pause():
        before = len(pauses)
        while len(pauses) == before:
            time.sleep(0.01)

    def answer(own):
        until_the_next_pause()  # the bound is past, and the grace has begun
        waker.stdin.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        until_the_next_pause()  # the asking thread has looked at its clock since, and goes on
        return own.add("answers", 1)

    client = StoreClient(lambda: store)
    client.ask(lambda own: None, Wait("connect", 60.0))  # the server looks up a host name for it
    Wait.pause = counted
    return client.ask(answer, Wait("test", 0.1))


def test_the_grace_does_not_pass_while_the_process_is_stopped() -> None:
    """A loaded machine, or one that was suspended, is not a store that does not answer."""
    assert run_ranks(_stopped_after_the_bound, 1, timeout=60) == [1]
