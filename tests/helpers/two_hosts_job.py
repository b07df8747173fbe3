"""One rank of a job on two hosts; the test cuts the link between them.

``torchrun ... two_hosts_job.py FOLDER point POINT``, ``... FOLDER outages OUTAGE...``, or
``... FOLDER program SEED``. A rank that is ready for the cut writes ``here.RANK`` and waits for
``go.RANK``; at its end it writes ``done.RANK``. In a program, each part has a folder, in which a
rank also writes ``over.RANK`` when its call has ended, and waits for ``up.RANK``.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg
from helpers import worlds
from helpers.fault_job import Job, Seen, attempt, interfere, stop_interfering
from helpers.repeating import repeat

BOUND_S = 5.0
ALLOWANCE_S = 30.0
"""Seconds after the timeout within which every rank must have raised."""
LIMIT, SHORT = timedelta(seconds=90), timedelta(seconds=3)
"""Timeouts of collectives: the default, reached only by a hang, and that during an outage."""
CUT = 2
"""The step of an outage."""


def mark(folder: Path, name: str) -> None:
    (folder / f"{name}.{os.environ['RANK']}").touch()


def cut_here(folder: Path) -> None:
    """Let the test cut the link, then continue."""
    mark(folder, "here")
    (folder / f"go.{os.environ['RANK']}").read_text()


def cut_in_a_reload(folder: Path, point: str) -> None:
    """Cut the link at a point of a reload: all ranks raise and no group is live.

    Without a point, the reload succeeds.
    """
    job = Job("faulty", subgroups=((0, 1), (1, 0)), timeout=BOUND_S, limit=timedelta(seconds=30))
    assert os.environ["GROUP_RANK"] == os.environ["RANK"]  # torchrun counts two nodes
    if point:
        interfere(point, lambda: cut_here(folder))
    reloadpg.offload()
    seen = attempt(reloadpg.reload)
    if not point:
        assert seen.kind == "", seen
        job.assert_live(1)
    else:
        assert seen.kind == "RendezvousTimeoutError", seen
        assert "rank " in seen.text or "store" in seen.text, seen
        assert seen.seconds < BOUND_S + ALLOWANCE_S, seen
        assert job.states() in ({"failed"}, {"offloaded"})


class Outage:
    """A loop of five steps; in one of them the link is down for some seconds."""

    def __init__(self, job: Job, folder: Path, where: str) -> None:
        self.job, self.folder, self.where = job, folder, where
        self.log: list[tuple[int, int]] = []
        self.errors: list[str] = []

    def step(self, number: int, tries: int) -> None:
        """Sum over all groups. The outage is before the sums, or in a recovery."""
        self.log.append((number, tries))
        if (number, tries) != (CUT, 1):
            assert worlds.sums_right(*self.job.groups.values())
        elif self.where == "recover":
            mark(self.folder, "ready")  # an early abort would fail others in the previous step
            while len(list(self.folder.glob("ready.?"))) < self.job.size:
                time.sleep(0.02)
            interfere("recover.group1", lambda: cut_here(self.folder))
            raise dist.DistNetworkError("injected; the link goes down in the recovery")
        else:
            self._set_timeouts(SHORT)
            cut_here(self.folder)
            try:
                assert worlds.sums_right(*self.job.groups.values())
            finally:
                with suppress(RuntimeError):
                    self._set_timeouts(LIMIT)

    def _set_timeouts(self, limit: timedelta) -> None:
        for group in self.job.groups.values():
            _set_pg_timeout(limit, group)

    def repeating(self) -> None:
        """Run the steps; a recovery fails at once while the link is down, so try it again."""

        def step(number: int, tries: int) -> None:
            try:
                self.step(number, tries)
            except RuntimeError as error:
                self.errors.append(repr(error))
                raise

        def recover() -> None:
            for pause in (1, 2, 4, 8):
                try:
                    reloadpg.recovery.recover()
                    return
                except reloadpg.ReloadpgError as error:
                    self.errors.append(repr(error))
                    time.sleep(pause)
            reloadpg.recovery.recover()

        repeat(step, 5, recover)


def go_through(folder: Path, outages: list[str]) -> None:
    """Run one job: after each outage all ranks repeat the failed step, with correct sums."""
    pairs = ((0, 1), (2, 3), (0, 2), (1, 3))
    job = Job("faulty", subgroups=pairs, timeout=LIMIT.total_seconds(), limit=LIMIT)
    for where in outages:
        outage = Outage(job, folder / where, where)
        before = reloadpg.status().generation
        outage.repeating()
        job.assert_live(generation := reloadpg.status().generation)
        numbers = [number for number, _ in outage.log]
        assert sorted({*numbers}) == [*range(5)]
        assert outage.errors
        assert numbers.count(CUT) > 1
        assert generation > before
        job.agree(where, (outage.log, generation))
        mark(folder / where, "done")


@dataclass(frozen=True)
class Part:
    """A call in which the link goes down until it has ended on all ranks, and the call after it."""

    call: str
    point: str
    mend: str


@dataclass(frozen=True)
class Program:
    """The program of all ranks."""

    ranks_of_a_host: int
    other_link: bool  # whether the store is on another link
    groups: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]

    def must_fail(self, part: Part) -> bool:
        """Whether something uses the link after a point: the store, or groups that connect."""
        connected = part.call == "offload" or part.point == "done"
        return not self.other_link or not connected


POINTS = {
    "step": ("",),
    "offload": ("enter", "group0", "group1", "released"),
    "reload": ("enter", "group0", "group1", "done"),
    "recover": ("enter", "agreed", "group0", "check0", "done"),
}


def program_of(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    ranks_of_a_host = draw.choice([1, 2])
    size = 2 * ranks_of_a_host
    # Each rank is in two groups and the default one, so that each point exists on all ranks.
    groups = draw.choice([[(0, 1), (2, 3), (0, 2), (1, 3)], [(0, 3), (1, 2), (0, 2), (1, 3)]])
    if size == 2:
        groups = [(0, 1), (1, 0)]
    parts = []
    for _ in range(2):
        call = draw.choice(list(POINTS))
        mends = ["reload", "recover"] if call in ("offload", "reload") else ["recover"]
        parts.append(Part(call, draw.choice(POINTS[call]), draw.choice(mends)))
    return Program(ranks_of_a_host, draw.random() < 0.5, tuple(groups), tuple(parts))


def play(folder: Path, program: Program) -> None:
    """Whatever the link cuts off, the next call on all ranks after it is up makes all groups live.

    The ranks may end the call differently, and none hangs.
    """
    limit = timedelta(seconds=30)
    job = Job("faulty", subgroups=program.groups, timeout=BOUND_S, limit=limit, recoverable=True)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: step_without_a_link(job),
        "offload": reloadpg.offload,
        "reload": reloadpg.reload,
        "recover": lambda: reloadpg.recovery.recover("a test", timeout=BOUND_S),
    }
    for number, part in enumerate(program.parts):
        place = folder / str(number)
        if part.call == "reload":
            reloadpg.offload()
        job.meet(f"part {number}")
        if part.point:
            interfere(f"{part.call}.{part.point}", lambda place=place: cut_here(place))  # type: ignore[misc]
        else:
            cut_here(place)
        seen = attempt(calls[part.call])
        stop_interfering()
        (place / f"seen.{job.rank}").write_text(f"{part} {seen} {job.states()}\n")
        assert bool(seen.kind) == program.must_fail(part), f"{part}: {seen}"
        assert seen.seconds < limit.total_seconds() + ALLOWANCE_S, seen
        mark(place, "over")
        (place / f"up.{job.rank}").read_text()
        mended = attempt(calls[part.mend])
        assert mended == Seen("", "", mended.seconds), f"{part}: {seen}, {job.states()}: {mended}"
        job.assert_live()
        job.agree(f"part {number}", (reloadpg.status().generation, job.generations()))
    job.cycle()


def step_without_a_link(job: Job) -> None:
    for group in job.groups.values():
        _set_pg_timeout(SHORT, group)
    try:
        assert worlds.sums_right(*job.groups.values())
    finally:
        for group in job.groups.values():
            with suppress(RuntimeError):
                _set_pg_timeout(LIMIT, group)


def main() -> None:
    folder, kind, *arguments = sys.argv[1:]
    if kind == "outages":
        go_through(Path(folder), arguments)
    elif kind == "program":
        play(Path(folder), program_of(int(arguments[0])))
        mark(Path(folder), "done")
    else:
        cut_in_a_reload(Path(folder), *arguments)
        mark(Path(folder), "done")
        if arguments[0]:
            os._exit(0)  # without notifying the other host
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
