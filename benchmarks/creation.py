"""Cost of creating groups through the library, against torch alone and against recording wrappers.

Every rank of a job calls ``new_group`` for every group of the job. Here the last rank of a job does
so, on the fake backend, where nothing connects: groups of a grid of 8 x 8 x (ranks / 64) along each
axis, which are 80 calls at 64 ranks and 4,160 at 16,384. Timed are the calls of the whole job, then
those for groups of other ranks alone (``others``), and those for the rank's own groups alone
(``members``), which are created and destroyed again many times.

``torch`` is torch's own ``new_group``, ``reloadable`` the same calls after ``reloadpg.install``,
``recorded`` what a system does that replays all calls in order: a wrapper that keeps the ranks of
every call, of groups of other ranks too.

Each process is fresh and measures all three, in an order that changes from process to process;
ratios are taken within a process. Times are CPU time, since nothing waits for anything.

Usage: python benchmarks/creation.py [--check] [--json PATH] [--processes N] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from _output import command_line, installed, machine, write_json
from torch.testing._internal.distributed.fake_pg import FakeStore

from reloadpg.texts import table

JOB_SIZES = (64, 16384)
KINDS = ("torch", "reloadable", "recorded")
PARTS = ("job", "others", "members")
LIMITS = {"others": 1.2, "members": 1.65}
"""Ratios to torch. A proxy is one more object of C++, and takes its group's place in six tables of
Python and one of C++: 17 us for a member. A creation over NCCL takes milliseconds."""
OTHERS_TIMED = 4000
"""Calls for groups of other ranks, which are repeated in a small job."""
TIME_LIMIT_S = 300


def rank_lists(ranks: int) -> list[list[int]]:
    """The groups along each axis of a grid of 8 x 8 x (ranks / 64)."""
    grid = torch.arange(ranks).view(ranks // 64, 8, 8)
    return [
        row
        for axes in ((0, 1, 2), (0, 2, 1), (1, 2, 0))
        for row in grid.permute(axes).reshape(-1, grid.shape[axes[-1]]).tolist()
    ]


@contextmanager
def creating(kind: str) -> Iterator[Callable[[list[int]], Any]]:
    """Yield the function that creates a group, in a process prepared for it."""
    with installed(backends={"fake"}) if kind == "reloadable" else nullcontext():
        original, calls = dist.new_group, []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append(([list(args[0]), *args[1:]], dict(kwargs)))
            return original(*args, **kwargs)

        yield recorded if kind == "recorded" else original


def measured(ranks: int, kind: str, rounds: int) -> dict[str, float]:
    """Microseconds a call, by part. Initialises and destroys ``torch.distributed``."""
    lists, rank = rank_lists(ranks), ranks - 1
    own = [one for one in lists if rank in one]
    others = [one for one in lists if rank not in one]
    found: dict[str, float] = {}
    with creating(kind) as create:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        _, found["job"] = _timed(create, lists)
        times = max(1, OTHERS_TIMED // len(others))
        found["others"] = statistics.median(_timed(create, others)[1] for _ in range(times))
        members = []
        for _ in range(rounds):
            made, us = _timed(create, own)
            members.append(us)
            for group in made:
                # Groups of one rank are torch's own.
                dist.destroy_process_group(group)
        found["members"] = statistics.median(members)
        dist.destroy_process_group()
    return found


def _timed(create: Callable[[list[int]], Any], lists: Sequence[list[int]]) -> tuple[Any, float]:
    begun = process_time()
    made = [create(ranks) for ranks in lists]
    return made, (process_time() - begun) * 1e6 / len(lists)


def process(ranks: int, number: int, rounds: int) -> dict[str, Any]:
    """What one fresh process measures: each kind, after one that is not counted."""
    gc.disable()
    measured(64, "torch", 1)  # torch's imports and caches, which the first call would include
    kinds = KINDS if number % 2 == 0 else KINDS[::-1]
    return {kind: measured(ranks, kind, rounds) for kind in kinds}


def of_job(ranks: int, processes: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of one job size: medians over the processes, and of the ratios within each."""
    found = []
    for number in range(processes):
        arguments = ["--job", str(ranks), str(number), str(rounds)]
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        if done.returncode != 0:
            raise SystemExit(f"a measured process failed:\n{done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    lists = rank_lists(ranks)
    own = sum(ranks - 1 in one for one in lists)
    calls = {"job": len(lists), "others": len(lists) - own, "members": own}
    rows = []
    for part in PARTS:
        row: dict[str, Any] = {"ranks": ranks, "part": part, "calls": calls[part]}
        for kind in KINDS:
            row[f"{kind}_us"] = statistics.median(one[kind][part] for one in found)
        for kind in KINDS[1:]:
            ratios = [one[kind][part] / one["torch"][part] for one in found]
            row[f"{kind}_ratio"] = statistics.median(ratios)
        rows.append(row | {"limit": LIMITS.get(part)})
    return rows


def check_limits(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Name the rows that are over their limit."""
    over = [
        f"{row['part']} at {row['ranks']} ranks"
        for row in rows
        if row["limit"] is not None and not row["reloadable_ratio"] <= row["limit"]
    ]
    return {"over": over, "ok": not over}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--processes", type=int, default=9, help="fresh processes of each size")
    parser.add_argument("--job", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        print(json.dumps(process(*options.job)))
        return 0
    sizes, rounds = (JOB_SIZES[:1], 2) if options.quick else (JOB_SIZES, 30)
    processes = 1 if options.quick else options.processes
    rows = [row for size in sizes for row in of_job(size, processes, rounds)]
    result = {
        "benchmark": "creation",
        "machine": machine(),
        "settings": {"processes": processes, "rounds": rounds},
        "rows": rows,
        **check_limits(rows),
    }
    columns = (
        *("ranks", "part", "calls", "torch_us", "reloadable_us", "recorded_us"),
        *("reloadable_ratio", "recorded_ratio", "limit"),
    )
    header = [name.replace("_", " ") for name in columns]
    print(table(header, [[row[name] for name in columns] for row in rows]), end="\n\n")
    print("ok" if result["ok"] else f"OVER A LIMIT: {', '.join(result['over'])}")
    write_json(options.json, result)
    return 1 if options.check and not result["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
