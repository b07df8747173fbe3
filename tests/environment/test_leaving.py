"""Barriers end when another rank has left its block by an exception, or its process has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from helpers.fault_job import survivors

import reloadpg
from reloadpg import environment
from reloadpg.testing import faults

LIMIT_S = 240.0
"""Timeout of each wait: longer than a test may take."""


@contextmanager
def on_arrival(key: str) -> Iterator[None]:
    """Set a key of the store when this rank waits for others in a barrier."""
    store = dist.distributed_c10d._get_default_store()
    fault = faults.Fault(
        *("barrier", "call"),
        operation="barrier 'after eval'.arrive",
        moment="waiting",
        call=lambda _: store.set(key, "1"),
    )
    with faults.inject(fault):
        yield


@contextmanager
def block(kind: str) -> Iterator[Any]:
    """A block that owns the default group, or one group over a default group that existed.

    Yields the group of the barrier inside it.
    """
    if kind == "context":
        with environment.init_distributed(init_timeout=LIMIT_S):
            yield None
        return
    if kind.startswith("over"):
        dist.init_process_group("gloo")
    with environment.process_group_scope(timeout=LIMIT_S):
        if kind.startswith("scope"):
            dist.init_process_group("gloo")
        inside = dist.new_group([0, 1])
        yield inside if kind.endswith("its group") else None


KINDS = ("context", "scope", "scope, its group", "over a world, its group", "over a world")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_barrier_ends_with_the_error_of_a_rank_that_has_left_the_block(
    kind: str, met: bool, rank: int
) -> None:
    """Whichever group the block owns and the barrier is on; also the first barrier of a job."""
    expected = ValueError if rank == 0 else reloadpg.PeerFailedError
    with pytest.raises(expected) as caught, block(kind) as group:
        store = dist.distributed_c10d._get_default_store()
        if met:
            environment.barrier("all are here", group=group)
        if rank == 0:
            store.wait(["rank 1 waits"], timedelta(seconds=LIMIT_S))
            raise ValueError("the loss is NaN")
        with on_arrival("rank 1 waits"):
            environment.barrier("after eval", timeout=LIMIT_S, group=group)
    if rank == 1:
        assert isinstance(caught.value, reloadpg.PeerFailedError)
        assert caught.value.rank == 0
        for words in ("barrier 'after eval'", "rank 0", "ValueError: the loss is NaN"):
            assert words in str(caught.value)


def die_before_a_barrier(
    rank: int, size: int, port: int, ranks: list[int] | None, known: str
) -> Any:
    if known == "installed":
        reloadpg.install(backends={"gloo"})
    if known == "by bring-up":
        environment.init_distributed("gloo", init_timeout=LIMIT_S)
    else:
        client = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=size)
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(ranks) if ranks else None
    if known == "by a barrier":
        environment.barrier("all are here")
    if rank == 2:
        store.wait(["rank 1 waits"], timedelta(seconds=LIMIT_S))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with on_arrival(f"rank {rank} waits"):
            environment.barrier("after eval", timeout=LIMIT_S, group=group)
    except reloadpg.PeerFailedError as error:
        return str(error), error.rank, error.missing
    return None


@pytest.mark.parametrize(
    ("ranks", "known"),
    [(None, "by a barrier"), (None, "by bring-up"), ([1, 2], "installed")],
)
def test_a_barrier_ends_when_a_process_of_this_host_has_ended(
    ranks: list[int] | None, known: str
) -> None:
    """Each rank that waits for it names it, by its rank in the job."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    found = survivors(die_before_a_barrier, 3, server.port, ranks, known, dead=2)
    if ranks:
        assert found.pop(0) is None
    assert found
    for text, rank, missing in found.values():
        assert f"barrier 'after eval': rank {1 if ranks else 2} died" in text
        assert ("ranks of the group, which has ranks 1-2 of the job" in text) == bool(ranks)
        assert (rank, missing) == (2, (2,))
