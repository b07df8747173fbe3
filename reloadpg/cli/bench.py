"""``reloadpg bench``: measure offload and reload on this machine.

:func:`measure` runs in an existing job; ``benchmarks/reload.py`` also uses it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import counted
from .console import (
    CommandError,
    Line,
    Page,
    positive,
    progress,
    say,
    seconds,
    show,
    tabled,
)

if TYPE_CHECKING:
    from ..lifecycle.report import Report
    from ..testing import RanksFailedError

_RANKS = 2
_FIGURES = ("ms", "group_ms", "wait_ms", "own_ms", "bytes")


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "bench",
        help="measure offload and reload on this machine",
        description=(
            "Run real ranks on this machine, offload and reload their groups, and show the "
            "medians over the cycles. For each cycle, the slowest rank counts. Exit code 1 if a "
            "rank failed."
        ),
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
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="in seconds (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
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
    ranks = options.ranks or (devices if backend == "nccl" else _RANKS)
    if backend == "nccl" and ranks > devices:
        raise CommandError(
            f"--ranks {ranks}, but there are {devices} GPUs; nothing was started. NCCL needs one "
            "per rank."
        )
    cycles, groups = counted(options.cycles, "cycle"), counted(options.groups, f"{backend} group")
    what = f"{cycles} of {groups} on {counted(ranks, 'rank')}"
    try:
        with progress(what):
            given = (backend, options.groups, options.cycles)
            seen = run_ranks(_rank, ranks, args=given, timeout=options.timeout)
    except RanksFailedError as error:
        raise CommandError(_failure(error, options.timeout), 1) from None
    except KeyboardInterrupt:
        say("\nreloadpg bench: interrupted; all ranks have been ended", sys.stderr)
        return 130
    result = {
        "backend": backend,
        "ranks": ranks,
        "groups": options.groups,
        "cycles": options.cycles,
        "machine": _machine(),
        "memory_source": seen[0][0]["memory_source"],
        "medians": {op: medians_of(op, seen) for op in ("offload", "reload")},
        "by_rank": seen,
    }
    if options.json:
        say(json.dumps(result, indent=1))
    else:
        show(_page(result))
    return 0


def cuda_devices() -> int:
    """Number of GPUs that NCCL can use here. Creates no CUDA context."""
    import torch
    import torch.distributed as dist

    usable = torch.cuda.is_available() and dist.is_nccl_available()
    return torch.cuda.device_count() if usable else 0


def _failure(error: RanksFailedError, timeout: float) -> str:
    """The error without the advice for direct callers of ``run_ranks``."""
    head, _, details = str(error).partition("\n")
    advice = ""
    if any(outcome.timed_out for outcome in error.outcomes):
        advice = f" To wait longer than {timeout:g} s, use --timeout."
    return f"{head.partition('. ')[0]}.{advice}\n{details}"


# -- the ranks --------------------------------------------------------------------------------


def _rank(
    rank: int, world_size: int, backend: str, groups: int, cycles: int
) -> list[dict[str, Any]]:
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
    reloadpg.uninstall()  # RELOADPG_AUTOINSTALL=1 may have installed it with other options

    with reloadpg.install(backends={backend}, min_size=1):
        dist.init_process_group(backend)
        device = "cuda" if backend == "nccl" else "cpu"
        rows = measure(groups, cycles, device=device)
        dist.destroy_process_group()
    return rows


def measure(groups: int, cycles: int, *, device: str | None = None) -> list[dict[str, Any]]:
    """Offload and reload groups of all ranks, including WORLD. Collective, blocking.

    Requires a default group and an installation of reloadpg. The first cycle, which opens
    connections and fills caches, does not count. With a device, an all-reduce of a tensor there
    uses each group before each offload, so that its communicator exists; the sum is checked.

    Returns one dictionary per cycle: milliseconds and bytes from this rank's reports, and
    ``reload_cpu_ms``.
    """
    import torch.distributed as dist

    import reloadpg

    world = dist.group.WORLD
    held = [dist.new_group() for _ in range(groups - 1)]
    rows = []
    for _ in range(cycles + 1):
        _use([world, *held], device)
        offload, begun = reloadpg.offload(), time.process_time()
        reload, cpu_s = reloadpg.reload(), time.process_time() - begun
        for report in (offload, reload):
            if len(report.groups) != groups:
                raise RuntimeError(f"{report} is not about {groups} groups")
        rows.append({**_figures(offload), **_figures(reload), "reload_cpu_ms": cpu_s * 1e3})
    _use([world, *held], device)
    if world is not dist.group.WORLD:
        raise RuntimeError("the default group is another object after a reload")
    for group in held:
        dist.destroy_process_group(group)
    return rows[1:]


def _use(groups: Sequence[Any], device: str | None) -> None:
    import torch
    import torch.distributed as dist

    for group in groups if device is not None else ():
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group)
        if tensor.item() != group.size():
            raise RuntimeError(f"a sum over {group.size()} ranks was {tensor.item()}")


def _figures(report: Report) -> dict[str, Any]:
    return {
        f"{report.operation}_ms": report.total_ms,
        f"{report.operation}_group_ms": statistics.median([group.ms for group in report.groups]),
        f"{report.operation}_wait_ms": report.wait_ms,
        f"{report.operation}_own_ms": report.overhead_ms,
        f"{report.operation}_bytes": report.moved_bytes,
        "memory_source": report.memory_source,
    }


# -- the result -------------------------------------------------------------------------------


def medians_of(
    operation: str, seen: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, float | None]:
    """Medians over the cycles, of the slowest rank (for memory: of the smallest value)."""
    medians: dict[str, float | None] = {}
    for figure in _FIGURES:
        name = f"{operation}_{figure}"
        pick = min if figure == "bytes" else max
        known = [[rank[name] for rank in cycle] for cycle in zip(*seen, strict=True)]
        values = [pick(cycle) for cycle in known if None not in cycle]
        medians[figure] = statistics.median(values) if values else None
    return medians


def _machine() -> dict[str, Any]:
    import torch

    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def _page(result: Mapping[str, Any]) -> Page:
    machine = result["machine"]
    groups = counted(result["groups"], f"{result['backend']} group")
    head = (
        f"reloadpg bench: {groups} on {counted(result['ranks'], 'rank')}, "
        f"{counted(result['cycles'], 'cycle')}; torch {machine['torch']}, "
        f"{machine['cores']} cores, load {machine['load']}"
    )
    rows: list[list[object]] = []
    for operation, medians in result["medians"].items():
        size = medians["bytes"]
        row: list[object] = [operation, *(medians[figure] for figure in _FIGURES[:-1])]
        rows.append([*row, None if size is None else round(size / (1 << 20))])
    header = ["", "total ms", "group ms", "waiting ms", "own ms", "MiB a rank"]
    lines = [
        Line(head, "head"),
        Line(""),
        *tabled(header, rows),
        Line(""),
        Line("Medians over the cycles, for the slowest rank."),
        Line("group: its median group; waiting: for other ranks; own: the library's share."),
    ]
    if result["memory_source"]:
        source = f"MiB: released and restored by the call, measured by {result['memory_source']}"
        lines.append(Line(f"{source}; communicators that connect lazily allocate later."))
    return lines
