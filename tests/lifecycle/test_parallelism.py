"""Groups released side by side, and connected side by side: order, faults, agreement."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
import worlds
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
    for at in ("connect", "release"):
        pause = lambda _: time.sleep(draw.random() / 50)  # noqa: E731
        simulated.inject(simulated.Fault(at, "call", times=None, call=pause))  # type: ignore[arg-type]
    seen = []
    for parallelism in range(1, 9):
        reloadpg.uninstall()
        reloadpg.install(timeout=BOUND, parallelism=parallelism)
        reloadpg.offload()
        held = simulated.stats().held_bytes
        reloadpg.reload(connect="eager")
        connected = all(one.state == "connected" for one in simulated.groups())
        seen.append((held, connected, [summed(group, rank) for group in mine]))
    return seen


@pytest.mark.parametrize("topology", sampled(TOPOLOGIES, "grid", "random 1"))
def test_no_topology_deadlocks(topology: str) -> None:
    """With random delays, and one to eight at a time, all is released, connected and right."""
    ranks = TOPOLOGIES[topology]
    for rank, cycles in enumerate(run_ranks(_cycles, RANKS, args=(ranks,), timeout=240)):
        sums = [float(sum(one + 1 for one in members)) for members in ranks if rank in members]
        assert cycles == [(0, True, sums)] * 8


def _most_at_once(rank: int, world_size: int, parallelism: int) -> tuple[int, int]:
    """How many groups were released, and connected, at the same time."""
    simulated.register()
    reloadpg.install(timeout=BOUND, parallelism=parallelism)
    worlds.init("sim")
    for index in range(2 * parallelism):
        summed(dist.new_group([0, 1], group_desc=f"g{index}"), rank)
    lock, now, most = threading.Lock(), {"connect": 0, "release": 0}, {"connect": 0, "release": 0}
    full = {at: threading.Event() for at in now}

    def step(at: str) -> Any:
        def begin(_: Any) -> None:
            with lock:
                now[at] += 1
                most[at] = max(most[at], now[at])
                if most[at] >= parallelism:
                    full[at].set()
            if parallelism > 1 and not (worlds.BOUND and at == "connect"):
                full[at].wait(60)  # until so many are at it, which then go on together
            with lock:
                now[at] -= 1

        return begin

    for at in now:  # not the default group, which goes alone
        fault = simulated.Fault(at, "call", group="g*", times=None, call=step(at))  # type: ignore[arg-type]
        simulated.inject(fault)
    reloadpg.offload()
    reloadpg.reload(connect="eager")
    return most["release"], most["connect"]


@pytest.mark.parametrize("parallelism", [1, 4])
def test_so_many_at_a_time(parallelism: int) -> None:
    """As many as ``install`` was told, and no more."""
    seen = run_ranks(_most_at_once, 2, args=(parallelism,))
    connected = 1 if worlds.BOUND else parallelism  # a bound world connects a group as it is made
    assert seen == [(parallelism, connected)] * 2


def _fault(rank: int, world_size: int, action: str) -> tuple[str, set[str], int, int, list[float]]:
    simulated.register()
    reloadpg.install(timeout=timedelta(seconds=4), parallelism=8)
    worlds.init("sim")
    groups = [dist.new_group([0, 1], group_desc=f"g{k}") for k in range(12)]
    for group in groups:
        summed(group, rank)
    fault = simulated.Fault("release", action, group="g7", operation="shutdown", rank=1)  # type: ignore[arg-type]
    with simulated.inject(fault):
        try:
            reloadpg.offload()
            text = ""
        except reloadpg.ReloadpgError as error:
            text = f"{type(error).__name__}: {error}"
        states = {str(status.state) for status in reloadpg.status().groups}
        held = simulated.stats().held_bytes
    reloadpg.reload()
    return text, states, held, reloadpg.status().generation, [summed(g, rank) for g in groups]


@pytest.mark.parametrize("action", ["raise", "stall"])
def test_a_release_that_fails_beside_others(action: str) -> None:
    """It is named on all ranks; all groups end without a communicator, and come back."""
    for text, states, held, generation, sums in run_ranks(_fault, 2, args=(action,)):
        assert "g7" in text
        assert (states, held, generation) == ({"failed"}, 0, 1)
        assert sums == [3.0] * 12


def _different(rank: int, world_size: int) -> str:
    reloadpg.install(backends={"gloo"}, timeout=BOUND, parallelism=rank + 1)
    worlds.init("gloo")
    with pytest.raises(reloadpg.DisagreementError) as caught:
        reloadpg.offload()
    return str(caught.value)


def test_all_ranks_work_at_equally_many() -> None:
    """A window of another width is refused before anything is touched."""
    for text in run_ranks(_different, 2):
        assert "parallelism is 1 on rank 0 and 2 on rank 1" in text


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
