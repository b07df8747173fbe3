"""Groups released, created and connected side by side: order, faults, agreement."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from random import Random
from typing import Any

import moments
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
GRID = [  # pp 2 x tp 2 of a job of four ranks, with the groups that Megatron makes of it
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
    """With random delays, and one to eight at a time, all is released, rebuilt and right."""
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
                full[at].wait(60)  # until so many are at it, which then go on together
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
def test_so_many_at_a_time(parallelism: int) -> None:
    """As many as ``install`` was told, and no more."""
    seen = run_ranks(_most_at_once, 2, args=(parallelism,))
    assert seen == [dict.fromkeys(("release", "create", "connect"), parallelism)] * 2


def _shared_options(rank: int, world_size: int) -> tuple[int, list[str], bool]:
    """Groups with the same options object: how many at a time, in which order, and the object."""
    simulated.register()
    reloadpg.install(timeout=BOUND, parallelism=8)
    worlds.init("sim")
    options = simulated.SimOptions()
    for index in range(8):  # every second one has options of its own
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
        other.wait(60)  # the other groups are created meanwhile

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
    given = [one for one in simulated.groups() if one.pg_options is options]
    return max(most), order, len(given) == 4


@pytest.mark.matrix
def test_groups_that_share_options_are_created_in_turn() -> None:
    """Torch writes a group's name and ranks into the object that the caller gave."""
    for most, order, same in run_ranks(_shared_options, 2):
        assert (most, order, same) == (1, ["2", "4", "6", "8"], True)


def _behind_a_hanging_creation(rank: int, world_size: int) -> tuple[int, float]:
    """How many creations are left, of four that share options and of which the first hangs."""
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
        left = len(reloadpg.status().unfinished)
    reloadpg.reload()
    return left, summed(groups[3], rank)


def test_creations_behind_one_that_hangs_end_when_they_are_abandoned() -> None:
    """Those that share its options wait for it, but not once the reload has failed."""
    assert run_ranks(_behind_a_hanging_creation, 2, timeout=120) == [(1, 3.0)] * 2


def _still_creating(rank: int, world_size: int) -> list[str]:
    """The groups whose abandoned creations are under way after a reload that has failed."""
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
        store.wait(["test/0", "test/1"])  # a rank that hears of a failure begins no more
        raise RuntimeError("after the others have begun")

    last = f"{groups[3].group_name}@*"
    simulated.inject(simulated.Fault("create", "call", group=last, call=fail))
    with pytest.raises(reloadpg.ReloadpgError):
        reloadpg.reload()
    unfinished = reloadpg.status().unfinished
    simulated.clear_faults()
    reloadpg.reload()
    return sorted(unfinished)


def test_each_abandoned_creation_is_named_once() -> None:
    """By its own group; the one that fails last may still be on its way out."""
    for unfinished in run_ranks(_still_creating, 2):
        named = [text for text in unfinished if "<ReloadableProcessGroup '4'" not in text]
        assert len(named) == 3
        for k, text in enumerate(named):
            assert f"<ReloadableProcessGroup '{k + 1}'" in text
            assert text.count("ReloadableProcessGroup") == 1


def _consequence(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 fails at one group, and drops another one at which rank 0 is still at work."""
    moments.wait_for_answers()
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
    try:
        reloadpg.reload()
        text = ""
    except reloadpg.ReloadpgError as error:
        text = f"{type(error).__name__}: {error}"
    store.wait(["dropped"], BOUND)
    reloadpg.reload()
    return text, reloadpg.status().state


def test_a_failure_is_told_before_other_groups_are_dropped() -> None:
    """Else their members fail, too, and report that instead of what went wrong."""
    (other, state), (own, _) = run_ranks(_consequence, 2)
    assert own.startswith("RebuildError: ")
    assert other.startswith("PeerFailedError: ")
    assert "rank 1 failed" in other
    assert "injected fault" in other
    assert state == "live"


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "8", None])
def test_what_is_no_number_is_refused(given: Any) -> None:
    """Nothing is installed."""
    with pytest.raises(reloadpg.InvalidOptionError, match=r"install\(parallelism="):
        reloadpg.install(parallelism=given)
    assert not reloadpg.is_installed()


def test_a_timeout_in_seconds() -> None:
    """A number means seconds, as in the sibling functions."""
    with reloadpg.install(timeout=60):
        assert reloadpg.status().options["timeout_s"] == 60.0
