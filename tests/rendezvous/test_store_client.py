"""Requests to the store have a deadline and a grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch.distributed as dist

from reloadpg.rendezvous.store_client import StoreClient
from reloadpg.rendezvous.worker_thread import Wait
from reloadpg.testing import run_ranks


def _stopped_after_the_deadline(rank, world_size):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    # Continues this process 4 s after it has closed the pipe and stopped itself.
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
        until_the_next_pause()  # the deadline has passed, and the grace period has begun
        waker.stdin.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        until_the_next_pause()  # the waiting thread has read its clock since
        return own.add("answers", 1)

    client = StoreClient(lambda: store)
    client.ask(lambda own: None, Wait("connect", 60.0))  # the server looks up a host name for it
    Wait.pause = counted
    return client.ask(answer, Wait("test", 0.1))


def test_a_stopped_process_does_not_use_up_the_grace_period() -> None:
    """A loaded or suspended machine is not an unresponsive store."""
    assert run_ranks(_stopped_after_the_deadline, 1, timeout=240) == [1]
