"""``reloadpg status``: the state of the ranks of a running job, from outside the job."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..settings import STATUS_DIR
from .console import CommandError, Line, Page, say, show, tabled
from .job import JobView, age, clock
from .records import RankRecord, read_directory

_WORST_FIRST = ("bad", "warning", "", "note")
"""Order of the tones of ranks."""


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "status",
        help="show the state of a running job's ranks",
        description=(
            "Show the state of each rank of a running job, and inconsistencies. The job runs with "
            f"{STATUS_DIR} set to a directory that this command can read. Exit code 1 if no rank "
            "runs or a rank has a problem: missing, gone, stopped, silent, failed, not installed, "
            "or stuck."
        ),
        epilog="Example: reloadpg status /tmp/job",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the job's status directory (default: ${STATUS_DIR})",
    )
    parser.add_argument("--json", action="store_true", help="all values as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = options.directory or os.environ.get(STATUS_DIR)
    if not directory:
        raise CommandError(
            f"no job was named. Pass its status directory, or set {STATUS_DIR} to it."
        )
    job = JobView(read_directory(Path(directory)))
    if options.json:
        say(json.dumps(job.to_dict()))
    else:
        show(page(job))
    return 0 if job.ok else 1


# -- the page ---------------------------------------------------------------------------------


def page(job: JobView) -> Page:
    """Show a job as a page.

    What matters most comes first, since a terminal cuts off what does not fit: the findings are
    above the table, ranks in trouble above the others, and the columns in order of importance.
    """
    findings = job.findings()
    indent = max(len(one.check) for one in findings)
    lines = [line for one in findings for line in one.lines(f"{one.check.ljust(indent)}  ")]
    return [_head(job), Line(""), *lines, Line(""), *_table(job)] if job.ranks else lines


def _head(job: JobView) -> Line:
    states = ", ".join(f"{len(ranks)} {state}" for state, ranks in job.states.items())
    size = job.reading.world_size
    known = "?" if size is None else size
    at = clock(job.reading.time)
    return Line(f"reloadpg {at}: {len(job.ranks)} of {known} ranks: {states}", "head")


def _table(job: JobView) -> list[Line]:
    columns: dict[str, Callable[[RankRecord], object]] = {
        "rank": lambda one: one.rank,
        "state": lambda one: one.state,
        "barrier": _barrier,
        "updated": lambda one: age(one.age_s),
        "host": lambda one: one.host,
        "gen": lambda one: one.status.generation,
        "offload ms": lambda one: _rounded(one.last_ms.get("offload")),
        "reload ms": lambda one: _rounded(one.last_ms.get("reload")),
        "held MiB": lambda one: _rounded(one.status.memory_bytes, 1 << 20),
        "groups": lambda one: len(one.status.groups),
        # A rank's first source is its best one.
        f"{_source(job)} MiB": lambda one: _rounded(
            next(iter(one.status.memory.values()), None), 1 << 20
        ),
    }
    if len({one.host for one in job.ranks}) < 2:
        del columns["host"]
    if not any(one.running and not one.absent for one in job.ranks):
        del columns["barrier"]
    if all(one.status.memory_bytes is None for one in job.ranks):
        del columns["held MiB"]
    shown = sorted(job.ranks, key=lambda one: _WORST_FIRST.index(_tone(one)))
    rows = [[column(one) for column in columns.values()] for one in shown]
    lines = tabled(list(columns), rows, [_tone(one) for one in shown])
    return [replace(line, indent=None) for line in lines]


def _source(job: JobView) -> str:
    """The source of the memory in use, if it is the same on all ranks."""
    sources = {next(iter(one.status.memory), "") for one in job.ranks}
    return (sources.pop() if len(sources) == 1 else "") or "in use"


def _tone(record: RankRecord) -> str:
    if record.absent == "exited":
        return "note"
    if record.absent or not record.installed or record.state == "failed":
        return "bad"
    return "warning" if record.error else ""


def _barrier(record: RankRecord) -> str | None:
    """The next barrier of a rank, and its progress."""
    running = record.running
    if running is None or record.absent:
        return None
    if running.waiting:
        return f"{running.phase}: waiting"
    done = f": {running.groups_done}/{running.groups}" if running.groups else ""
    return f"{running.phase}{done}"


def _rounded(value: float | None, unit: float = 1) -> int | None:
    return None if value is None else round(value / unit)
