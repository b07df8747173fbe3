"""The bound of an operation is on waiting, not on working; and a release that hangs is not lost."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta

import moments
import pytest
import torch.distributed as dist
import worlds
from worlds import summed

import reloadpg
from reloadpg.rendezvous.round import Round
from reloadpg.testing import run_ranks, simulated

BOUND_S = 4.0


def _counting_progress(rank, world_size):
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
    return counts


def test_each_group_is_progress():
    """The others are told of each group that is released or built, not of the last one alone."""
    assert run_ranks(_counting_progress, 2, timeout=200) == [[4, 4]] * 2


def _one_hangs(rank, world_size, before=lambda rank: None):
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    groups = [dist.new_group([0, 1], group_desc=f"g{k}") for k in range(3)]
    for group in groups:
        summed(group, rank)
    held = simulated.stats().held_bytes
    moments.wait_for_answers()
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


def test_a_release_that_hangs_is_named_aborted_and_shown():
    """Its memory is free after the failed offload; what is still running is in the status, and in
    the report of the next operation.
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


def test_a_machine_that_stands_still_at_the_bound_is_not_a_silent_store():
    """Time in which a process did not run is not counted as silence."""
    stopped = (_all_are_stopped_at_the_bound,)
    for _, text, *_ in run_ranks(_one_hangs, 2, args=stopped, timeout=90):
        assert "Rank 1 did not finish its own work; rank 1 was in" in text


def _abort_hangs_too(rank, world_size):
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    group = dist.new_group([0, 1], group_desc="g")
    summed(group, rank)
    if rank == 1:
        simulated.inject(simulated.Fault("release", "stall", group="g", times=None))
    with contextlib.suppress(reloadpg.RendezvousTimeoutError):
        reloadpg.offload()
    report = reloadpg.offload()
    shown = bool(report.unfinished), "still being destroyed" in str(reloadpg.status())
    held = simulated.stats().held_bytes > 0
    simulated.clear_faults()
    reloadpg.reload()
    again = reloadpg.offload()
    reloadpg.reload()
    return shown, held, again.unfinished, summed(group, rank)


def test_memory_that_cannot_be_freed_is_not_reported_as_free():
    """The next offload waits a while, goes on, and says that the memory is held."""
    for rank, (shown, held, again, total) in enumerate(run_ranks(_abort_hangs_too, 2, timeout=90)):
        assert shown == ((True, True) if rank == 1 else (False, False))
        assert held == (rank == 1)
        assert (again, total) == ((), 3.0)


def _many_stuck(rank, world_size):
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=BOUND_S))
    worlds.init("sim")
    groups = [dist.new_group([0, 1]) for _ in range(8)]
    for group in groups:
        summed(group, rank)
    together = threading.Barrier(9)  # these groups and WORLD
    simulated.inject(
        simulated.Fault(
            "release", "call", operation="abort", times=None, call=lambda _: together.wait(60)
        )
    )
    simulated.inject(simulated.Fault("release", operation="shutdown", times=None))
    with contextlib.suppress(reloadpg.ReloadpgError):
        reloadpg.offload()
    end = time.monotonic() + 60
    while reloadpg.status().unfinished and time.monotonic() < end:
        time.sleep(0.01)
    unfinished = reloadpg.status().unfinished
    reloadpg.reload()
    return unfinished, together.broken, summed(groups[3], rank)


def test_a_failed_operation_ends_in_its_longest_abort():
    """Not in their sum: each of them goes on once all have begun (failure 19)."""
    for unfinished, one_by_one, total in run_ranks(_many_stuck, 2, timeout=200):
        assert not one_by_one
        assert unfinished == ()
        assert total == 3.0


def test_an_endless_timeout_is_refused():
    """It overflows on its way through C++ and the store."""
    with pytest.raises(reloadpg.InvalidOptionError, match="365 days; nothing was installed"):
        reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta.max)
    assert not reloadpg.is_installed()
