"""Time of an offload and of a reload: against the number of groups, and against the job's size.

By number of groups: 1 to 100 groups (WORLD is one of them) on two gloo ranks, which connect for
real, and on the fake backend, where nothing but the library's and torch's own Python remains.
``own`` is the library's share: the total without groups, device work and waiting. ``torch`` is
the time to destroy and create the same number of groups without the library. A group's time
includes some of the library's work, so the difference of the two totals on the fake backend is an
upper limit of it.

By job size: the groups of one rank of a Megatron-style trainer (two models) in jobs of 64 to
16,384 ranks, on the fake backend, created as Megatron creates them: every rank calls ``new_group``
for every group of the job. ``reload`` rebuilds the groups of which the rank is a member. ``replay
all`` is the baseline: destroy the rank's groups and call ``new_group`` again for every group of the
job. ``torch`` is the time to create the rank's own groups without the library. ``wide`` adds groups
whose size is a quarter of the job's: torch's ``new_group`` iterates over the ranks, so their cost
grows with the job. One process for each size. Times are CPU times, since nothing waits.

Usage: python benchmarks/reload.py [--check] [--json PATH] [--cycles N] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from _megatron import rank_lists
from _output import command_line, installed, machine, write_json
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg.testing import run_ranks
from reloadpg.texts import table

GROUPS = (1, 10, 25, 50, 100)
JOB_SIZES = (64, 256, 1024, 4096, 16384)
MODELS = 2
OWN_GROUPS = 50
OWN_LIMIT_MS, FLAT_LIMIT, SPEEDUP_LIMIT = 10.0, 1.5, 50.0
TIME_LIMIT_S = 600


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


# ---------------------------------------------------------------------------------------------
# by number of groups


def cycles_of(groups: int, cycles: int) -> dict[str, Any]:
    """Medians of an offload and a reload of this number of groups of all ranks, including WORLD."""
    with counted_collections() as collections:
        reports = measure(groups, cycles)
    medians = {
        f"{operation}_{name}": median([figures(both[index])[name] for both in reports])
        for index, operation in enumerate(("offload", "reload"))
        for name in figures(reports[0][index])
    }
    return {
        "groups": groups,
        **medians,
        "offload_per_group_ms": medians["offload_ms"] / groups,
        "reload_per_group_ms": medians["reload_ms"] / groups,
        "collections": len(collections),
    }


def measure(groups: int, cycles: int) -> list[tuple[reloadpg.Report, reloadpg.Report]]:
    """The reports of the offload and of the reload of each cycle. Collective, blocking.

    The first cycle, which opens connections and fills caches, does not count.
    """
    held = [dist.new_group() for _ in range(groups - 1)]
    reports = [(reloadpg.offload(), reloadpg.reload()) for _ in range(cycles + 1)]
    assert all(len(one.groups) == groups for both in reports for one in both)
    for group in held:
        dist.destroy_process_group(group)
    return reports[1:]


NOT_OURS = {"callbacks", "collect", "device", "groups", "store"}
"""Phases in which communicators, devices, the network or the caller's code take the time."""


def figures(report: reloadpg.Report) -> dict[str, float]:
    outside = [span.ms for span in report.spans if span.is_wait or span.name in NOT_OURS]
    return {
        "ms": report.total_ms,
        "group_ms": median([group.ms for group in report.groups]),
        "wait_ms": report.wait_ms,
        "own_ms": report.total_ms - sum(outside),
    }


def torch_alone(groups: int, cycles: int) -> dict[str, float]:
    """Medians of destroying and creating the same number of groups without the library.

    WORLD cannot be destroyed alone: one more subgroup stands for it.
    """
    destroy, create = [], []
    everyone = list(range(dist.get_world_size()))
    held = [dist.new_group(everyone) for _ in range(groups)]
    for _ in range(cycles + 1):
        # The ranks meet in between, as the library's do: if one still creates or destroys groups
        # while the other continues, gloo fails to connect ("Connection closed by peer").
        dist.barrier()
        begun = perf_counter()
        while held:
            dist.destroy_process_group(held.pop())
        destroy.append((perf_counter() - begun) * 1e3)
        dist.barrier()
        begun = perf_counter()
        held = [dist.new_group(everyone) for _ in range(groups)]
        create.append((perf_counter() - begun) * 1e3)
    dist.barrier()
    while held:
        dist.destroy_process_group(held.pop())
    dist.barrier()
    return {"torch_destroy_ms": median(destroy[1:]), "torch_create_ms": median(create[1:])}


