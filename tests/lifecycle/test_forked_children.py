"""Forked children, such as the workers of a DataLoader, hold the connections of their parent."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from helpers.fault_job import Injected, Job, all_reduce
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg

FAULTY = 1
LIMIT = timedelta(seconds=5)
"""The timeout of the collective that waits for a rank that has failed."""


@pytest.mark.ranks(4)
def test_a_recovery_completes_while_a_forked_child_holds_gloos_connections(rank: int) -> None:
    """The peers of an abort may wait for the timeout of their collective, and not longer."""
    job = Job("gloo")
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
