"""An operation ended differently on the ranks: one reload on all ranks restores all groups.

The link of rank 1 to the store is cut for longer than the timeout (failure 35).
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import ALLOWANCE, Job, attempt, interfere, meet
from helpers.sampling import sampled
from helpers.watched_store import WatchedStore

import reloadpg
from reloadpg.testing import run_ranks

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


def with_a_cut_link(rank: int, size: int, point: str, wait: bool) -> None:
    os.environ |= worlds.SILENCE
    link = threading.Event()
    link.set()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
    watched = WatchedStore(store, watch=lambda *_: link.wait())
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
    report = reloadpg.reload() if wait else reloadpg.reload(wait=False).result()
    assert ("disagreed on the state" in "".join(report.warnings)) == ("live" in ends)
    job.assert_live()
    job.agree("end", (reloadpg.status().generation, job.generations()))
    job.cycle()
    dist.destroy_process_group()


@pytest.mark.parametrize("wait", sampled([True, False], True))
@pytest.mark.parametrize("end", sampled(ENDS, "offload.enter"))
def test_one_reload_restores_all_groups(end: str, wait: bool) -> None:
    """The ranks that have live groups rebuild them, too; the report says so."""
    run_ranks(with_a_cut_link, 2, args=(end, wait), store="parent", timeout=200)
