"""A rank that can start no thread: all ranks raise, name it and its cause, and then go on."""

from __future__ import annotations

import os
import resource

import pytest
from helpers import worlds
from helpers.fault_job import ALLOWANCE, FAR, Job, attempt, interfere
from helpers.sampling import sampled

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without threads"),
]

LIMITED = 1
"""The rank that can start no thread."""
USER = 54_321
"""A user without other processes; the limit does not apply to root."""


def under_a_limit(rank: int, size: int, point: str) -> None:
    os.environ |= worlds.SILENCE
    job = Job(subgroups=((0, 1), (1, 0)), timeout=FAR, parallelism=2)
    job.cycle()
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if rank == LIMITED:
        os.setresuid(USER, USER, 0)
        interfere(point, lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1, most)))
    if point.startswith("reload"):
        reloadpg.offload()
    for _ in range(2):
        seen = attempt(reloadpg.offload if point.startswith("offload") else reloadpg.reload)
        assert seen.kind == ("ReloadpgError" if rank == LIMITED else "PeerFailedError"), seen
        assert "cannot start a thread" in seen.text
        assert rank == LIMITED or seen.rank == LIMITED
        assert seen.seconds < ALLOWANCE
    if rank == LIMITED:
        os.setresuid(0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    job.meet("the limit is raised")
    reloadpg.reload()
    job.assert_live()
    job.cycle()


@pytest.mark.parametrize("point", sampled(["offload.enter", "reload.enter"], "offload.enter"))
def test_a_rank_that_cannot_start_a_thread_is_named(point: str) -> None:
    """It notifies the others with a thread that it has started before."""
    run_ranks(under_a_limit, 2, args=(point,), timeout=200)
