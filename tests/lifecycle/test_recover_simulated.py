"""Recovery on the simulated accelerator: memory is the same as before any fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recovery_job import Job, attempt, meet

import reloadpg
from reloadpg.testing import run_ranks, simulated
from reloadpg.testing.simulated import Fault, SimState

FAULTY = 1
RANKS = 4
BYTES = 1 << 20
PATIENCE = timedelta(seconds=120)
IMPATIENCE = timedelta(seconds=1)
"""The timeout of a collective that is never to complete."""
OURS = "*@*"
"""Groups that the library has built: torch's own names have no generation in them."""


class SimulatedJob(Job):
    """One rank's part of a job of overlapping, connected simulated groups."""

    def __init__(self, rank: int, parallelism: int) -> None:
        simulated.register()
        simulated.configure(bytes_per_communicator=BYTES)
        limit = PATIENCE.total_seconds()
        super().__init__(
            rank, bound=limit, backend="sim", parallelism=parallelism, timeout=PATIENCE
        )
        self.ring = self.groups[-1]

    def account(self) -> dict[str, Any]:
        """The memory of the accelerator, by its own count and by group."""
        stats, groups = simulated.stats(), simulated.groups()
        return {
            "held": stats.held_bytes,
            "by group": sum(group.held_bytes for group in groups),
            "live": stats.live,
            "leaked": stats.leaked,
            "names": sorted(group.name.partition("@")[0] for group in groups),
            "states": {group.state for group in groups},
            "generations": {group.name.partition("@")[2].partition(".")[0] for group in groups},
        }

    def whole(self) -> dict[str, Any]:
        """What must hold after each recovery; the account precedes any use of the groups."""
        account = self.account()
        return {
            "account": account,
            "same": self.same(),
            "live": self.states(),
            "generations": self.generations(),
            "sums": self.sums(),
            "unfinished": reloadpg.status().unfinished,
        }

    def all_reduce(self) -> None:
        dist.all_reduce(torch.ones(1), group=self.ring)


# -- one function per fault: the error of each rank before it calls recover() ---------------------


def collective_raises(job: SimulatedJob) -> str:
    """A collective raises on one rank; the others are left waiting for it."""
    with simulated.inject(Fault("collective", rank=FAULTY, operation="allreduce")):
        return attempt(job.all_reduce).text


def collective_stalls(job: SimulatedJob) -> str:
    """A rank stalls in a collective until another one requests a recovery."""

    def stall(_: object) -> None:
        end = time.monotonic() + 120
        while not reloadpg.recovery_requested() and time.monotonic() < end:
            time.sleep(0.05)

    fault = Fault("collective", "call", rank=FAULTY, operation="allreduce", call=stall)
    if job.rank != FAULTY:
        job.ring.set_timeout(IMPATIENCE)
    with simulated.inject(fault):
        text = attempt(job.all_reduce).text
    job.ring.set_timeout(PATIENCE)
    return text


def abort_raises(job: SimulatedJob) -> str:
    """Aborts fail on one rank: its communicators are dropped."""
    simulated.inject(Fault("release", rank=FAULTY, operation="abort", times=None))
    return collective_raises(job)


def fails_in(at: str, nth: int) -> Callable[[SimulatedJob], str]:
    """The recovery itself fails on one rank, in the creation or connection of a group."""

    def fault(job: SimulatedJob) -> str:
        with simulated.inject(Fault(at, rank=FAULTY, group=OURS, nth=nth)):  # type: ignore[arg-type]
            text = attempt(lambda: reloadpg.recover("first")).text
        assert simulated.stats().leaked == 0
        return text

    fault.__name__ = f"fails_in_{at}_{nth}"
    return fault


def fails_in_offload(job: SimulatedJob) -> str:
    """One rank fails in an offload."""
    with simulated.inject(Fault("release", rank=FAULTY, operation="shutdown", nth=2)):
        return attempt(reloadpg.offload).text


SLOW = pytest.mark.slow
CORE = (collective_raises, fails_in("create", 3))
ALL = (
    collective_raises,
    collective_stalls,
    abort_raises,
    fails_in("create", 1),
    fails_in("create", 3),
    fails_in("connect", 2),
    fails_in("collective", 2),
    fails_in_offload,
)


