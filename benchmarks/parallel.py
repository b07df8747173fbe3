"""Measure the gain of parallelism: of groups within a reload, of a reload with a copy of weights.

Simulated ranks (processes) whose backend takes as long to create a group as NCCL takes to build a
communicator, without using the processor: the job waits for its slowest rank, as on GPUs. Reloads
at several values of ``parallelism``, against creating the same groups with torch alone. Then
``reload(wait=False)`` while the caller copies for a while, against one after the other.

Usage: python benchmarks/parallel.py [--check] [--json PATH] [--quick] [--cycles N]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from _output import command_line, machine, write_json

import reloadpg
from reloadpg.testing import faults, run_ranks, simulated
from reloadpg.texts import table

RANKS = 4
GROUPS = 24
CREATION_S = 0.3
COPY_S = 1.0
WIDTHS = (1, 2, 4, 8)
LIMIT = 0.25
"""Of the time at ``parallelism=1``, at 8."""
OVERLAP_LIMIT = 1.3
"""Of the longer one of reload and copy, for both at the same time."""


def timed(call: Callable[[], object]) -> float:
    """Duration of a call in seconds."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def slow(creation: float) -> faults.Fault:
    """Every creation takes this number of seconds."""
    return faults.Fault("create", "stall", seconds=creation, times=None)


def groups_of(count: int) -> list[Any]:
    return [dist.new_group(list(range(RANKS))) for _ in range(count)]


def reloads(rank: int, size: int, width: int, groups: int, creation: float, cycles: int) -> float:
    """The median time of a reload of WORLD and this number of groups."""
    start(width)
    groups_of(groups)
    faults.inject(slow(creation))
    times = []
    for _ in range(cycles):
        reloadpg.offload()
        times.append(timed(lambda: reloadpg.reload(connect="eager")))
    return statistics.median(times)


def torch_alone(rank: int, size: int, groups: int, creation: float) -> float:
    """Time to create the same number of groups without the library, one in place of WORLD."""
    simulated.register()
    dist.init_process_group(simulated.NAME)
    simulated.configure(bytes_per_communicator=1 << 20)
    faults.inject(slow(creation))
    return timed(lambda: groups_of(groups + 1))


def concurrent(
    rank: int, size: int, width: int, groups: int, creation: float, copy: float, cycles: int
) -> tuple[float, float]:
    """A reload and a copy, in sequence and at the same time; medians."""
    start(width)
    groups_of(groups)
    faults.inject(slow(creation))

    def after() -> None:
        reloadpg.reload(connect="eager")
        time.sleep(copy)  # as a copy to the device: it uses neither the processor nor the lock

    def along() -> None:
        pending = reloadpg.reload(connect="eager", wait=False)
        time.sleep(copy)
        pending.result()

    times: dict[Callable[[], None], list[float]] = {after: [], along: []}
    for _ in range(cycles):
        for way, seconds in times.items():
            reloadpg.offload()
            seconds.append(timed(way))
    return statistics.median(times[after]), statistics.median(times[along])


def start(width: int) -> None:
    simulated.register()
    simulated.configure(bytes_per_communicator=1 << 20)
    reloadpg.install(parallelism=width)
    dist.init_process_group(simulated.NAME)


def longest(function: Callable[..., Any], *args: Any) -> Any:
    """The result of the slowest rank."""
    return max(run_ranks(function, RANKS, args=args, timeout=500))


def main() -> int:
    """Run it and print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args()
    groups, creation, copy, cycles = GROUPS, CREATION_S, COPY_S, options.cycles
    if options.quick:
        groups, creation, copy, cycles = 4, 0.02, 0.1, 1
    alone = longest(torch_alone, groups, creation)
    rows = [("torch", alone, None)]
    seconds = {}
    for width in WIDTHS:
        seconds[width] = longest(reloads, width, groups, creation, cycles)
        rows.append((f"parallelism={width}", seconds[width], seconds[width] / seconds[1]))
    print(table((f"{groups} groups, {creation:g} s each", "s", "of parallelism=1"), rows))
    single = seconds[8]
    after, along = longest(concurrent, 8, groups, creation, copy, cycles)
    longer = max(single, copy)
    print()
    print(
        table(
            (f"reload and a copy of {copy:g} s", "s", "of the longer one"),
            [
                ("the reload alone", single, single / longer),
                ("one after the other", after, after / longer),
                ("reload(wait=False)", along, along / longer),
            ],
        )
    )
    ratio, overlap = seconds[8] / seconds[1], along / longer
    figures = {
        "groups": groups,
        "creation_s": creation,
        "copy_s": copy,
        "torch_s": alone,
        "reload_s": {str(width): value for width, value in seconds.items()},
        "after_s": after,
        "along_s": along,
        "ratio": ratio,
        "overlap": overlap,
    }
    write_json(options.json, {"machine": machine(), **figures})
    if options.check and (ratio > LIMIT or overlap > OVERLAP_LIMIT):
        print(f"above a limit: {ratio:.2f} ({LIMIT}), {overlap:.2f} ({OVERLAP_LIMIT})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
