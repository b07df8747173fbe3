"""A rank that is stopped or killed in a call of NCCL, from which it does not return.

A stopped process stops whole, with the threads of NCCL: with ``RELOADPG_NCCL`` also those of
NVIDIA's host code, which its peers wait for in a destroy.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import eventually
from helpers.nccl_job import (
    ABORT_LEAVES,
    CAN_SUSPEND,
    ENGINES,
    Meetings,
    engine_variables,
    held,
    left_over,
    on_engines,
    start,
    summed,
    used,
)

import reloadpg
from reloadpg.lifecycle.connect import connect_group
from reloadpg.testing import run_ranks, standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

SIZE, VICTIM = 3, 1
BOUND = timedelta(seconds=15)
"""The timeout of an operation, which those with a stopped rank reach."""
THREADS = 8
"""The default number of threads that create groups."""
POINTS = {
    "offload": ("destroy",),
    "first offload": ("abort",),  # of the communicators that torch has split, on 2.15
    "reload": ("init",),
    "recover": ("init",),
    "suspend": ("suspend",),
    "resume": ("resume",),
}
"""Calls of NCCL from which the rank does not return; the fault tables have the barriers."""


class Seen(NamedTuple):
    """What a rank saw of one operation."""

    failed: bool
    state: str
    right: bool
    left: str
    error: str


def arm(point: str, how: str) -> None:
    """Kill or stop this process when it next makes a call of NCCL."""
    standins.inject(standins.Fault("hang", point, rank=VICTIM, times=1))  # type: ignore[arg-type]
    log = Path(os.environ["RELOADPG_STANDIN_LOG"])
    begun = log.read_text().count(f"fault: hang in {point}")

    def watch() -> None:
        while log.read_text().count(f"fault: hang in {point}") == begun:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        standins.clear_faults()

    threading.Thread(target=watch, daemon=True, name="reloadpg test").start()


def connecting() -> int:
    """The number of threads of this process that wait in NCCL for the members of a new group."""
    return sum(frame.f_code is connect_group.__code__ for frame in sys._current_frames().values())


class Player:
    """One rank's job of overlapping groups."""

    def __init__(self, rank: int, **options: Any) -> None:
        self._rank = rank
        self._meetings = Meetings(SIZE)
        start(rank, timeout=BOUND, recoverable=True, **options)
        self._groups: list[tuple[Any, list[int]]] = [(dist.group.WORLD, list(range(SIZE)))]
        for members in ([0, 1], [1, 2], [0, 1, 2]):
            group = dist.new_group(members)
            if rank in members:
                self._groups.append((group, members))
        self._processes = [None] * SIZE
        assert self.is_right()
        dist.all_gather_object(self._processes, os.getpid())

    def settle(self) -> None:
        """Complete a recovery and a cycle: what a process creates once exists afterwards."""
        reloadpg.recovery.recover("a test")
        reloadpg.offload()
        reloadpg.reload(connect="eager")
        assert self.is_right()
        self._meetings.meet()

    def is_right(self) -> bool:
        return all(
            summed(group, self._rank) == sum(member + 1 for member in members)
            for group, members in self._groups
        )

    def run(self, operation: str, point: str, how: str) -> str:
        """The error of an operation in which the victim is disturbed; empty if it completes."""
        calls: dict[str, Callable[[], object]] = {
            "reload": reloadpg.reload,
            "resume": reloadpg.reload,
            "recover": lambda: reloadpg.recovery.recover("a test", timeout=BOUND),
        }
        if operation in ("reload", "resume"):
            reloadpg.offload()
        self._meetings.meet()
        if self._rank == VICTIM:
            arm(point, how)
        self._meetings.meet()
        try:
            calls.get(operation, reloadpg.offload)()
        except reloadpg.ReloadpgError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if how == "stopped" and self._rank == 0:
                os.kill(self._processes[VICTIM] or 0, signal.SIGCONT)
        return ""

    def seen(self, operation: str, point: str, how: str) -> Seen:
        """Run an operation, and recover from it."""
        self._meetings.meet()
        before = held()
        self._meetings.meet()
        error = self.run(operation, point, how)
        self._meetings.meet()
        state = str(reloadpg.status().state)
        if error:
            reloadpg.recovery.recover("a test")
        else:
            reloadpg.reload(connect="eager")
        right = self.is_right()
        self._meetings.meet()
        # Each thread that creates groups gets its store client in the first operation.
        stores = THREADS if operation == "first offload" else 0
        stuck = 0
        if os.environ["TORCH_DIST_USE_NCCL2"] == "0" and (point, how) == ("init", "stopped"):
            # Torch's first engine cannot end a creation whose other members have given it up: a
            # thread of a member that continues later waits in NCCL until its process ends.
            eventually(lambda: standins.communicators() - before.communicators <= connecting())
            stuck = connecting()
        known = how == "stopped" and point in ("suspend", "resume") and ABORT_LEAVES
        left = "" if known else left_over(before, stuck, stores)
        return Seen(bool(error), state, right, left, error)


