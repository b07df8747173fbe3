"""Between a failure and the next reload: new groups, late creations, second interrupts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import BOUND, Job, eventually, signalling

import reloadpg
from reloadpg.lifecycle import workers
from reloadpg.lifecycle.destroy import Releases
from reloadpg.lifecycle.job import jobs
from reloadpg.testing import faults, simulated
from reloadpg.threads import CancelToken


def fails(call: Callable[[], object], own: type[Exception], rank: int) -> None:
    """Call an operation that fails on rank 1."""
    with pytest.raises(own if rank == 1 else reloadpg.PeerFailedError):
        call()


@pytest.mark.skipif(worlds.BOUND, reason="torch needs the device that the group is bound to")
@pytest.mark.ranks(2)
def test_a_group_can_be_created_where_only_some_ranks_have_a_new_world(rank: int) -> None:
    """All ranks use the store of the WORLD before the reload."""
    job = Job("sim", subgroups=())
    reloadpg.offload()
    if rank == 1:
        faults.inject(faults.Fault("create"))
    # The creation of WORLD is local here: rank 0 has completed it.
    fails(reloadpg.reload, reloadpg.errors.RebuildError, rank)
    made = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=10))
    assert worlds.sums_right(made)
    for operation in (reloadpg.reload, reloadpg.offload, reloadpg.reload):
        operation()
    job.assert_live()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_group_whose_creation_ends_after_the_timeout_is_discarded(rank: int) -> None:
    """It is removed from c10d's tables, and the next reload creates another one."""
    job = Job("sim", subgroups=[(0, 1)], timeout=BOUND)
    names = {*dist.distributed_c10d._world.pg_names.values()}
    reloadpg.offload()
    if rank == 1:
        faults.inject(faults.Fault("create", "stall"))
    with pytest.raises(reloadpg.RendezvousTimeoutError):
        reloadpg.reload()
    faults.clear_faults()
    assert eventually(lambda: not reloadpg.status().unfinished)
    job.meet("discarded")
    assert {*dist.distributed_c10d._world.pg_names.values()} <= names
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_a_release_that_was_abandoned_before_it_began_changes_nothing() -> None:
    """Its thread may reach the group after the operation has failed."""
    job, current = Job(subgroups=[(0, 1)]), jobs.current("test")
    assert current is not None
    wanted = CancelToken()
    wanted.cancel()
    Releases(current).destroy(job.groups["g0"]._managed, wanted, 0)
    job.assert_live()


@pytest.mark.ranks(2)
def test_a_second_interrupt_leaks_no_communicator() -> None:
    """A communicator that the group has already dropped is aborted as well."""
    workers._ABORT_S = 60.0  # the interrupt comes while the failed operation waits for the aborts
    job = Job("sim", subgroups=[(0, 1)] * 8, parallelism=1)
    # A communicator that is referenced elsewhere is released only by an abort.
    others = [group._managed.communicator for group in job.groups.values()]
    faults.inject(faults.Fault("release", operation="shutdown"))
    again = signalling(signal.SIGINT, KeyboardInterrupt())
    faults.inject(faults.Fault("release", "call", operation="abort", call=lambda _: again()))
    with pytest.raises((reloadpg.errors.ReleaseError, reloadpg.PeerFailedError, KeyboardInterrupt)):
        reloadpg.offload()
    faults.clear_faults()
    assert eventually(lambda: simulated.stats().held_bytes == 0)
    others.clear()
    reloadpg.reload()
    job.assert_live()
