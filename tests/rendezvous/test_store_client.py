"""Bounded questions to the store."""

from __future__ import annotations

import time

import torch.distributed as dist
import worlds

from reloadpg.rendezvous.store_client import StoreClient
from reloadpg.rendezvous.worker_thread import Wait
from reloadpg.testing import run_ranks


def _stopped_after_the_bound(rank, world_size):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def answer(own):
        for _ in range(16):  # 0.6 s past the bound, if it runs
            time.sleep(0.1)
        return own.add("answers", 1)

    client = StoreClient(lambda: store)
    client.ask(lambda own: None, Wait("connect", 60.0))  # the server looks up a host name for it
    worlds.stop_for(4.0, after=1.3)
    return client.ask(answer, Wait("test", 1.0))


def test_the_grace_does_not_pass_while_the_process_is_stopped() -> None:
    """A loaded machine, or one that was suspended, is not a store that does not answer."""
    assert run_ranks(_stopped_after_the_bound, 1, timeout=60) == [1]