def survive(rank: int, size: int, operation: str, how: str) -> list[Seen]:
    strategy = {"strategy": "suspend"} if operation in ("suspend", "resume") else {}
    player = Player(rank, **strategy)
    if operation != "first offload":
        player.settle()
    return [player.seen(operation, point, how) for point in POINTS[operation]]


def lose(rank: int, size: int, operation: str, point: str) -> tuple[str, str, int, int]:
    strategy = {"strategy": "suspend"} if operation in ("suspend", "resume") else {}
    player = Player(rank, **strategy)
    if operation != "first offload":
        player.settle()
    error = player.run(operation, point, "killed")
    state = str(reloadpg.status().state)
    dist.destroy_process_group()
    eventually(lambda: standins.communicators() == 0)
    torch.cuda.empty_cache()
    return error, state, standins.communicators(), used() - standins.left_bytes() // (1 << 20)


def operations(*points: str) -> Any:
    """Parametrize a test by operation, without those that this torch lacks."""
    chosen = [one for one in POINTS if CAN_SUSPEND or one not in ("suspend", "resume")]
    if not points:
        return pytest.mark.parametrize("operation", chosen)
    cells = [(one, point) for one in chosen for point in POINTS[one]]
    return pytest.mark.parametrize(points, cells)


def settings(engine: str, folder: Path) -> dict[str, Any]:
    env = {**engine_variables(engine), "RELOADPG_STANDIN_LOG": str(folder / "log")}
    (folder / "log").touch()
    return {"standins": True, "env": env, "timeout": 500.0}


@pytest.mark.parametrize("engine", ENGINES)
@operations()
def test_all_ranks_end_alike_and_leave_nothing(operation: str, engine: str, tmp_path: Path) -> None:
    """A rank that is stopped makes the operation fail on all.

    After the next recovery, values are right, and nothing is left of the operation.
    """
    if operation == "first offload" and engine == "legacy":
        pytest.skip("this engine destroys communicators that torch has split")
    args = (operation, "stopped")
    ranks = run_ranks(survive, SIZE, args=args, **settings(engine, tmp_path))
    for point, results in zip(POINTS[operation], zip(*ranks, strict=True), strict=True):
        shown = f"{point}: {results}"
        assert len({(one.failed, one.state) for one in results}) == 1, shown
        assert all(one.right and not one.left for one in results), shown
        assert results[0].failed, shown


@pytest.mark.parametrize("engine", ENGINES)
@operations("operation", "point")
def test_the_peers_of_a_killed_rank_end_alike_and_free_everything(
    operation: str, point: str, engine: str, tmp_path: Path
) -> None:
    if operation == "first offload" and engine == "legacy":
        pytest.skip("this engine destroys communicators that torch has split")
    chosen = settings(engine, tmp_path)
    outcomes = run_ranks(lose, SIZE, args=(operation, point), check=False, **chosen)
    assert outcomes[VICTIM].signal == signal.SIGKILL
    peers = [one for one in outcomes if one.rank != VICTIM]
    assert [one.exception for one in peers] == [None] * len(peers)
    errors, states, communicators, mib = zip(*(one.result for one in peers), strict=True)
    assert all(errors), errors
    assert len(set(states)) == 1, (states, errors)
    # The creation of a communicator waits for a member that is killed before it takes part.
    may_stay = 4 if point == "init" else 0
    assert max(communicators) <= may_stay, (communicators, errors)
    may_leave = may_stay or (point in ("suspend", "resume") and ABORT_LEAVES)
    assert may_leave or max(mib) == 0, (mib, errors)


EIGHT = [
    *([rank, (rank + 1) % 8] for rank in range(8)),
    *([rank, (rank + 3) % 8] for rank in range(8)),
    *([rank, rank + 2, rank + 4, rank + 6] for rank in range(2)),
    *([rank, rank + 1, rank + 2, rank + 3] for rank in (0, 4)),
]
"""20 overlapping groups of 8 ranks."""


@on_engines(8)
def test_eight_ranks_with_twenty_overlapping_groups(engine: str, rank: int) -> None:
    """Their offload and a reload in the background complete with default options."""
    start(rank)
    groups = [(dist.new_group(sorted(members)), members) for members in EIGHT]
    mine = [(group, sum(members) + len(members)) for group, members in groups if rank in members]
    for _ in range(2):
        assert [summed(group, rank) for group, _ in mine] == [total for _, total in mine]
        reloadpg.offload()
        assert standins.communicators() == 0
        reloadpg.reload(wait=False).result()
