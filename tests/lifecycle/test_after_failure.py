"""Between a failure and the next reload: the job can go on making groups."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import faulty_gloo
import moments
import pytest
import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.lifecycle.recreate import Releases
from reloadpg.rendezvous.worker_thread import Attempt
from reloadpg.testing import run_ranks, simulated

BOUND_S = 60.0
"""Seconds; no rank reaches it."""


def summed(group: Any) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def kind_of(function: Any) -> str:
    try:
        function()
    except reloadpg.ReloadpgError as error:
        return type(error).__name__
    return ""


def fail() -> None:
    raise RuntimeError("on purpose")


def after_a_failed_reload(rank: int, size: int, world: bool) -> dict[str, Any]:
    faulty_gloo.register()
    reloadpg.install(backends={"faulty"}, world=world, timeout=timedelta(seconds=BOUND_S))
    worlds.init("faulty")
    first, last = dist.new_group([0, 1]), dist.new_group([0, 1])
    reloadpg.offload()
    if rank == 1:
        faulty_gloo.inject("create", fail, group=f"{last.group_name}@*")
    failed = kind_of(reloadpg.reload)  # rank 0 is left in the creation of `last`
    begun = time.monotonic()
    made = dist.new_group([0, 1])
    seconds = time.monotonic() - begun
    sums = [summed(made)] + ([] if world else [summed(None)])
    after = kind_of(reloadpg.reload)
    sums += [summed(group) for group in (first, last, made, None)]
    return {"failed": failed, "seconds": seconds, "after": after, "sums": set(sums)}


@pytest.mark.matrix
@pytest.mark.parametrize("world", [True, False])
def test_a_group_can_be_made_after_a_failed_reload(world: bool) -> None:
    """The creation that was given up holds the store client that torch makes all groups with; a
    new group does not wait for it (failures 14, 19).
    """
    for rank, seen in enumerate(run_ranks(after_a_failed_reload, 2, args=(world,), timeout=200)):
        assert seen["failed"] == ("RebuildError" if rank == 1 else "PeerFailedError")
        assert seen["seconds"] < BOUND_S
        assert (seen["after"], seen["sums"]) == ("", {2.0})


def after_world_on_one_rank(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    summed(None)
    reloadpg.offload()
    if rank == 1:
        simulated.inject(simulated.Fault("create"))
    failed = kind_of(reloadpg.reload)  # creating WORLD is local here: rank 0 has done it
    sums = {summed(dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=10)))}
    after = [kind_of(reloadpg.reload), kind_of(reloadpg.offload), kind_of(reloadpg.reload)]
    return {"failed": failed, "after": set(after), "sums": sums | {summed(None)}}


@pytest.mark.skipif(worlds.BOUND, reason="the device that torch looks for is not here")
def test_a_group_can_be_made_where_only_some_ranks_have_a_new_world() -> None:
    """All look for each other under one name in the store, the one before the reload."""
    for rank, seen in enumerate(run_ranks(after_world_on_one_rank, 2, timeout=200)):
        assert seen["failed"] == ("RebuildError" if rank == 1 else "PeerFailedError")
        assert (seen["after"], seen["sums"]) == ({""}, {2.0})


def created_too_late(rank: int, size: int) -> tuple[str, list[str], set[float]]:
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=5))
    dist.init_process_group("sim")
    pair = dist.new_group([0, 1], group_desc="pair")
    names = sorted(dist.distributed_c10d._world.pg_names.values())
    reloadpg.offload()
    if rank == 1:
        simulated.inject(simulated.Fault("create", "stall"))
    failed = kind_of(reloadpg.reload)
    simulated.clear_faults()
    end = time.monotonic() + BOUND_S
    while reloadpg.status().unfinished and time.monotonic() < end:
        time.sleep(0.01)
    left = sorted(set(dist.distributed_c10d._world.pg_names.values()) - set(names))
    reloadpg.reload()
    return failed, left, {summed(pair), summed(None)}


def test_a_group_whose_creation_ends_after_it_was_given_up_is_discarded() -> None:
    """Nothing of it stays in c10d's tables, and the next reload builds another one."""
    expected = ("RendezvousTimeoutError", [], {2.0})
    assert run_ranks(created_too_late, 2, timeout=200) == [expected] * 2


def release_given_up(rank: int, size: int) -> tuple[bool, float]:
    reloadpg.install(backends={worlds.BACKEND})
    worlds.init()
    pair = dist.new_group([0, 1])
    attempt = Attempt()
    attempt.abandon()
    Releases(registry.job("test")).release(pair, attempt, 0)
    return pair.is_live, summed(pair)


def test_a_release_that_was_given_up_before_it_began_touches_nothing() -> None:
    """The thread may come to the group just after the operation has failed."""
    assert run_ranks(release_given_up, 2, timeout=200) == [(True, 2.0)] * 2


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted_twice(rank: int, size: int, at: str) -> dict[str, Any]:
    faulty_gloo.register()
    reloadpg.install(backends={"faulty"}, timeout=timedelta(seconds=BOUND_S))
    worlds.init("faulty")
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    reloadpg.offload()
    if rank == 1:
        faulty_gloo.inject("create", fail)
        moments.at(at, interrupt)
    try:
        reloadpg.reload()
    except BaseException as error:
        kind = type(error).__name__
    states = {(str(group.state), group.generation) for group in groups}
    again = kind_of(reloadpg.reload)
    return {"kind": kind, "states": states, "again": again, "sums": {summed(g) for g in groups}}


@pytest.mark.parametrize("at", ["telling", "abandoning"])
def test_a_second_interrupt_leaves_the_ranks_alike(at: str) -> None:
    """The user presses Ctrl-C again while the first failure is being told: no rank keeps another
    generation or another state than the others, and the next reload completes.
    """
    for rank, seen in enumerate(run_ranks(interrupted_twice, 2, args=(at,), timeout=200)):
        if rank == 0:
            assert seen["kind"] == "PeerFailedError"
        else:
            assert seen["kind"] in ("RebuildError", "KeyboardInterrupt")
        assert {state for state, _ in seen["states"]} == {"failed"}
        assert (seen["again"], seen["sums"]) == ("", {2.0})


def interrupted_while_aborting(rank: int, size: int) -> tuple[str, int, set[float]]:
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S), parallelism=1)
    worlds.init("sim")
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:
        summed(group)
    others = [group.communicator for group in groups]  # what is referenced ends by an abort alone
    simulated.inject(simulated.Fault("release"))
    # The release lets go of the first group, the abort after its failure of the other one.
    moments.at("detaching", interrupt, nth=2, after=True)
    failed = kind_of(reloadpg.offload)
    moments.restore()
    end = time.monotonic() + BOUND_S
    while simulated.stats().held_bytes and time.monotonic() < end:
        time.sleep(0.01)
    held = simulated.stats().held_bytes
    others.clear()
    reloadpg.reload()
    return failed, held, {summed(group) for group in groups}


def test_a_second_interrupt_loses_no_communicator() -> None:
    """The group has let go of it, and nothing else held it: it was never aborted."""
    for failed, held, sums in run_ranks(interrupted_while_aborting, 2, timeout=200):
        assert failed in ("ReleaseError", "PeerFailedError")
        assert (held, sums) == (0, {2.0})
