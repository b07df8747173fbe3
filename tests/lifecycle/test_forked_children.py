"""Forked children, such as the workers of a DataLoader, do not hold up a recovery."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_job import PATIENCE, FaultJob, all_reduce
from recovery_job import base_store
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg
from reloadpg.testing import run_ranks

FAULTY = 1
LIMIT = timedelta(seconds=20)
"""The timeout of the collective that is to fail before."""


class Injected(Exception):
    """The error of a fault that the tests bring about."""


def with_children(rank: int, size: int, other: bool) -> dict[str, Any]:
    """Each rank has a child that lives through a fault; and a group of gloo besides, if asked to.

    Which connections are that group's is not known, so an abort only closes those of the others.
    """
    job = FaultJob(rank, size)
    if other:
        store = dist.PrefixStore("other", base_store())
        besides = dist.ProcessGroupGloo(store, rank, size, timeout=PATIENCE)
        besides.allreduce([torch.ones(1)]).wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent ends
        os._exit(0)
    raised = []
    try:
        for step in reloadpg.retrying("a", on=(Injected, RuntimeError)):
            with step:
                try:
                    if rank == FAULTY and step.attempt == 1:
                        raise Injected
                    if step.attempt == 1:
                        _set_pg_timeout(LIMIT, job.ring)
                    all_reduce(job.ring)
                except RuntimeError as error:
                    raised.append(str(error))
                    raise
        sums = job.sums()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"raised": raised, "sums": sums}


@pytest.mark.parametrize("other", [False, True])
def test_peers_of_an_abort_are_woken(other: bool) -> None:
    """Their connections end though children have inherited them; nobody waits for a timeout."""
    for rank, found in enumerate(run_ranks(with_children, 4, args=(other,), timeout=280)):
        assert found["sums"]
        assert len(found["raised"]) == (rank != FAULTY)
        assert "Timed out" not in "".join(found["raised"])


def in_a_child(rank: int, size: int) -> list[Any]:
    """What a child can still do: its own connections, and a job of its own."""
    job = FaultJob(rank, size)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        group = dist.ProcessGroupGloo(store, 0, 1, timeout=LIMIT)
        group.allreduce([torch.ones(1)]).wait()
        os.write(writing, b"done")
        os._exit(0)
    said = os.read(reading, 4)
    os.waitpid(child, 0)
    return [said, job.sums()]


def test_the_parent_keeps_its_connections() -> None:
    """And a child can make groups of its own."""
    assert run_ranks(in_a_child, 4, timeout=280) == [[b"done", True]] * 4
