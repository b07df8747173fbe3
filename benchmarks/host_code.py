"""Time of NCCL's calls in an offload and a reload against destroying and creating by hand in torch.

One run: each rank holds two equal lists of groups of all ranks, one of reloadable groups and one of
groups that ``install(exclude=...)`` bypasses. A cycle releases and rebuilds each list between
barriers, one list after the other, in turns; a ratio is the median of the ratios of the cycles.

``release``: ``offload()`` against ``destroy_process_group`` of each group.
``first release``: the same for the first cycle, in which torch's communicators are not yet rebuilt.
``rebuild``: ``reload(connect="eager")`` against ``new_group``, each with a collective on each.

For each of torch's engines of the backend. It runs over stand-ins for CUDA and NCCL, whose calls
take milliseconds: ``--call-ms`` lets each creation, destroy and abort take so much longer. With
RELOADPG_NCCL it runs over NVIDIA's host code of NCCL. It needs torch's CUDA build, and no GPU.

Usage: python benchmarks/host_code.py [--ranks N] [--groups N] [--cycles N] [--call-ms MS] [--check]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from _output import command_line, installed, machine, write_json

import reloadpg
from reloadpg.testing import run_ranks, standins
from reloadpg.testing.faults import Fault, inject
from reloadpg.texts import table

ENGINES: Mapping[str, Mapping[str, str]] = {
    "ProcessGroupNCCL": {"TORCH_DIST_USE_NCCL2": "0"},
    **({"ProcessGroupNCCL2": {}} if hasattr(dist.distributed_c10d, "ProcessGroupNCCL2") else {}),
}
BY_HAND = "by hand"
LIMITS = {"ProcessGroupNCCL": 0.3, "ProcessGroupNCCL2": 1.05}
"""Largest ratio of a release: engines that allow parallel calls, and those that do not."""
SLOW = ("init", "destroy", "abort")
COLUMNS = ("engine", "step", "ours_ms", "torch_ms", "ratio")


def rank_of_job(
    rank: int, size: int, count: int, cycles: int, call_ms: float
) -> dict[str, list[list[float]]]:
    """Run one rank: by step, the times (ours, torch's) of each cycle in milliseconds."""
    torch.cuda.set_device(rank)
    for call in SLOW if rank == 0 and call_ms else ():
        inject(Fault("nccl", "stall", operation=call, times=None, seconds=call_ms / 1e3))
    with installed(exclude=[BY_HAND], world=False):
        dist.init_process_group("nccl")
        everyone = list(range(size))

        def create(name: str) -> list[Any]:
            return [dist.new_group(everyone, group_desc=name) for _ in range(count)]

        def use(groups: Sequence[Any]) -> None:
            for group in groups:
                dist.all_reduce(torch.ones(1, device="cuda"), group=group)
            torch.cuda.synchronize()

        def destroy() -> None:
            while by_hand:
                dist.destroy_process_group(by_hand.pop(0))

        def rebuild() -> None:
            by_hand.extend(create(BY_HAND))
            use(by_hand)

        def reload() -> None:
            reloadpg.reload(connect="eager")
            use(ours)

        ours, by_hand = create("ours"), create(BY_HAND)
        use(ours)
        use(by_hand)
        times: dict[str, list[list[float]]] = {"first release": [], "release": [], "rebuild": []}
        for cycle in range(cycles + 1):
            both: dict[str, list[Callable[[], object]]] = {
                "release": [reloadpg.offload, destroy],
                "rebuild": [reload, rebuild],
            }
            for step, calls in both.items():
                order = (0, 1) if cycle % 2 else (1, 0)
                measured = [0.0, 0.0]
                for which in order:
                    measured[which] = _between_barriers(calls[which])
                if cycle or step == "release":
                    times[step if cycle else f"first {step}"].append(measured)
        dist.destroy_process_group()
    return times


def _between_barriers(action: Callable[[], object]) -> float:
    dist.barrier()
    torch.cuda.synchronize()
    begun = perf_counter()
    action()
    dist.barrier()
    torch.cuda.synchronize()
    return (perf_counter() - begun) * 1e3


def measured(ranks: int, groups: int, cycles: int, call_ms: float) -> list[dict[str, Any]]:
    """Rows by engine and step, of rank 0."""
    rows = []
    for engine, variables in ENGINES.items():
        times = run_ranks(
            rank_of_job,
            ranks,
            args=(groups, cycles, call_ms),
            standins=True,
            env=variables,
            timeout=540,
        )[0]
        for step, pairs in times.items():
            ours, by_torch = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(one / other for one, other in pairs)
            row = (engine, step, round(ours, 1), round(by_torch, 1), round(ratio, 2))
            rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8, help="groups of each list")
    parser.add_argument("--cycles", type=int, default=5, help="measured cycles")
    parser.add_argument("--call-ms", type=float, default=0.0, help="longer calls of the stand-in")
    options = parser.parse_args(arguments)
    cycles, groups = (1, 2) if options.quick else (options.cycles, options.groups)
    rows = measured(options.ranks, groups, cycles, options.call_ms)
    print(table([name.replace("_", " ") for name in COLUMNS], [list(row.values()) for row in rows]))
    settings = {**vars(options), "cycles": cycles, "groups": groups, "json": None}
    settings["nccl"] = os.environ.get(standins.NCCL)
    result = {"benchmark": "host_code", "machine": machine(), "settings": settings, "rows": rows}
    write_json(options.json, result)
    over = [
        row for row in rows if row["step"] == "release" and row["ratio"] > LIMITS[row["engine"]]
    ]
    if options.check and over:
        print(f"over the limit: {over}", file=sys.stderr)
    return int(bool(options.check and over))


if __name__ == "__main__":
    sys.exit(main())
