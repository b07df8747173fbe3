"""An operation ended differently on the ranks: one reload on all ranks restores all groups.

The link of rank 1 to the store is cut for longer than the timeout (failure 35).
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import ALLOWANCE, Job, attempt, fail, interfere, meet, stop_interfering
from helpers.sampling import sampled
from helpers.watched_store import WatchedStore

import reloadpg
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.matrix

BOUND_S = 2.0
CUT = 1
"""The rank whose link is cut."""

ENDS = {
    "offload.enter": ("live", "failed"),
    "reload.enter": ("offloaded", "failed"),
    "reload.done": ("failed", "failed"),
}
"""The states of the groups on ranks 0 and 1, if this is lost when rank 1 arrives there."""


def with_a_cut_link(rank: int, size: int, point: str, wait: bool, fails: str = "") -> None:
    os.environ |= worlds.SILENCE
    link = threading.Event()
    link.set()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    second = SecondAgreement(rank, fails, store.clone())
    watched = WatchedStore(store, watch=lambda *_: link.wait(), answered=second.answered)
    job = Job(subgroups=((0, 1), (1, 0)), timeout=BOUND_S, store=(watched, size))
    if rank == CUT:
        interfere(point, link.clear)
    if not point.startswith("offload"):
        reloadpg.offload()
    seen = attempt(reloadpg.offload if point.startswith("offload") else reloadpg.reload)
    ends = ENDS[point]
    assert seen.kind == "RendezvousTimeoutError", seen
    assert seen.seconds < BOUND_S + ALLOWANCE
    assert job.states() == {ends[rank]}, (job.states(), seen)
    link.set()
    meet("the operation has ended", size, store=store.clone())
    if fails:
        second.fail(job)
    report = reloadpg.reload() if wait else reloadpg.reload(wait=False).result()
    assert ("disagreed on the state" in "".join(report.warnings)) == ("live" in ends)
    job.assert_live()
    job.agree("end", (reloadpg.status().generation, job.generations()))
    job.cycle()
    dist.destroy_process_group()


class SecondAgreement:
    """Rank 1 fails after the agreement in which the ranks find that their states differ.

    It fails in the next one, ``late``: when rank 0 is in it, or ``early``: before that.
    """

    def __init__(self, rank: int, fails: str, store: Any) -> None:
        self.rank, self.fails, self.store = rank, fails, store
        self.reloads = False
        self.begins = threading.Event()

    def answered(self, method: str, key: str) -> None:
        """Called after each request: rank 0 has read the result of the first agreement."""
        if self.reloads and self.rank != CUT and key.endswith("/enter/reader/0"):
            if self.fails == "early" and not self.begins.is_set():
                self.store.wait(["rank 1 has failed"], timedelta(seconds=60))
            self.begins.set()

    def fail(self, job: Job) -> None:
        """Reload, and fail before any group is changed."""
        self.reloads = True
        at_enter: dict[str, Any] = {"action": "call", "operation": "reload.enter"}
        if self.rank != CUT:
            simulated.inject(simulated.Fault("barrier", **at_enter, times=None, call=self._mark))
            if self.fails == "early":
                return  # the first reload of rank 0 meets the second one of rank 1
        else:
            simulated.inject(simulated.Fault("barrier", **at_enter, nth=2, call=self._fail))
        before = job.states()
        seen = attempt(reloadpg.reload)
        stop_interfering()
        self.store.set(f"rank {self.rank} has failed", "1")
        assert seen.kind == ("Injected" if self.rank == CUT else "PeerFailedError"), seen
        assert job.states() == before

    def _mark(self, _: object) -> None:
        if self.begins.is_set():
            self.store.set("rank 0 is in the second agreement", "1")

    def _fail(self, _: object) -> None:
        if self.fails == "late":
            self.store.wait(["rank 0 is in the second agreement"], timedelta(seconds=60))
        fail()


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["early", "late"])
def test_a_rank_fails_when_the_ranks_have_found_that_their_states_differ(fails: str) -> None:
    """Nothing was changed. The next reload restores all groups, wherever the other rank is."""
    run_ranks(with_a_cut_link, 2, args=("offload.enter", True, fails), store="parent", timeout=200)


@pytest.mark.parametrize("wait", sampled([True, False], True))
@pytest.mark.parametrize("end", sampled(ENDS, "offload.enter"))
def test_one_reload_restores_all_groups(end: str, wait: bool) -> None:
    """The ranks that have live groups rebuild them, too; the report says so."""
    run_ranks(with_a_cut_link, 2, args=(end, wait), store="parent", timeout=200)
