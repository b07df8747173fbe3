"""The timeout of an operation ends waits without progress; releases that hang are reported."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
import worlds
from worlds import summed

import reloadpg
from reloadpg.rendezvous.round import Round
from reloadpg.testing import run_ranks, simulated

BOUND_S = 4.0


@pytest.mark.ranks(2)
def test_each_group_is_progress():
    """The other ranks are notified of each group that is released or rebuilt."""
    reloadpg.install(backends={worlds.BACKEND})
    worlds.init()
    for _ in range(3):
        dist.new_group([0, 1])
    counts = []

    def profile(frame, event, _):  # of the threads that are started from now on
        counts[-1] += event == "call" and frame.f_code is Round.advance.__code__

    threading.setprofile(profile)
    for operation in (reloadpg.offload, reloadpg.reload):
        counts.append(0)
        operation()
    threading.setprofile(None)
    assert counts == [4, 4]


def _one_hangs(rank, world_size, before=lambda rank: None):
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    groups = [dist.new_group([0, 1], group_desc=f"g{k}") for k in range(3)]
    for group in groups:
        summed(group, rank)
    held = simulated.stats().held_bytes
    os.environ |= worlds.ALL_RESPOND
    if rank == 1:
        simulated.inject(simulated.Fault("release", "stall", group="g1", operation="shutdown"))
    before(rank)
    begun = time.monotonic()
    try:
        reloadpg.offload()
        text = ""
    except reloadpg.ReloadpgError as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    after = simulated.stats().held_bytes
    unfinished = reloadpg.status().unfinished
    report = reloadpg.offload()
    still = report.unfinished, any("still being destroyed" in w for w in report.warnings)
    simulated.clear_faults()
    reloadpg.reload()
    return held > 0, text, seconds, after, unfinished, still, summed(groups[1], rank)


def test_a_release_that_hangs_is_named_and_aborted():
    """Its memory is free after the failed offload. The status and the next report name what still
    runs.
    """
    results = run_ranks(_one_hangs, 2, timeout=90)
    for rank, (held, text, seconds, after, unfinished, still, total) in enumerate(results):
        assert held
        assert "RendezvousTimeoutError" in text
        assert "Rank 1 did not finish its own work; rank 1 was in" in text
        assert "(g1)" in text
        assert "raise install(timeout=...)" in text
        assert seconds < BOUND_S + 60
        assert after == 0
        assert [("(g1)" in one) for one in unfinished] == ([True] if rank == 1 else [])
        assert still == ((unfinished, True) if rank == 1 else ((), False))
        assert total == 3.0


def _all_are_stopped_at_the_bound(rank):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid/{rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{other}")) for other in range(2)]
    if rank == 0:
        worlds.stop_for(4.0, after=BOUND_S - 0.5, pids=pids)


def test_a_machine_stopped_at_the_timeout_is_not_an_unresponsive_store():
    """Time in which a process did not run does not count."""
    stopped = (_all_are_stopped_at_the_bound,)
    for _, text, *_ in run_ranks(_one_hangs, 2, args=stopped, timeout=90):
        assert "Rank 1 did not finish its own work; rank 1 was in" in text


@pytest.mark.ranks(2)
def test_memory_of_a_stalled_abort_is_reported_as_held(rank):
    """The next offload waits for it, continues after a timeout, and has a warning."""
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    group = dist.new_group([0, 1], group_desc="g")
    summed(group, rank)
    if rank == 1:
        simulated.inject(simulated.Fault("release", "stall", group="g", times=None))
    with contextlib.suppress(reloadpg.RendezvousTimeoutError):
        reloadpg.offload()
    stalled = rank == 1
    assert bool(reloadpg.offload().unfinished) == stalled
    assert ("still being destroyed" in str(reloadpg.status())) == stalled
    assert (simulated.stats().held_bytes > 0) == stalled
    simulated.clear_faults()
    reloadpg.reload()
    assert reloadpg.offload().unfinished == ()
    reloadpg.reload()
    assert summed(group, rank) == 3.0


@pytest.mark.ranks(2)
def test_the_communicators_of_a_failed_operation_are_aborted_in_parallel(rank):
    """The operation takes as long as the longest abort, not as their sum (failure 19)."""
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    groups = [dist.new_group([0, 1]) for _ in range(8)]
    for group in groups:
        summed(group, rank)
    together = threading.Barrier(9)  # these groups and WORLD
    abort = {"operation": "abort", "times": None, "call": lambda _: together.wait(60)}
    simulated.inject(simulated.Fault("release", "call", **abort))
    simulated.inject(simulated.Fault("release", operation="shutdown", times=None))
    with contextlib.suppress(reloadpg.ReloadpgError):
        reloadpg.offload()
    end = time.monotonic() + 60
    while reloadpg.status().unfinished and time.monotonic() < end:
        time.sleep(0.01)
    assert reloadpg.status().unfinished == ()
    assert not together.broken
    reloadpg.reload()
    assert summed(groups[3], rank) == 3.0


def test_an_unlimited_timeout_is_refused():
    """It overflows in C++ and in the store."""
    with pytest.raises(reloadpg.InvalidOptionError, match="365 days; nothing was installed"):
        reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta.max)
    assert not reloadpg.is_installed()
