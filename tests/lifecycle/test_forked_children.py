"""Forked children, such as the workers of a DataLoader, do not delay a recovery."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import (
    PATIENCE,
    Injected,
    Job,
    all_reduce,
    attempt,
    base_store,
    die,
    survivors,
)
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg

FAULTY = 1
LIMIT = timedelta(seconds=20)
"""The timeout of a collective that must fail earlier."""


@pytest.mark.ranks(4)
@pytest.mark.parametrize("other", [False, True])
def test_peers_of_an_abort_do_not_wait_for_a_timeout(
    rank: int, world_size: int, other: bool
) -> None:
    """An abort closes connections although a child process has inherited them.

    If there is an unmanaged gloo group, its connections are unknown, so an abort closes only those
    of the other groups.
    """
    job = Job("gloo")
    if other:
        store = dist.PrefixStore("other", base_store())
        unmanaged = dist.ProcessGroupGloo(store, rank, world_size, timeout=PATIENCE)
        unmanaged.allreduce([torch.ones(1)]).wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent ends
        os._exit(0)
    raised = []
    try:
        try:
            if rank == FAULTY:
                raise Injected
            _set_pg_timeout(LIMIT, job.ring)
            all_reduce(job.ring)
        except (Injected, RuntimeError) as error:
            raised.append(str(error))
            reloadpg.recovery.recover()
        assert job.sums()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(raised) == 1
    assert "Timed out" not in "".join(raised)


def dies_before_its_child(rank: int, size: int) -> str:
    """Rank 1 is killed, and its child lives until the other ranks have failed."""
    job = Job("gloo", subgroups=())
    assert job.sums()
    if rank == FAULTY:
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, b"here")
            base_store().clone().wait(["test/failed"], PATIENCE)
            os._exit(0)
        assert os.read(reading, 4) == b"here"
        die()
    _set_pg_timeout(LIMIT, dist.group.WORLD)
    seen = attempt(lambda: all_reduce(dist.group.WORLD))
    base_store().clone().set("test/failed", "1")
    return seen.text


def test_peers_of_a_killed_process_do_not_wait_for_its_children() -> None:
    """The child does not keep the connections of the killed process open."""
    for text in survivors(dies_before_its_child, 2, dead=FAULTY).values():
        assert text
        assert "Timed out" not in text


@pytest.mark.ranks(4)
def test_a_forked_child_can_create_groups() -> None:
    """The parent keeps its connections."""
    job = Job("gloo")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        group = dist.ProcessGroupGloo(store, 0, 1, timeout=LIMIT)
        group.allreduce([torch.ones(1)]).wait()
        os.write(writing, b"done")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 4) == b"done"
    os.waitpid(child, 0)
    assert job.sums()
