"""``reloadpg bench``: how long an offload and a reload take on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Line, Page, Table, positive, progress, say, seconds, show

if TYPE_CHECKING:
    from ..testing import RanksFailedError

__all__ = ["add"]

_RANKS = 2
_FIGURES = ("ms", "group_ms", "wait_ms", "own_ms", "bytes")


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "bench",
        help="how long an offload and a reload take on this machine",
        description=(
            "Run real ranks on this machine, offload and reload their groups, and show the "
            "medians over the cycles; of each cycle the slowest rank counts. Exit code 1 if a "
            "rank failed."
        ),
    )
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="processes (default: 2; on GPUs one a GPU)"
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
        "--timeout", type=seconds, default=600.0, metavar="S", help="bound (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..testing import RanksFailedError, run_ranks
    from .bench_ranks import run

    devices = _devices() if options.backend in ("auto", "nccl") else 0
    if options.backend == "nccl" and not devices:
        say(
            "reloadpg bench: --backend nccl: torch finds no GPU that NCCL can use; nothing was "
            "started. Use --backend gloo or sim.",
            sys.stderr,
        )
        return 2
    backend = options.backend
    if backend == "auto":
        backend = "nccl" if devices else "gloo"
    ranks = options.ranks or (devices if backend == "nccl" else _RANKS)
    if backend == "nccl" and ranks > devices:
        say(
            f"reloadpg bench: --ranks {ranks}, but there are {devices} GPUs; nothing was started. "
            "NCCL needs one a rank.",
            sys.stderr,
        )
        return 2
    what = f"{options.cycles} cycles of {options.groups} {backend} groups on {ranks} ranks"
    try:
        with progress(what, options.cycles + 1) as update, _ticks(update) as ticks:
            seen = run_ranks(
                run,
                ranks,
                args=(backend, options.groups, options.cycles, str(ticks)),
                timeout=options.timeout,
            )
    except RanksFailedError as error:
        say(f"reloadpg bench: {_failure(error, options.timeout)}", sys.stderr)
        return 1
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
        "medians": {op: _medians(op, seen) for op in ("offload", "reload")},
        "by_rank": seen,
    }
    if options.json:
        say(json.dumps(result, indent=1))
    else:
        show(_page(result))
    return 0


def _failure(error: RanksFailedError, timeout: float) -> str:
    """The error without its advice for those who call ``run_ranks`` themselves."""
    head, _, details = str(error).partition("\n")
    advice = ""
    if any(outcome.timed_out for outcome in error.outcomes):
        advice = f" --timeout gives them longer than {timeout:g} s."
    return f"{head.partition('. ')[0]}.{advice}\n{details}"


def _devices() -> int:
    """Number of GPUs that NCCL can use here. Starts no CUDA context."""
    from ..demo.accelerator import cuda_devices

    return cuda_devices()


@contextmanager
def _ticks(update: Callable[[int], None]) -> Iterator[Path]:
    """A file whose length is how far the ranks are; told to ``update`` as it grows."""
    with tempfile.TemporaryDirectory(prefix="reloadpg-bench-") as directory:
        file = Path(directory, "ticks")
        file.touch()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                update(file.stat().st_size)

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield file
        finally:
            over.set()
            watcher.join()


def _medians(
    operation: str, seen: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, float | None]:
    """Over the cycles, of the slowest rank (for memory: of the rank that moved least)."""
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
    head = (
        f"reloadpg bench: {result['groups']} {result['backend']} groups on {result['ranks']} "
        f"ranks, {result['cycles']} cycles; torch {machine['torch']}, {machine['cores']} cores, "
        f"load {machine['load']}"
    )
    rows: list[list[object]] = []
    for operation, medians in result["medians"].items():
        size = medians["bytes"]
        row: list[object] = [operation, *(medians[figure] for figure in _FIGURES[:-1])]
        rows.append([*row, None if size is None else round(size / (1 << 20))])
    header = ["", "total ms", "a group ms", "waiting ms", "own ms", "MiB a rank"]
    lines: list[Line | Table] = [
        Line(head, "head"),
        Line(""),
        Table(header, rows),
        Line(""),
        Line("Medians over the cycles, each of the slowest rank. own: the library's share."),
    ]
    if result["memory_source"]:
        counted = f"MiB: released and restored by the call, as {result['memory_source']} counts it"
        lines.append(Line(f"{counted}; communicators that connect lazily take theirs later."))
    return Page(lines)
