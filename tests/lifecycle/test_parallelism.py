"""Groups released, created and connected in parallel: order, faults, agreement."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
import worlds
from recovery_job import base_store
from sampling import sampled
from worlds import summed

import reloadpg
from reloadpg.testing import run_ranks, simulated

BOUND = timedelta(seconds=60)
RANKS = 4
GRID = [  # pp 2 x tp 2 of a job of four ranks, with the groups that Megatron creates
    *([0, 1], [2, 3]),  # tensor parallel
    *([0, 2], [1, 3]),  # pipeline parallel
    *([0, 3], [1, 2]),
    [0, 1, 2, 3],
    *([0, 2], [1, 3]),  # embeddings
]
RINGS = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]


def _random(seed: int) -> list[list[int]]:
    draw = Random(seed)
    return [sorted(draw.sample(range(RANKS), draw.randint(2, RANKS))) for _ in range(16)]


TOPOLOGIES = {"grid": GRID, "rings": RINGS, "random 1": _random(1), "random 2": _random(2)}


def _cycles(rank: int, world_size: int, topology: list[list[int]]) -> list[Any]:
    simulated.register()
    # As with NCCL: a connection waits for all members, and so would a release out of order.
    simulated.configure(bytes_per_communicator=1 << 16)
    reloadpg.install(timeout=BOUND)
    worlds.init("sim")
    groups = [dist.new_group(ranks) for ranks in topology]
    mine = [group for ranks, group in zip(topology, groups, strict=True) if rank in ranks]
    draw = Random(rank)
    for at in ("create", "connect", "release"):
        pause = lambda _: time.sleep(draw.random() / 50)  # noqa: E731
        simulated.inject(simulated.Fault(at, "call", times=None, call=pause))  # type: ignore[arg-type]
    seen = []
    for parallelism in range(1, 9):
        reloadpg.uninstall()
        reloadpg.install(timeout=BOUND, parallelism=parallelism)
        # Every second time a creation waits for all members, as gloo's does and a bound NCCL's.
        simulated.configure(eager=parallelism % 2 == 0)
        reloadpg.offload()
        held = simulated.stats().held_bytes
        reloadpg.reload(connect="eager")
        connected = all(one.state == "connected" for one in simulated.groups())
        seen.append((held, connected, [summed(group, rank) for group in mine]))
    return seen


@pytest.mark.parametrize("topology", sampled(TOPOLOGIES, "grid"))
def test_no_topology_deadlocks(topology: str) -> None:
    """With random delays and parallelism 1 to 8, all groups are released and rebuilt."""
    ranks = TOPOLOGIES[topology]
    for rank, cycles in enumerate(run_ranks(_cycles, RANKS, args=(ranks,), timeout=240)):
        sums = [float(sum(one + 1 for one in members)) for members in ranks if rank in members]
        assert cycles == [(0, True, sums)] * 8


def _most_at_once(rank: int, world_size: int, parallelism: int) -> dict[str, int]:
    """How many groups were released, created, and connected at the same time."""
    simulated.register()
    reloadpg.install(timeout=BOUND, parallelism=parallelism)
    worlds.init("sim")
    for index in range(2 * parallelism):
        summed(dist.new_group([0, 1], group_desc=f"g{index}"), rank)
    steps = {"release": "g*", "create": "[1-9]*@*", "connect": "g*"}
    lock, now, most = threading.Lock(), dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
    full = {at: threading.Event() for at in now}

    def step(at: str) -> Any:
        def begin(_: Any) -> None:
            with lock:
                now[at] += 1
                most[at] = max(most[at], now[at])
                if most[at] >= parallelism:
                    full[at].set()
            if parallelism > 1:
                full[at].wait(60)  # until so many run, which then continue
            with lock:
                now[at] -= 1

        return begin

    for at, group in steps.items():  # not the default group, which goes alone
        fault = simulated.Fault(at, "call", group=group, times=None, call=step(at))  # type: ignore[arg-type]
        simulated.inject(fault)
    reloadpg.offload()
    reloadpg.reload(connect="eager")
    return most


@pytest.mark.matrix
@pytest.mark.parametrize("parallelism", [1, 4])
def test_parallelism_is_the_number_of_groups_at_a_time(parallelism: int) -> None:
    seen = run_ranks(_most_at_once, 2, args=(parallelism,))
    assert seen == [dict.fromkeys(("release", "create", "connect"), parallelism)] * 2


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_groups_that_share_an_options_object_are_created_one_after_the_other() -> None:
    """Torch writes a group's name and ranks into the caller's object."""
    simulated.register()
    reloadpg.install(timeout=BOUND, parallelism=8)
    worlds.init("sim")
    options = simulated.SimOptions()
    for index in range(8):  # every second one has separate options
        dist.new_group([0, 1], pg_options=options if index % 2 else simulated.SimOptions())
    order: list[str] = []
    lock, now, most = threading.Lock(), [0], [0]
    other = threading.Event()

    def begin(group: Any) -> None:
        if group.pg_options is not options:
            other.set()
            return
        with lock:
            now[0] += 1
            most.append(now[0])
            order.append(group.name.partition("@")[0])
        other.wait(60)  # the other groups are created in parallel

    def end(group: Any) -> None:
        if group.pg_options is options:
            with lock:
                now[0] -= 1

    reloadpg.offload()
    for moment, call in (("before", begin), ("after", end)):
        simulated.inject(
            simulated.Fault("create", "call", times=None, moment=moment, call=call)  # type: ignore[arg-type]
        )
    reloadpg.reload()
    assert (max(most), order) == (1, ["2", "4", "6", "8"])
    assert len([one for one in simulated.groups() if one.pg_options is options]) == 4


@pytest.mark.ranks(2)
def test_creations_that_wait_for_a_hanging_one_end_when_they_are_abandoned(rank: int) -> None:
    """Four groups share options, and the creation of the first hangs. The others end once the
    reload has failed.
    """
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=4), parallelism=8)
    worlds.init("sim")
    options = simulated.SimOptions()
    groups = [dist.new_group([0, 1], pg_options=options) for _ in range(4)]
    reloadpg.offload()
    fault = simulated.Fault("create", "stall", group=f"{groups[0].group_name}@*")
    with simulated.inject(fault):
        with pytest.raises(reloadpg.ReloadpgError):
            reloadpg.reload()
        end = time.monotonic() + 60
        while len(reloadpg.status().unfinished) > 1 and time.monotonic() < end:
            threading.Event().wait(0.05)
        assert len(reloadpg.status().unfinished) == 1
    reloadpg.reload()
    assert summed(groups[3], rank) == 3.0


@pytest.mark.ranks(2)
def test_each_abandoned_creation_is_named_once(rank: int) -> None:
    """By its group. The creation that failed last may still be ending."""
    simulated.register()
    reloadpg.install(timeout=BOUND, parallelism=8)
    worlds.init("sim")
    groups = [dist.new_group([0, 1], group_desc=f"g{k}") for k in range(4)]
    reloadpg.offload()
    held = [
        simulated.inject(simulated.Fault("create", "stall", group=f"{group.group_name}@*"))
        for group in groups[:3]
    ]
    store = base_store().clone()

    def fail(_: Any) -> None:
        assert all(one.wait_fired(60) for one in held)
        store.set(f"test/{rank}", "the others have begun")
        store.wait(["test/0", "test/1"])  # a rank that reads of a failure begins no more
        raise RuntimeError("after the others have begun")

    last = f"{groups[3].group_name}@*"
    simulated.inject(simulated.Fault("create", "call", group=last, call=fail))
    with pytest.raises(reloadpg.ReloadpgError):
        reloadpg.reload()
    unfinished = sorted(reloadpg.status().unfinished)
    simulated.clear_faults()
    reloadpg.reload()
    named = [text for text in unfinished if "<ReloadableProcessGroup '4'" not in text]
    assert len(named) == 3
    for k, text in enumerate(named):
        assert f"<ReloadableProcessGroup '{k + 1}'" in text
        assert text.count("ReloadableProcessGroup") == 1


@pytest.mark.ranks(2)
def test_a_failure_is_reported_before_other_groups_are_dropped(rank: int) -> None:
    """Rank 1 fails at one group, and drops another one that rank 0 is creating. Otherwise rank 0
    would report that consequence instead of the cause.
    """
    os.environ |= worlds.ALL_RESPOND
    simulated.register()
    reloadpg.install(timeout=BOUND, parallelism=2)
    worlds.init("sim")
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    store = base_store().clone()
    reloadpg.offload()
    fails = simulated.inject(simulated.Fault("create", group=f"{second.group_name}@*", rank=1))

    def work(_: Any) -> None:
        if rank == 1:
            assert fails.wait_fired(60)
            return
        store.wait(["dropped"], BOUND)
        raise RuntimeError("connection closed by peer")

    mine = f"{first.group_name}@*"
    simulated.inject(simulated.Fault("create", "call", group=mine, call=work))
    if rank == 1:
        own = base_store().clone()  # the other one may be locked, by the wait for this key
        dropped = simulated.Fault(
            "release", "call", group=mine, call=lambda _: own.set("dropped", "1")
        )
        simulated.inject(dropped)
    error = reloadpg.RebuildError if rank == 1 else reloadpg.PeerFailedError
    with pytest.raises(error, match="" if rank == 1 else "rank 1 failed.*injected fault"):
        reloadpg.reload()
    store.wait(["dropped"], BOUND)
    reloadpg.reload()
    assert reloadpg.status().state == "live"


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "8", None])
def test_invalid_parallelism_is_refused(given: Any) -> None:
    with pytest.raises(reloadpg.InvalidOptionError, match=r"install\(parallelism="):
        reloadpg.install(parallelism=given)
    assert not reloadpg.is_installed()


def test_a_timeout_in_seconds() -> None:
    with reloadpg.install(timeout=60):
        assert reloadpg.status().options["timeout_s"] == 60.0
