"""``reloadpg trace``: a job's last offloads and reloads, from its trace or status files.

A table for each operation, with a row for each rank. The files of
:mod:`reloadpg.observability.trace` also open in ui.perfetto.dev, on one axis of time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..reports import Report, Span
from ..settings import STATUS_DIR
from ..texts import counted
from .console import CommandError, Line, Page, positive, say, show, tabled
from .job import clock
from .records import UNREADABLE, RankRecord, decoded, read_directory, typed
from .status import job_directory

_OPERATION = "reloadpg,operation"
"""Category of the events that :mod:`reloadpg.observability.trace` writes for operations."""

_CLOSE_S = 0.005
"""Seconds between the calls of two ranks that count as one operation, since clocks differ."""

_RUNNING = "not ended"
"""The note of an operation in progress; its time is that of the last update."""


def read_operations(path: Path) -> tuple[list[list[Report]], set[int], list[str]]:
    """The operations in a trace file, or in the files of a directory; ranks; and failures to read.

    A status directory has a trace of each rank, and its status file has the running operation.
    """
    reports: list[Report] = []
    ranks: set[int] = set()
    failures: list[str] = []
    files = [path]
    if path.is_dir():
        reading = read_directory(path)
        failures += reading.failures
        ranks |= {record.rank for record in reading.ranks} | {*reading.missing}
        for record in reading.ranks:
            reports += _in_progress(record)
        files = sorted(file for file in path.glob("*.json") if not file.match("rank-*.json"))
    for file in files:
        try:
            reports += _reports(decoded(file.read_bytes()))
        except UNREADABLE as error:
            failures.append(f"{file.name}: {error}")
    return operations(reports), ranks | {_rank(report) for report in reports}, failures


def _reports(trace: Any) -> list[Report]:
    """The reports in a trace file."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError("not a trace file of reloadpg")
    calls = [event for event in events if isinstance(event, dict)]
    return [typed(Report, call.get("args")) for call in calls if call.get("cat") == _OPERATION]


def _in_progress(record: RankRecord) -> Iterator[Report]:
    """The running operation of a rank as a report. The others are in its trace."""
    running = record.running
    if running is None or record.time is None:
        return
    start = running.started_at
    end = max(start, running.since, record.time)
    wait = Span(f"wait.{running.phase}", (running.since - start) * 1e3, (end - running.since) * 1e3)
    yield Report(
        running.operation,
        changed=False,
        generation=0,
        spans=(wait,) if running.waiting else (),
        total_ms=(end - start) * 1e3,
        started_at=start,
        rank=record.rank,
        note=_RUNNING,
    )


def operations(reports: Sequence[Report]) -> list[list[Report]]:
    """Group reports of different ranks that overlap: one operation of the job each."""
    groups: list[list[Report]] = []
    end = 0.0
    for report in sorted(reports, key=lambda report: report.started_at):
        present = groups and _rank(report) in map(_rank, groups[-1])
        if not groups or present or report.started_at > end + _CLOSE_S:
            groups.append([])
            end = _end(report)
        groups[-1].append(report)
        end = max(end, _end(report))
    return groups


def _rank(report: Report) -> int:
    return report.rank or 0


def _end(report: Report) -> float:
    return report.started_at + report.total_ms / 1e3


# -- the command ------------------------------------------------------------------------------


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "trace",
        help="show a job's last offloads and reloads, rank by rank",
        description=(
            "Show the last offloads and reloads of a job: when each rank called, how long it "
            "waited for other ranks, its phases, memory in use, and errors. Exit code 1 if there "
            "is no operation to show. Trace files also open in ui.perfetto.dev."
        ),
        epilog="Example: reloadpg trace /tmp/job --last 2",
    )
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=(
            "the job's status directory, a directory with files of TraceWriter, or one such file "
            f"(default: ${STATUS_DIR})"
        ),
    )
    parser.add_argument(
        "--last",
        type=positive,
        default=4,
        metavar="N",
        help="the last N operations (default: 4)",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        default=32,
        metavar="N",
        help="maximum number of ranks, the lowest ones (default: 32)",
    )
    parser.set_defaults(run=_run, needs={"rich": "cli"})


def _run(options: argparse.Namespace) -> int:
    where = job_directory(options.path)
    if where is None:
        raise CommandError(f"no job to show. Name its directory, or set {STATUS_DIR} to it.")
    recorded, ranks, failures = read_operations(where)
    for failure in failures:
        say(f"reloadpg trace: unreadable: {failure}", sys.stderr)
    if not recorded:
        raise CommandError(
            f"no offload or reload was found in {where}. Run the job with {STATUS_DIR} set to it, "
            "or with reloadpg.observability.TraceWriter.",
            1,
        )
    last, shown = recorded[-options.last :], sorted(ranks)[: options.ranks]
    head = f"reloadpg trace: {where}: {counted(len(last), 'operation')} of {len(recorded)}"
    if len(shown) < len(ranks):
        head += f", the first {len(shown)} of {len(ranks)} ranks"
    show([Line(head, "head"), *page(last, shown)])
    return 0


def page(shown: Sequence[Sequence[Report]], ranks: Sequence[int]) -> Page:
    """Show operations, each as a table with a row for each of these ranks that called it.

    If an operation failed or has not ended, ranks that did not call it have a row, too.
    """
    lines: list[Line] = []
    for operation in shown:
        name = " and ".join(dict.fromkeys(report.operation for report in operation))
        start = min(report.started_at for report in operation)
        failed = any(report.error for report in operation)
        running = any(report.note == _RUNNING for report in operation)
        took = f"{(max(map(_end, operation)) - start) * 1e3:.1f} ms"
        state = "failed" if failed else f"runs for {took}" if running else f"took {took}"
        tone = "bad" if failed else "warning" if running else "head"
        source = next((report.memory_source for report in operation if report.memory), "")
        header = (
            "rank",
            "began ms",
            "ms",
            "waits ms",
            f"{source or 'memory'} MiB",
            "phases",
            "note",
        )
        rows: list[tuple[object, ...]] = []
        tones: list[str] = []
        calls = {_rank(report): report for report in operation}
        for rank in ranks:
            if report := calls.get(rank):
                rows.append(_row(rank, report, start))
                tones.append("bad" if report.error else "")
            elif failed or running:
                rows.append((rank, *[None] * 3, "", "", "did not call it"))
                tones.append("warning")
        lines += [Line(""), Line(f"{name} at {clock(start)} {state}", tone)]
        lines += tabled(header, rows, tones)
    return lines


def _row(rank: int, report: Report, start: float) -> tuple[object, ...]:
    phases = {name: ms for name, ms in report.phases_ms.items() if not name.startswith("wait.")}
    return (
        rank,
        (report.started_at - start) * 1e3,
        report.total_ms,
        float(report.wait_ms),
        _memory(report),
        ", ".join(f"{name} {ms:.1f}" for name, ms in phases.items()),
        next(iter(report.error.splitlines()), report.note),
    )


def _memory(report: Report) -> str:
    """Memory in use at the first and the last measurement of an operation."""
    measured = [
        report.memory.get(moment, {}).get(report.memory_source)
        for moment in sorted(report.moments_ms, key=lambda moment: report.moments_ms[moment])
    ]
    sizes = [f"{size / 2**20:.0f}" for size in measured if size is not None]
    return f"{sizes[0]} -> {sizes[-1]}" if len(sizes) > 1 else "".join(sizes)
