"""A reload whose groups cannot be rebuilt for a moment tries again, on all ranks."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import base_store
from helpers.jobs import start

import reloadpg
from reloadpg.errors import InvalidOptionError, RebuildError
from reloadpg.integrations import colocated
from reloadpg.testing import faults, simulated
from reloadpg.testing.faults import InjectedFaultError

pytestmark = pytest.mark.matrix

LIMIT_S = 30.0
"""Longer than a thread takes to end; the timeout of the reload is longer."""

WAYS = {
    "reload": lambda attempts: reloadpg.reload(attempts=attempts),
    "without a wait": lambda attempts: reloadpg.reload(attempts=attempts, wait=False).result(),
}


def _start():
    """An offloaded job on the simulated accelerator with two groups."""
    simulated.register()
    reloadpg.install(timeout=60)
    worlds.init(backend="sim")
    group = dist.new_group(group_desc="g1")
    reloadpg.offload()
    return group


def _fail(times, rank=1):
    """Let the creation of the second group fail on one rank."""
    faults.inject(faults.Fault("create", group="1@*", rank=rank, times=times))


def _sum(group):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_try_again_until_a_rebuild_succeeds(way):
    """The report has the reasons; the generation counts completed reloads alone."""
    group = _start()
    _fail(2)
    report = WAYS[way](3)
    assert len(report.retries) == 2
    assert all(one.startswith("rank 1: RebuildError: reload failed at") for one in report.retries)
    assert (report.error, report.generation, group.generation) == ("", 1, 1)
    assert reloadpg.status().state == "live"
    assert [_sum(group), _sum(None)] == [3.0, 3.0]
    assert reloadpg.reload(attempts=3).retries == ()


@pytest.mark.ranks(2)
def test_the_last_attempt_fails_as_a_reload_does(rank):
    """Its error is that of one attempt, and the next call repairs."""
    group = _start()
    _fail(2)
    with pytest.raises(RebuildError if rank == 1 else reloadpg.PeerFailedError):
        reloadpg.reload(attempts=2)
    report = reloadpg.reload()
    assert (report.retries, _sum(group)) == ((), 2.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [reloadpg.offloaded, colocated])
def test_the_end_of_a_block_tries_again(block):
    group = _start()
    reloadpg.reload()
    with block(attempts=2):
        _fail(1)
    assert reloadpg.status().state == "live"
    assert _sum(group) == 2.0


@pytest.mark.ranks(2)
def test_a_creation_that_an_attempt_has_abandoned_ends_within_the_next_attempt(rank):
    """It discards its communicator, and does not wait for the end of an attempt that is not its."""
    group, store = _start(), base_store().clone()
    next_began, threads = threading.Event(), []

    def fails(_):
        store.wait(["rank 0 creates it"])
        raise ValueError("of rank 1")

    def abandoned(_):
        threads.append(threading.current_thread())
        store.set("rank 0 creates it", "1")
        next_began.wait(LIMIT_S)

    def again(_):
        next_began.set()
        threads[0].join(LIMIT_S)
        threads.append(threads[0].is_alive())

    for nth, call in enumerate([abandoned, again] if rank == 0 else [fails], 1):
        faults.inject(faults.Fault("create", "call", group="1@*", nth=nth, call=call))
    report = reloadpg.reload(attempts=2)
    assert len(report.retries) == 1
    assert threads[1:] == [False] * (rank == 0)
    assert _sum(group) == 2.0


@pytest.mark.ranks(2)
def test_what_no_attempt_repairs_is_raised_at_once(rank):
    """A disagreement, also on the attempts themselves; an error of a callback; another fault."""
    _start()
    with pytest.raises(reloadpg.DisagreementError, match="attempts is 2 on rank 0 and 3 on rank 1"):
        reloadpg.reload(attempts=2 + rank)
    calls = []

    def fail():
        calls.append(rank)
        raise ValueError("a callback")

    remove = reloadpg.on_reload(fail, before=True) if rank == 1 else lambda: None
    with pytest.raises(reloadpg.ReloadpgError, match="a callback"):
        reloadpg.reload(attempts=3)
    remove()
    assert len(calls) == rank
    with (
        faults.inject(faults.Fault("barrier", operation="reload.done", rank=1)),
        pytest.raises((InjectedFaultError, reloadpg.PeerFailedError)),
    ):
        reloadpg.reload(attempts=3)
    reloadpg.reload()
    assert reloadpg.status().state == "live"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("attempts", [0, -1, 1.5, "3", True])
def test_attempts_are_checked(attempts):
    start()
    for call in (reloadpg.reload, reloadpg.offloaded, colocated):
        with pytest.raises(InvalidOptionError, match=r"attempts=.* is not a positive integer"):
            call(attempts=attempts)
