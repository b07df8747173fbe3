"""Time and memory of a cycle against destroying and creating the same groups by hand.

By number of groups: four ranks, each a member of this number of pairs, on the simulated accelerator
(``sim``: a communicator takes 20 ms to create and 10 ms to release and holds 4 MiB) and on gloo. A
cycle is a release of all pairs and their rebuild, between two barriers:

``reloadable``
    ``reloadpg.offload()`` and ``reload()``.
``by hand``
    ``destroy_process_group`` for the rank's own groups, then ``new_group`` for all groups of the
    job, in order: torch names a group by counting calls, so all ranks take part in all. (With
    ``use_local_synchronization=True`` the members alone do; a group created again then has the name
    of the one before, finds its addresses in the store, and hangs.) At four ranks this is also what
    systems do that replay all calls in order.

``MiB`` is by how much the resident memory of rank 0's process shrinks in the release. The gloo
groups hold next to none.

By number of ranks: one rank's groups of a Megatron-style trainer on the fake backend, as
``benchmarks/reload.py`` measures them: ``reload``, torch's creation of the rank's own groups, and
``replay all``, every call of the job. CPU time there, wall time above.

``benchmarks/plot.py`` draws the picture from the file that ``--json`` writes.

Usage: python benchmarks/cycle.py [--json PATH] [--cycles N] [--quick]
"""

from __future__ import annotations

import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from _output import command_line, installed, machine, write_json
from reload import JOB_SIZES, by_job_size, resident_mb

import reloadpg
from reloadpg.testing import faults, run_ranks, simulated
from reloadpg.texts import table

RANKS = 4
GROUPS = (2, 8, 16, 32)
BACKENDS = ("sim", "gloo")
WAYS = ("reloadable", "by hand")
BYTES = 4 << 20
SECONDS = {"create": 0.02, "release": 0.01}
"""Length of the steps of the simulated accelerator."""
FIGURES = ("release_ms", "rebuild_ms", "cycle_ms", "ratio", "freed_mb")
TIME_LIMIT_S = 500


def rank_of_job(
    rank: int, world_size: int, backend: str, way: str, counts: list[int], cycles: int
) -> list[dict[str, float]]:
    """Run one rank: medians of its cycles, by number of groups."""
    gc.disable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if backend == "sim":
        simulated.register()
        simulated.configure(bytes_per_communicator=BYTES)
        for step, seconds in SECONDS.items():
            faults.inject(faults.Fault(step, "stall", seconds=seconds, times=None))  # type: ignore[arg-type]
    ours = way == "reloadable"
    with installed(backends={backend}, world=False) if ours else nullcontext():
        dist.init_process_group(backend)
        rows = [_cycles(way, count, cycles) for count in counts]
        dist.destroy_process_group()
    return rows


def _cycles(way: str, count: int, cycles: int) -> dict[str, float]:
    first, second = [0, 1], [2, 3]
    calls = [pair for _ in range(count) for pair in (first, second)]

    def create() -> list[Any]:
        made = [dist.new_group(pair) for pair in calls]
        return [group for group in made if isinstance(group, dist.ProcessGroup)]

    held = create()

    def release() -> None:
        if way == "reloadable":
            reloadpg.offload()
        while way != "reloadable" and held:
            dist.destroy_process_group(held.pop())

    def rebuild() -> None:
        if way == "reloadable":
            reloadpg.reload()
        else:
            held.extend(create())

    rows = []
    for _ in range(cycles + 1):
        for group in held:  # creates its communicator
            dist.all_reduce(torch.ones(1), group=group)
        before = resident_mb()
        release_ms = _between_barriers(release)
        freed = before - resident_mb()
        rows.append((release_ms, _between_barriers(rebuild), freed))
    while held:
        dist.destroy_process_group(held.pop())
    released, rebuilt, freed_mb = (
        statistics.median(values) for values in zip(*rows[1:], strict=True)
    )
    return {
        "release_ms": released,
        "rebuild_ms": rebuilt,
        "cycle_ms": statistics.median(row[0] + row[1] for row in rows[1:]),
        "freed_mb": freed_mb,
    }


def _between_barriers(action: Callable[[], None]) -> float:
    dist.barrier()
    begun = perf_counter()
    action()
    dist.barrier()
    return (perf_counter() - begun) * 1e3


def by_groups(counts: Sequence[int], cycles: int) -> list[dict[str, Any]]:
    """Rows by backend, way and number of groups: figures of rank 0."""
    rows = []
    for backend in BACKENDS:
        for way in WAYS:
            given = (backend, way, list(counts), cycles)
            seen = run_ranks(rank_of_job, RANKS, args=given, timeout=TIME_LIMIT_S)[0]
            rows += [
                {"backend": backend, "way": way, "groups": count, **row}
                for count, row in zip(counts, seen, strict=True)
            ]
    hand = {(row["backend"], row["groups"]): row for row in rows if row["way"] == "by hand"}
    for row in rows:
        row["ratio"] = row["cycle_ms"] / hand[row["backend"], row["groups"]]["cycle_ms"]
    return rows


def _print(rows: Sequence[dict[str, Any]], *columns: str) -> None:
    header = [name.replace("_", " ") for name in columns]
    print(table(header, [[row[name] for name in columns] for row in rows]), end="\n\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the tables."""
    parser = command_line(__doc__, check=False)
    parser.add_argument("--cycles", type=int, default=5, help="measured cycles of each row")
    options = parser.parse_args(arguments)
    cycles = 1 if options.quick else options.cycles
    result = {
        "benchmark": "cycle",
        "machine": machine(),
        "settings": {"cycles": cycles, "ranks": RANKS, "bytes": BYTES, **SECONDS},
        "by_groups": by_groups(GROUPS[:1] if options.quick else GROUPS, cycles),
        "by_job_size": by_job_size(JOB_SIZES[:1] if options.quick else JOB_SIZES, cycles),
    }
    _print(result["by_groups"], "backend", "way", "groups", *FIGURES)
    _print(result["by_job_size"], "ranks", "job_groups", "reload_ms", "torch_ms", "replay_all_ms")
    write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