def gloo_rank(rank: int, world_size: int, wrapped: bool, counts: list[int], cycles: int) -> Any:
    gc.disable()
    with installed(backends={"gloo"}) if wrapped else nullcontext():
        dist.init_process_group("gloo")
        rows = [(cycles_of if wrapped else torch_alone)(count, cycles) for count in counts]
        dist.destroy_process_group()
    return rows


def by_groups_gloo(counts: Sequence[int], cycles: int) -> list[dict[str, Any]]:
    # All ranks do the same and differ only in their waits, so the figures of rank 0 are used.
    ours, torchs = (
        run_ranks(gloo_rank, 2, args=(wrapped, list(counts), cycles), timeout=TIME_LIMIT_S)[0]
        for wrapped in (True, False)
    )
    return [{"backend": "gloo", **row, **alone} for row, alone in zip(ours, torchs, strict=True)]


def by_groups_fake(counts: Sequence[int], cycles: int) -> list[dict[str, Any]]:
    rows = []
    for count in counts:
        with installed(backends={"fake"}), fake_job(8):
            row = cycles_of(count, cycles)
        with fake_job(8):
            rows.append({"backend": "fake", **row, **torch_alone(count, cycles)})
    return rows


# ---------------------------------------------------------------------------------------------
# by job size


def job_of(world_size: int, cycles: int) -> dict[str, Any]:
    """The last rank of a job: reload of its groups, and replay of all groups. One process."""
    rank = world_size - 1
    row = {"ranks": world_size, **_members_only(world_size, rank, cycles, wide=False)}
    # The baseline takes long in a large job, and its spread is small.
    row |= _replay_all(world_size, rank, max(1, cycles // 15))
    row["speedup"] = row["replay_all_ms"] / row["reload_ms"]
    row["torch_ms"] = _torch_members(world_size, rank, cycles, wide=False)
    row["wide_reload_ms"] = _members_only(world_size, rank, cycles, wide=True)["reload_ms"]
    row["wide_torch_ms"] = _torch_members(world_size, rank, cycles, wide=True)
    return row


def _members_only(world_size: int, rank: int, cycles: int, *, wide: bool) -> dict[str, Any]:
    gc.collect()
    with installed(backends={"fake"}), fake_job(world_size, rank):
        before = resident_mb()
        made = [dist.new_group(ranks) for ranks in job_groups(world_size, wide=wide)]
        mine = [group for group in made if isinstance(group, reloadpg.ReloadableProcessGroup)]
        held_mb = resident_mb() - before
        total = len(made)
        del made
        offloads, reloads = [], []
        with counted_collections() as collections:
            for _ in range(cycles + 1):
                offloads.append(cpu_ms(reloadpg.offload))
                reloads.append(cpu_ms(reloadpg.reload))
        live = sum(group._managed.is_live and group.generation == cycles + 1 for group in mine)
        if live != len(mine):
            raise RuntimeError(f"{live} of {len(mine)} groups were rebuilt")
    return {
        "job_groups": total,
        "member_groups": live + 1,  # and WORLD
        "offload_ms": median(offloads[1:]),
        "reload_ms": median(reloads[1:]),
        "members_mb": held_mb,
        "collections": len(collections),
    }


def _torch_members(world_size: int, rank: int, cycles: int, *, wide: bool) -> float:
    """Time to create the rank's own groups with torch alone."""
    mine = [
        ranks for ranks in job_groups(world_size, wide=wide) if rank in ranks and len(ranks) > 1
    ]
    times: list[float] = []
    held: list[Any] = []
    with fake_job(world_size, rank):
        for _ in range(cycles + 1):
            times.append(cpu_ms(lambda: held.extend(map(dist.new_group, mine))))
            while held:
                dist.destroy_process_group(held.pop())
    return median(times[1:])


def _replay_all(world_size: int, rank: int, cycles: int) -> dict[str, float]:
    """The baseline: record all calls of the job, and repeat all of them."""
    times = []
    with fake_job(world_size, rank):
        before = resident_mb()
        calls = list(job_groups(world_size))
        groups = [dist.new_group(ranks) for ranks in calls]
        held_mb = resident_mb() - before

        def replay() -> None:
            for group in groups:
                if isinstance(group, dist.ProcessGroup):
                    dist.destroy_process_group(group)
            groups[:] = [dist.new_group(ranks) for ranks in calls]

        for _ in range(cycles):
            times.append(cpu_ms(replay))
    return {"replay_all_ms": median(times), "replay_all_mb": held_mb}


def job_groups(world_size: int, *, wide: bool = False) -> Iterator[list[int]]:
    for _ in range(MODELS):
        yield from rank_lists(world_size, wide=wide)


def by_job_size(sizes: Sequence[int], cycles: int) -> list[dict[str, Any]]:
    """One fresh process for each size, so that sizes share no memory or caches."""
    rows = []
    for size in sizes:
        done = subprocess.run(
            [sys.executable, __file__, "--job", str(size), "--cycles", str(5 * cycles)],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the job of {size} ranks failed:\n{done.stderr}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


# ---------------------------------------------------------------------------------------------


@contextmanager
def fake_job(world_size: int, rank: int = 0) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def counted_collections() -> Iterator[list[int]]:
    """The full garbage collections within this block."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def cpu_ms(action: Callable[[], object]) -> float:
    begun = process_time()
    action()
    return (process_time() - begun) * 1e3


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


# ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--cycles", type=int, default=9, help="measured cycles of each row")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.disable()
    if options.job:
        print(json.dumps(job_of(options.job, options.cycles)))
        return 0

    quick, cycles = options.quick, 1 if options.quick else options.cycles
    counts = (1, 3) if quick else GROUPS
    groups = by_groups_gloo(counts, cycles) + by_groups_fake(counts, cycles)
    jobs = by_job_size(JOB_SIZES[:2] if quick else JOB_SIZES, cycles)
    result = {
        "benchmark": "reload",
        "machine": machine(),
        "settings": {"cycles": cycles, "models": MODELS},
        "by_groups": groups,
        "by_job_size": jobs,
        **check_limits(groups, jobs, counts[-1] if quick else OWN_GROUPS),
    }
    _print(result)
    write_json(options.json, result)
    return 1 if options.check and not result["ok"] else 0


def check_limits(
    groups: Sequence[dict[str, Any]], jobs: Sequence[dict[str, Any]], own_groups: int
) -> dict[str, Any]:
    """The figures that have a limit, and whether all are within it."""
    own = max(
        row[f"{operation}_own_ms"]
        for row in groups
        for operation in ("offload", "reload")
        if row["groups"] == own_groups
    )
    checks = {
        "own_ms": (own, "<", OWN_LIMIT_MS),
        "flat": (jobs[-1]["reload_ms"] / jobs[0]["reload_ms"], "<", FLAT_LIMIT),
        "speedup": (jobs[-1]["speedup"], ">", SPEEDUP_LIMIT),
        "collections": (sum(row["collections"] for row in (*groups, *jobs)), "<", 1),
    }
    return {
        "checks": {
            name: {"value": value, "limit": f"{sign} {limit:g}"}
            for name, (value, sign, limit) in checks.items()
        },
        "ok": all(
            value < limit if sign == "<" else value > limit
            for value, sign, limit in checks.values()
        ),
    }


def _print(result: dict[str, Any]) -> None:
    by_groups = (
        *("backend", "groups", "offload_ms", "offload_wait_ms", "offload_own_ms"),
        *("reload_ms", "reload_per_group_ms"),
        *("reload_wait_ms", "reload_own_ms"),
        *("torch_destroy_ms", "torch_create_ms"),
    )
    _rows(by_groups, result["by_groups"])
    by_job_size = (
        *("ranks", "job_groups", "member_groups", "offload_ms", "reload_ms", "torch_ms"),
        *("replay_all_ms", "speedup", "members_mb", "replay_all_mb"),
        *("wide_reload_ms", "wide_torch_ms"),
    )
    _rows(by_job_size, result["by_job_size"])
    for name, check in result["checks"].items():
        print(f"{name}: {check['value']:.2f} (limit {check['limit']})")
    print("ok" if result["ok"] else "OVER A LIMIT")


def _rows(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    header = [name.replace("_", " ") for name in columns]
    print(table(header, [[row.get(name) for name in columns] for row in rows]), end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
