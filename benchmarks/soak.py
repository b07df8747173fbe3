"""Many offload/reload cycles of many groups: no hang, no growth, and how long a cycle takes.

45 groups (WORLD and every subset of 2 to 4 of the 4 ranks, four times each) of real gloo
communicators. Each cycle checks by value the sums of three groups, in turn, and that the
generation is right; every 50th cycle checks all groups. Memory, open files, threads, c10d's
tables and the store's keys are read after the first tenth of the cycles and at the end.

Exit code 1 if anything grows beyond its tolerance, or a sum is wrong.

Usage: python benchmarks/soak.py [--cycles 1000] [--ranks 4] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _output import machine, write_json
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg.testing import run_ranks
from reloadpg.texts import table

BOUND = timedelta(seconds=60)
TOLERANCE = {"rss MiB": 8.0, "open files": 2, "threads": 1, "c10d entries": 0, "store keys": 1}
"""One key, the counter of progress, is made by the first step that takes longer than 0.2 s."""


def _readings() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tables = (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks)
    return {
        "rss MiB": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "c10d entries": sum(map(len, tables)),
        "store keys": c10d._get_default_store().num_keys(),
    }


def _check(groups: list[Any], rank: int) -> None:
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, group=group)
        expected = sum(member + 1 for member in ranks)
        if tensor.item() != expected:
            raise RuntimeError(f"sum over {ranks} is {tensor.item()}, not {expected}")


def _settled() -> dict[str, float]:
    """Readings while no rank is in the middle of anything."""
    dist.barrier()
    reading = _readings()
    dist.barrier()
    return reading


def soak(rank: int, world_size: int, cycles: int) -> dict[str, Any]:
    """The ranks' part: returns times and readings."""
    reloadpg.install(backends={"gloo"}, timeout=BOUND)
    dist.init_process_group("gloo", timeout=BOUND)
    subsets = [
        list(subset)
        for size in range(2, world_size + 1)
        for subset in itertools.combinations(range(world_size), size)
    ]
    made = [dist.new_group(subset) for _ in range(4) for subset in subsets]
    mine = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
    rotation = [index for index, subset in enumerate(subsets * 4) if rank in subset]
    readings: list[dict[str, float]] = []
    offload_ms, reload_ms = [], []
    for cycle in range(1, cycles + 1):
        offload_ms.append(reloadpg.offload().total_ms)
        reload_ms.append(reloadpg.reload().total_ms)
        if reloadpg.status().generation != cycle:
            raise RuntimeError(f"generation {reloadpg.status().generation} in cycle {cycle}")
        turn = {(3 * cycle + step) % len(made) for step in range(3)}
        every = cycle % 50 == 0
        _check([g for i, g in zip(rotation, mine, strict=True) if every or i in turn], rank)
        if cycle in (max(1, cycles // 10), cycles):
            readings.append(_settled())
        if rank == 0 and cycle % max(1, cycles // 20) == 0:
            print(f"cycle {cycle} of {cycles}", file=sys.__stderr__, flush=True)
    return {
        "groups": len(made) + 1,
        "offload_ms": statistics.median(offload_ms),
        "reload_ms": statistics.median(reload_ms),
        "longest_ms": max(max(offload_ms), max(reload_ms)),
        "readings": readings,
        "python_threads": threading.active_count(),
    }


def main() -> int:
    """Run it, print the table, check its limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    results = run_ranks(soak, options.ranks, args=(options.cycles,), timeout=6 * 3600)
    rows, grown = [], []
    for rank, result in enumerate(results):
        early, late = result["readings"][0], result["readings"][-1]
        for name, tolerance in TOLERANCE.items():
            growth = late[name] - early[name]
            rows.append((rank, name, early[name], late[name], growth, tolerance))
            if growth > tolerance:
                grown.append(f"rank {rank}: {name} grew by {growth}")
    header = ("rank", "what", f"cycle {max(1, options.cycles // 10)}", f"cycle {options.cycles}")
    print(table((*header, "growth", "tolerance"), rows))
    summary = {
        "cycles": options.cycles,
        "groups": results[0]["groups"],
        "offload_ms": round(statistics.median(r["offload_ms"] for r in results), 1),
        "reload_ms": round(statistics.median(r["reload_ms"] for r in results), 1),
        "longest_ms": round(max(r["longest_ms"] for r in results), 1),
        "wall_s": round(time.monotonic() - started, 1),
    }
    print("  ".join(f"{name}={value}" for name, value in summary.items()))
    print("\n".join(grown) or "nothing grew")
    write_json(options.json, {"machine": machine(), **summary, "ranks": results})
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
