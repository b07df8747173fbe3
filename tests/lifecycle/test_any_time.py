"""Signal handlers and status requests at any moment, and what users change between operations."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch.distributed as dist
from helpers.worlds import start, summed

import reloadpg
from reloadpg.testing import simulated


@pytest.mark.ranks(2)
@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_signal_handler_can_request_the_status(rank, world):
    """It may interrupt a status or an operation, and does not deadlock on their locks."""
    start(world)
    simulated.register()
    pair = dist.new_group([0, 1])
    count, arming = 0, True

    def look(*_):
        nonlocal count
        count += bool(str(reloadpg.status()))
        # Rearmed at its end: a slow status must leave time for the main program.
        signal.setitimer(signal.ITIMER_REAL, 0.005 if arming else 0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    for _ in range(6):
        reloadpg.offload()
        reloadpg.reload()
        for _ in range(100):
            reloadpg.status()
            simulated.stats()
    arming = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert count > 20
    assert summed(pair, rank) == 3.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_the_status_describes_a_running_operation(rank, world, tmp_path):
    """Other threads and callbacks see its barrier, its groups, and whether it waits."""
    start(world)
    dist.new_group([0, 1])
    assert reloadpg.status().running is None
    inside, waiting, late = [], [], tmp_path / "late"

    def look():
        while not waiting:
            status = reloadpg.status()
            if status.running is not None and status.running.waiting:
                waiting.append((status.running, str(status).splitlines()[0]))
                late.touch()

    def callback():
        inside.append(reloadpg.status().running)

    reloadpg.on_offload(callback)
    reloadpg.on_reload(callback)
    looker = threading.Thread(target=look)
    if rank == 0:
        looker.start()
    while rank == 1 and not late.exists():  # until rank 0 waits for it
        time.sleep(0.01)
    reloadpg.offload()
    reloadpg.reload()
    at_offload, at_reload = inside
    assert (at_offload.operation, at_offload.phase) == ("offload", "enter")
    doing = f"callback {callback.__qualname__}"
    assert (at_offload.waiting, at_offload.doing) == (False, doing)
    assert (at_offload.sequence, at_offload.groups) == (1, 0)
    assert (at_reload.operation, at_reload.phase) == ("reload", "")
    assert (at_reload.sequence, at_reload.doing) == (2, doing)
    assert (at_reload.groups_done, at_reload.groups) == (2, 2)
    assert at_offload.started_at <= at_offload.since < at_reload.started_at
    assert reloadpg.status().running is None
    if rank == 0:
        looker.join()
        ((running, line),) = waiting
        assert (running.operation, running.phase, running.doing) == ("offload", "enter", "")
        assert running.since >= running.started_at
        assert line.startswith("offload is running, before barrier 'enter': waiting for other")


@pytest.mark.guarantees
@pytest.mark.ranks(2)
@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_keys_of_the_user_in_a_groups_store_are_kept(rank, world):
    start(world)
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:
        group.get_group_store().set(f"mine/{rank}", "kept")
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
    summed(None, rank)
    for group in groups:
        assert group.get_group_store().get(f"mine/{1 - rank}") == b"kept"