def recover_after_each(rank: int, size: int, parallelism: int, which: str) -> list[dict[str, Any]]:
    job = SimulatedJob(rank, parallelism)
    found = [{"name": "", "text": "", "after": job.whole()}]
    for fault in {"core": CORE, "all": ALL}[which]:
        text = fault(job)
        reloadpg.recover(f"test of {fault.__name__}")
        simulated.clear_faults()
        found.append({"name": fault.__name__, "text": text, "after": job.whole()})
        meet(fault.__name__, size, 120.0)
    reloadpg.offload()
    found.append({"held": simulated.stats().held_bytes, "leaked": simulated.stats().leaked})
    return found


@pytest.mark.parametrize(
    ("parallelism", "which"),
    [(8, "core"), pytest.param(1, "all", marks=SLOW), pytest.param(8, "all", marks=SLOW)],
)
def test_the_accelerator_holds_what_it_held_before(parallelism: int, which: str) -> None:
    """After each of several faults in one job, before the groups are used again.

    The canary has connected each group; each communicator has the current generation.
    """
    results = run_ranks(recover_after_each, RANKS, args=(parallelism, which), timeout=280)
    for rank, (start, *after, offloaded) in enumerate(results):
        before = start["after"]["account"]
        assert before["held"] == before["by group"] == BYTES * len(before["names"])
        assert offloaded == {"held": 0, "leaked": 0}
        for found in after:
            if rank == FAULTY:  # the fault was seen, by the text of the rank's own error
                assert found["text"], found["name"]
                said = "injected fault" in found["text"]
                assert said or found["name"] == "collective_stalls", found
            account, (generation,) = found["after"]["account"], found["after"]["generations"]
            for name in ("held", "by group", "live", "names"):
                assert account[name] == before[name], (found["name"], name, account)
            assert account["generations"] == {str(generation)}, found
            assert account["states"] == {SimState.CONNECTED}
            assert account["leaked"] == 0
            # Gloo has no abort: a rank that waits for one that has failed waits for its timeout.
            assert not [text for text in found["after"]["unfinished"] if "destroyed" in text]
            assert found["after"]["same"]
            assert found["after"]["sums"], found["name"]
            assert found["after"]["live"] == {"live"}


def abort_stalls(rank: int, size: int, parallelism: int) -> dict[str, Any]:
    """An abort stalls on one rank until after the recovery."""
    job = SimulatedJob(rank, parallelism)
    before = job.account()
    stall = simulated.inject(
        Fault("release", "stall", rank=FAULTY, operation="abort", group=job.ring.group_name)
    )
    # The peers of a rank that does not abort have to wait for the timeout of the collective.
    job.ring.set_timeout(IMPATIENCE)
    collective_raises(job)
    job.ring.set_timeout(PATIENCE)
    report = reloadpg.recover("test")
    during = job.whole()
    left = [group.name for group in simulated.groups() if "@" not in group.name]
    stall.clear()
    reloadpg.recover("again")
    return {
        "before": before,
        "during": during,
        "left": left,
        "unfinished": report.unfinished,
        "warnings": report.warnings,
        "after": job.whole(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [1, 8])
def test_an_abort_that_stalls_is_named_and_releases_its_memory_at_its_end(parallelism: int) -> None:
    """The job continues with one more communicator's memory; the report has a warning."""
    results = run_ranks(abort_stalls, RANKS, args=(parallelism,), timeout=280)
    for rank, found in enumerate(results):
        before, during, after = found["before"], found["during"], found["after"]
        assert during["sums"]
        assert after["sums"]
        more = BYTES if rank == FAULTY else 0
        assert during["account"]["held"] == before["held"] + more
        assert bool(found["left"]) == bool(found["unfinished"]) == (rank == FAULTY)
        assert after["account"]["held"] == before["held"]
        assert after["unfinished"] == ()
        if rank == FAULTY:
            assert any("its memory is not free" in text for text in found["warnings"])
