"""Between a failure and the next reload: new groups, late creations, second interrupts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import faulty_gloo
import pytest
import torch
import torch.distributed as dist
import worlds
from recovery_job import signalling

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.lifecycle.recreate import Releases
from reloadpg.rendezvous.worker_thread import Attempt
from reloadpg.testing import simulated

BOUND_S = 60.0
"""Seconds; no rank reaches it."""


def summed(group: Any) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def fail() -> None:
    raise RuntimeError("on purpose")


def fails(call: Callable[[], object], own: type[Exception], rank: int) -> None:
    """Call an operation that fails on rank 1."""
    with pytest.raises(own if rank == 1 else reloadpg.PeerFailedError):
        call()


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.parametrize("world", [True, False])
def test_a_group_can_be_created_after_a_failed_reload(rank: int, world: bool) -> None:
    """It does not wait for the abandoned creation, which holds the store client that torch uses for
    all groups (failures 14, 19).
    """
    faulty_gloo.register()
    reloadpg.install(backends={"faulty"}, world=world, timeout=timedelta(seconds=BOUND_S))
    worlds.init("faulty")
    first, last = dist.new_group([0, 1]), dist.new_group([0, 1])
    reloadpg.offload()
    if rank == 1:
        faulty_gloo.inject("create", fail, group=f"{last.group_name}@*")
    fails(reloadpg.reload, reloadpg.RebuildError, rank)  # rank 0 is still creating `last`
    begun = time.monotonic()
    made = dist.new_group([0, 1])
    assert time.monotonic() - begun < BOUND_S
    assert summed(made) == 2.0
    assert world or summed(None) == 2.0
    reloadpg.reload()
    assert [summed(group) for group in (first, last, made, None)] == [2.0] * 4


@pytest.mark.skipif(worlds.BOUND, reason="the device that torch looks for is not here")
@pytest.mark.ranks(2)
def test_a_group_can_be_created_where_only_some_ranks_have_a_new_world(rank: int) -> None:
    """All ranks use the store of the WORLD before the reload."""
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    summed(None)
    reloadpg.offload()
    if rank == 1:
        simulated.inject(simulated.Fault("create"))
    # The creation of WORLD is local here: rank 0 has completed it.
    fails(reloadpg.reload, reloadpg.RebuildError, rank)
    made = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=10))
    assert summed(made) == 2.0
    for operation in (reloadpg.reload, reloadpg.offload, reloadpg.reload):
        operation()
    assert summed(None) == 2.0


@pytest.mark.ranks(2)
def test_a_group_whose_creation_ends_after_the_timeout_is_discarded(rank: int) -> None:
    """It is removed from c10d's tables, and the next reload creates another one."""
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=5))
    dist.init_process_group("sim")
    pair = dist.new_group([0, 1], group_desc="pair")
    names = {*dist.distributed_c10d._world.pg_names.values()}
    reloadpg.offload()
    if rank == 1:
        simulated.inject(simulated.Fault("create", "stall"))
    with pytest.raises(reloadpg.RendezvousTimeoutError):
        reloadpg.reload()
    simulated.clear_faults()
    end = time.monotonic() + BOUND_S
    while reloadpg.status().unfinished and time.monotonic() < end:
        time.sleep(0.01)
    assert {*dist.distributed_c10d._world.pg_names.values()} <= names
    reloadpg.reload()
    assert (summed(pair), summed(None)) == (2.0, 2.0)


@pytest.mark.ranks(2)
def test_a_release_that_was_abandoned_before_it_began_changes_nothing() -> None:
    """Its thread may reach the group just after the operation has failed."""
    reloadpg.install(backends={worlds.BACKEND})
    worlds.init()
    pair: Any = dist.new_group([0, 1])
    attempt = Attempt()
    attempt.abandon()
    Releases(registry.job("test")).release(pair, attempt, 0)
    assert (pair.is_live, summed(pair)) == (True, 2.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at", ["failure", "release"])
def test_a_second_interrupt_leaves_all_ranks_in_the_same_state(rank: int, at: str) -> None:
    """The user presses Ctrl-C again while the other ranks are notified of a failure, or while the
    first communicator is aborted. The next reload completes.
    """
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    reloadpg.offload()
    if rank == 1:
        simulated.inject(simulated.Fault("create", nth=2))
        again = signalling(signal.SIGINT, KeyboardInterrupt())
        simulated.inject(simulated.Fault(at, "call", call=lambda _: again()))  # type: ignore[arg-type]
    own = (reloadpg.RebuildError, KeyboardInterrupt)
    with pytest.raises(own if rank == 1 else reloadpg.PeerFailedError):
        reloadpg.reload()
    assert {str(group.state) for group in groups} == {"failed"}
    reloadpg.reload()
    assert {summed(group) for group in groups} == {2.0}
    assert len({group.generation for group in groups}) == 1


@pytest.mark.ranks(2)
def test_a_second_interrupt_loses_no_communicator() -> None:
    """The group had dropped its communicator, and no other object referred to it: it was never
    aborted.
    """
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S), parallelism=1)
    worlds.init("sim")
    groups = [dist.group.WORLD, *(dist.new_group([0, 1]) for _ in range(8))]
    for group in groups:
        summed(group)
    others = [group.communicator for group in groups]  # a referenced one ends only by an abort
    simulated.inject(simulated.Fault("release", operation="shutdown"))
    again = signalling(signal.SIGINT, KeyboardInterrupt())
    simulated.inject(simulated.Fault("release", "call", operation="abort", call=lambda _: again()))
    with pytest.raises((reloadpg.ReleaseError, reloadpg.PeerFailedError)):
        reloadpg.offload()
    simulated.clear_faults()
    end = time.monotonic() + BOUND_S
    while simulated.stats().held_bytes and time.monotonic() < end:
        time.sleep(0.01)
    assert simulated.stats().held_bytes == 0
    others.clear()
    reloadpg.reload()
    assert {summed(group) for group in groups} == {2.0}
