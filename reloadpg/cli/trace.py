"""``reloadpg trace``: draw a job's offloads and reloads from its trace or status files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..reports import Report, Span
from ..settings import STATUS_DIR
from ..texts import counted
from .console import CommandError, new_file, positive, say
from .records import UNREADABLE, RankRecord, decoded, read_directory, typed
from .status import job_directory
from .timeline import Run, clusters, draw

_OPERATION = "reloadpg,operation"
"""Category of the events that :mod:`reloadpg.observability.trace` writes for operations."""


def read_runs(path: Path) -> tuple[list[Run], set[int], list[str]]:
    """The operations in a trace file, or in the files of a directory; ranks; and failures to read.

    A status directory has a trace of each rank, and its status file has the running operation.
    """
    found: list[Run] = []
    ranks: set[int] = set()
    failures: list[str] = []
    files = [path]
    if path.is_dir():
        reading = read_directory(path)
        failures += reading.failures
        ranks |= {record.rank for record in reading.ranks} | {*reading.missing}
        for record in reading.ranks:
            found += _in_progress(record)
        files = sorted(one for one in path.glob("*.json") if not one.match("rank-*.json"))
    for file in files:
        try:
            found += map(_of_report, _reports(decoded(file.read_bytes())))
        except UNREADABLE as error:
            failures.append(f"{file.name}: {error}")
    return found, ranks | {run.rank for run in found}, failures


def _reports(trace: Any) -> list[Report]:
    """The reports in a trace file."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError("not a trace file of reloadpg")
    events = [one for one in events if isinstance(one, dict) and one.get("cat") == _OPERATION]
    return [typed(Report, one.get("args")) for one in events]


def _in_progress(record: RankRecord) -> Iterator[Run]:
    """The running operation of a rank. The others are in its trace."""
    running = record.running
    if running is None or record.time is None:
        return
    start = running.started_at
    end = max(start, running.since, record.time)
    wait = Span(f"wait.{running.phase}", (running.since - start) * 1e3, (end - running.since) * 1e3)
    spans = [wait] if running.waiting else []
    yield Run(record.rank, running.operation, start, end, spans, running=True)


def _of_report(report: Report) -> Run:
    source, memory = report.memory_source, report.memory
    moments = [(ms, memory.get(name, {}).get(source)) for name, ms in report.moments_ms.items()]
    return Run(
        report.rank or 0,
        report.operation,
        report.started_at,
        report.started_at + report.total_ms / 1e3,
        report.spans,
        [(report.started_at + ms / 1e3, size) for ms, size in moments if size is not None],
        source,
        report.error,
    )


# -- the command ------------------------------------------------------------------------------


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "trace",
        help="draw a job's offloads and reloads",
        description=(
            "Draw the offloads and reloads of a job: one lane a rank, phases in colours, waits "
            "for other ranks hatched, memory in use as a line. Exit code 1 if there is no "
            "operation to draw."
        ),
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
        "-o",
        "--output",
        type=_picture,
        default=Path("timeline.svg"),
        metavar="FILE",
        help="an .svg, .png or .pdf file to write (default: timeline.svg)",
    )
    parser.add_argument(
        "--last",
        type=positive,
        default=6,
        metavar="N",
        help="the last N operations (default: 6)",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        default=32,
        metavar="N",
        help="maximum number of ranks, the lowest ones (default: 32)",
    )
    parser.set_defaults(run=_run, needs={"matplotlib": "cli"})


def _picture(name: str) -> Path:
    path = new_file(name)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{name!r} does not end in .svg, .png or .pdf")
    return path


def _run(options: argparse.Namespace) -> int:
    where = job_directory(options.path)
    if where is None:
        raise CommandError(f"no job to draw. Name its directory, or set {STATUS_DIR} to it.")
    runs, ranks, failures = read_runs(where)
    for failure in failures:
        say(f"reloadpg trace: unreadable: {failure}", sys.stderr)
    if not runs:
        raise CommandError(
            f"no offload or reload was found in {where}; nothing was written. Run the job with "
            f"{STATUS_DIR} set to it, or with reloadpg.observability.TraceWriter.",
            1,
        )
    lanes = sorted(ranks)[: options.ranks]
    shown, note = _selected(runs, options.last, lanes)
    if len(lanes) < len(ranks):
        note = ". ".join(filter(None, (note, f"The first {len(lanes)} of {len(ranks)} ranks")))
    draw(shown, lanes, options.output, note=note)
    number = counted(len(clusters(shown)), "operation")
    say(f"{options.output}: {number}{f'. {note}' if note else ''}")
    return 0


def _selected(runs: Sequence[Run], last: int, ranks: Sequence[int]) -> tuple[list[Run], str]:
    """The runs of these ranks in the latest operations, and what is left out."""
    operations = clusters([run for run in runs if run.rank in ranks])
    note = f"The last {last} of {len(operations)} operations" if len(operations) > last else ""
    return [run for operation in operations[-last:] for run in operation], note
