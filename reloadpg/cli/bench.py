"""``reloadpg bench``: measure offload and reload on this machine.

:func:`measure` runs in an existing job; ``benchmarks/reload.py`` also uses it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..texts import counted
from .console import CommandError, Line, Page, positive, progress, say, show, tabled

if TYPE_CHECKING:
    from ..reports import Report

_TIMEOUT_S = 600.0
_COLUMNS = {
    "ms": "total ms",
    "group_ms": "group ms",
    "wait_ms": "waiting ms",
    "own_ms": "own ms",
    "mib": "MiB a rank",
}
"""The figures of an operation, and their names on the page."""


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "bench",
        help="measure offload and reload on this machine",
        description=(
            "Run real ranks on this machine, offload and reload their groups, and show the "
            "medians over the cycles. For each cycle, the slowest rank counts. Exit code 1 if a "
            "rank failed."
        ),
        epilog="Example: reloadpg bench --ranks 2 --groups 4 --backend gloo",
    )
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="processes (default: 2; on GPUs one per GPU)"
    )
    parser.add_argument(
        "--groups", type=positive, default=10, metavar="N", help="groups of all ranks (default: 10)"
    )
    parser.add_argument(
        "--cycles", type=positive, default=5, metavar="N", help="offloads and reloads (default: 5)"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "nccl", "gloo", "sim"),
        default="auto",
        help="auto: nccl if there is a GPU, otherwise gloo; sim: the simulated accelerator",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(run=_run, needs={"torch": "cli", "rich": "cli"})


def _run(options: argparse.Namespace) -> int:
    from ..testing import RanksFailedError, run_ranks

    devices = cuda_devices() if options.backend in ("auto", "nccl") else 0
    if options.backend == "nccl" and not devices:
        raise CommandError(
            "--backend nccl: torch finds no GPU that NCCL can use; nothing was started. Use "
            "--backend gloo or sim."
        )
    backend = options.backend
    if backend == "auto":
        backend = "nccl" if devices else "gloo"
    ranks = options.ranks or (devices if backend == "nccl" else 2)
    if backend == "nccl" and ranks > devices:
        raise CommandError(
            f"--ranks {ranks}, but there are {devices} GPUs; nothing was started. NCCL needs one "
            "per rank."
        )
    cycles, groups = counted(options.cycles, "cycle"), counted(options.groups, f"{backend} group")
    what = f"{groups} on {counted(ranks, 'rank')}, {cycles}"
    given = (backend, options.groups, options.cycles)
    env = {"RELOADPG_AUTOINSTALL": None}  # the ranks install with other options
    try:
        with progress(what):
            seen = run_ranks(_rank, ranks, args=given, timeout=_TIMEOUT_S, env=env)
    except RanksFailedError as error:
        head, _, details = str(error).partition("\n")
        # Without the advice for callers of run_ranks.
        raise CommandError(f"{head.partition('. ')[0]}.\n{details}", 1) from None
    result = {
        "backend": backend,
        "ranks": ranks,
        "groups": options.groups,
        "cycles": options.cycles,
        "machine": machine(),
        "memory_source": seen[0][0][0].memory_source,
        "medians": medians_of(seen),
    }
    if options.json:
        say(json.dumps(result, indent=1))
    else:
        show(_page(what, result))
    return 0


def cuda_devices() -> int:
    """Number of GPUs that NCCL can use here. Creates no CUDA context."""
    import torch
    import torch.distributed as dist

    usable = torch.cuda.is_available() and dist.is_nccl_available()
    return torch.cuda.device_count() if usable else 0


# -- the ranks --------------------------------------------------------------------------------


def _rank(
    rank: int, world_size: int, backend: str, groups: int, cycles: int
) -> list[tuple[Report, Report]]:
    import torch
    import torch.distributed as dist

    import reloadpg

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if backend == "sim":
        from ..testing import simulated

        simulated.register()
    with reloadpg.install(backends={backend}, min_size=1):
        dist.init_process_group(backend)
        reports = measure(groups, cycles, device="cuda" if backend == "nccl" else "cpu")
        dist.destroy_process_group()
    return reports


def measure(groups: int, cycles: int, *, device: str | None = None) -> list[tuple[Report, Report]]:
    """Offload and reload groups of all ranks, including WORLD. Collective, blocking.

    Requires a default group and an installation of reloadpg. The first cycle, which opens
    connections and fills caches, does not count. With a device, an all-reduce of a tensor there
    uses each group before each offload, so that its communicator exists; the sum is checked.

    Returns the reports of the offload and of the reload of each cycle.
    """
    import torch.distributed as dist

    import reloadpg

    world = dist.group.WORLD
    held = [dist.new_group() for _ in range(groups - 1)]
    cycle_reports = []
    for _ in range(cycles + 1):
        _use([world, *held], device)
        reports = reloadpg.offload(), reloadpg.reload()
        for report in reports:
            if len(report.groups) != groups:
                raise RuntimeError(f"{report} is not about {groups} groups")
        cycle_reports.append(reports)
    _use([world, *held], device)
    if world is not dist.group.WORLD:
        raise RuntimeError("the default group is another object after a reload")
    for group in held:
        dist.destroy_process_group(group)
    return cycle_reports[1:]


def _use(groups: Sequence[Any], device: str | None) -> None:
    import torch
    import torch.distributed as dist

    for group in groups if device is not None else ():
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group)
        if tensor.item() != group.size():
            raise RuntimeError(f"a sum over {group.size()} ranks was {tensor.item()}")


# -- the result -------------------------------------------------------------------------------


def medians_of(
    seen: Sequence[Sequence[tuple[Report, Report]]],
) -> dict[str, dict[str, float | None]]:
    """Medians over the cycles, of the slowest rank (for memory: of the smallest value).

    The reports are by rank and cycle; the medians are by operation and figure.
    """
    found: dict[str, dict[str, float | None]] = {}
    for index, operation in enumerate(("offload", "reload")):
        found[operation] = {}
        for name in _COLUMNS:
            slowest = min if name == "mib" else max
            cycles = [
                [figures(both[index])[name] for both in ranks] for ranks in zip(*seen, strict=True)
            ]
            known = [slowest(values) for values in cycles if None not in values]
            found[operation][name] = statistics.median(known) if known else None
    return found


def figures(report: Report) -> dict[str, Any]:
    """The figures of one report, by the names of the columns."""
    moved = report.moved_bytes
    return {
        "ms": report.total_ms,
        "group_ms": statistics.median([group.ms for group in report.groups]),
        "wait_ms": report.wait_ms,
        "own_ms": report.overhead_ms,
        "mib": None if moved is None else round(moved / (1 << 20)),
    }


def machine() -> dict[str, Any]:
    """Versions, cores, and the load average of the last minute: others' work shows in figures."""
    import torch

    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def _page(what: str, result: Mapping[str, Any]) -> Page:
    here = "torch {torch}, {cores} cores, load {load}".format(**result["machine"])
    rows = [[name, *figures.values()] for name, figures in result["medians"].items()]
    lines = [
        Line(f"reloadpg bench: {what}; {here}", "head"),
        Line(""),
        *tabled(["", *_COLUMNS.values()], rows),
        Line(""),
        Line("Medians over the cycles, for the slowest rank."),
        Line("group: its median group; waiting: for other ranks; own: the library's share."),
    ]
    if result["memory_source"]:
        source = f"MiB: released and restored by the call, measured by {result['memory_source']}"
        lines.append(Line(f"{source}; communicators that connect lazily allocate later."))
    return lines
