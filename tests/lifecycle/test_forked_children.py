"""Forked children, such as the workers of a DataLoader, hold the connections of their parent."""

from __future__ import annotations

import logging.handlers
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import Injected, Job, all_reduce
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg

FAULTY = 1
LIMIT = timedelta(seconds=5)
"""The timeout of the collective that waits for a rank that has failed."""


@contextmanager
def a_forked_child() -> Iterator[int]:
    """A child of this process that only exists; its process id."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent ends
        os._exit(0)
    try:
        yield child
    finally:
        os.close(reading)
        os.close(writing)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.ranks(4)
def test_a_recovery_completes_while_a_forked_child_holds_gloos_connections(rank: int) -> None:
    """The peers of an abort may wait for the timeout of their collective, and not longer."""
    job, raised = Job("gloo"), []
    with a_forked_child():
        try:
            if rank == FAULTY:
                raise Injected
            _set_pg_timeout(LIMIT, job.ring)
            all_reduce(job.ring)
        except (Injected, RuntimeError) as error:
            raised.append(str(error))
            reloadpg.recovery.recover()
        assert job.sums()
    assert len(raised) == 1


@pytest.mark.ranks(2)
def test_a_rank_that_waits_for_a_peer_names_the_children_that_hold_its_connections(
    rank: int,
) -> None:
    """In the error of a recovery, and in the log of an abort. A child that has executed another
    program holds none; it may share a socket of another kind. The peer's collective ends with the
    children.
    """
    os.environ |= worlds.SILENCE
    log = logging.handlers.BufferingHandler(capacity=1000)
    logging.getLogger("reloadpg").addHandler(log)
    reloadpg.install(backends={"gloo"})
    children = ExitStack()  # the second child outlives the scope
    with children, pytest.raises(KeyError), reloadpg.environment.process_group_scope():
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        dist.all_reduce(torch.ones(1))
        ours, its = socket.socketpair()
        with subprocess.Popen(["cat"], stdin=its) as other, ours, its:
            if rank == 0:
                with a_forked_child() as child:
                    with pytest.raises(reloadpg.RendezvousTimeoutError) as caught:
                        reloadpg.recovery.recover("a fault", timeout=1)
                    said = f"hold copies of its connections (pid {child}), such as the workers"
                    assert said in str(caught.value)
                    assert caught.value.missing == (1,)
                assert str(other.pid) not in str(caught.value)
            else:
                with pytest.raises(RuntimeError, match=r"(?i)connection"):
                    dist.all_reduce(torch.ones(1))
            reloadpg.recovery.recover("a fault")
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value.item() == 2
        child = children.enter_context(a_forked_child())
        raise KeyError("on both ranks")
    (text,) = [one.getMessage() for one in log.buffer if "are aborted" in one.getMessage()]
    assert f"hold copies of its connections (pid {child}), such as the workers" in text
