"""The timeout of an operation ends waits without progress; hanging releases are reported."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import pytest
from helpers import worlds
from helpers.fault_job import ALLOWANCE, BOUND, Job, attempt, eventually

import reloadpg
from reloadpg.lifecycle.destroy import Releases
from reloadpg.lifecycle.job import jobs
from reloadpg.rendezvous.round import Round
from reloadpg.testing import faults, simulated
from reloadpg.threads import CancelToken


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_each_group_is_progress():
    """Each group that is released or rebuilt is reported to the other ranks."""
    Job(subgroups=[(0, 1)] * 3)
    counts = []

    def profile(frame, event, _):  # in threads that start from now on
        counts[-1] += event == "call" and frame.f_code is Round.advance.__code__

    threading.setprofile(profile)
    for operation in (reloadpg.offload, reloadpg.reload):
        counts.append(0)
        operation()
    threading.setprofile(None)
    assert counts == [4, 4]


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_release_that_hangs_is_named_and_aborted(rank):
    """Its memory is free after the failed offload. The status and the next report name what still
    runs.
    """
    job = Job("sim", subgroups=[(0, 1)] * 3, timeout=BOUND)
    if rank == 1:
        faults.inject(faults.Fault("release", "stall", group="g1", operation="shutdown"))
    seen = attempt(reloadpg.offload)
    assert seen.kind == "RendezvousTimeoutError"
    assert "Rank 1 did not finish its own work; rank 1 was in" in seen.text
    assert [f"(g{number})" in seen.text for number in range(3)] == [False, True, False]
    assert "raise install(timeout=...)" in seen.text
    assert seen.seconds < BOUND + ALLOWANCE
    assert eventually(lambda: simulated.stats().held_bytes == 0)
    assert eventually(lambda: len(reloadpg.status().unfinished) == rank)
    unfinished = reloadpg.status().unfinished
    assert ["(g1)" in one for one in unfinished] == [True] * rank
    job.meet("failed")
    report = reloadpg.offload()
    assert [one for one in report.warnings if "still being destroyed" in one] == [
        f"{one}: its memory is not free" for one in unfinished
    ]
    faults.clear_faults()
    job.meet("offloaded")
    reloadpg.reload()
    job.assert_live()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_memory_of_a_stalled_abort_is_reported_as_held(rank):
    """The next offload waits for the abort, continues after a timeout, and has a warning."""
    job = Job("sim", subgroups=[(0, 1)], timeout=BOUND)
    stalled = rank == 1
    if stalled:
        faults.inject(faults.Fault("release", "stall", group="g0", times=None))
    with contextlib.suppress(reloadpg.RendezvousTimeoutError):
        reloadpg.offload()
    job.meet("failed")  # the rank with the stalled abort has waited for it
    reloadpg.offload()
    assert bool(reloadpg.status().unfinished) == stalled
    assert ("still being destroyed" in str(reloadpg.status())) == stalled
    assert (simulated.stats().held_bytes > 0) == stalled
    faults.clear_faults()
    job.meet("offloaded")
    reloadpg.reload()
    reloadpg.offload()
    assert reloadpg.status().unfinished == ()
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_an_operation_waits_for_a_communicator_that_is_still_being_destroyed(rank):
    """A failed offload on rank 0 has left it."""
    job = Job("sim", subgroups=[(0, 1)])
    freed, ended, seen = threading.Event(), threading.Event(), []

    def hold(_):
        freed.wait(240)
        ended.set()

    def arrive(_):
        seen.append(ended.is_set())
        freed.set()

    if rank == 0:
        place = {"group": "g0", "call": hold}
        faults.inject(faults.Fault("release", group="g0", operation="shutdown"))
        faults.inject(faults.Fault("release", "call", operation="abort", **place))
    with contextlib.suppress(reloadpg.ReloadpgError):
        reloadpg.offload()
    job.meet("failed")
    if rank == 0:
        barrier = {"operation": "offload.enter", "moment": "before", "call": arrive}
        faults.inject(faults.Fault("barrier", "call", **barrier))
        waits = reloadpg.offload(wait=False)
        assert eventually(lambda: "still being" in str(reloadpg.status().running) or seen)
        freed.set()
        waits.result()
        assert seen == [True]
    else:
        reloadpg.offload()
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_the_communicators_of_a_failed_operation_are_aborted_in_parallel():
    """The operation takes as long as the longest abort, not as their sum (failure 19)."""
    job = Job("sim", subgroups=[(0, 1)] * 8, timeout=BOUND)
    together = threading.Barrier(9)  # these groups and WORLD
    abort = {"operation": "abort", "times": None, "call": lambda _: together.wait(60)}
    faults.inject(faults.Fault("release", "call", **abort))
    faults.inject(faults.Fault("release", operation="shutdown", times=None))
    with contextlib.suppress(reloadpg.ReloadpgError):
        reloadpg.offload()
    assert eventually(lambda: reloadpg.status().unfinished == ())
    assert not together.broken
    faults.clear_faults()
    reloadpg.reload()
    reloadpg.offload()
    assert jobs.known is not None
    assert jobs.known.unfinished == []  # entries do not accumulate
    reloadpg.reload()
    job.assert_live()


@pytest.mark.ranks(2)
def test_a_release_that_was_abandoned_before_it_began_changes_nothing():
    """Its thread may reach the group after the operation has failed."""
    job, current = Job(subgroups=[(0, 1)]), jobs.current("test")
    assert current is not None
    wanted = CancelToken()
    wanted.cancel()
    Releases(current).destroy(job.groups["g0"]._managed, wanted, 0)
    job.assert_live()


def test_an_unlimited_timeout_is_refused():
    """It overflows in C++ and in the store."""
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="365 days; nothing was installed"):
        reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta.max)
    assert not reloadpg.is_installed()
