"""``reloadpg status``: the state of the ranks of a running job, from outside the job."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import STATUS_DIR, named_ranks
from .console import (
    CommandError,
    Finding,
    Line,
    Page,
    follow,
    positive,
    say,
    seconds,
    show,
    tabled,
    terminal_size,
)
from .job import JobView, age, clock
from .records import RankRecord, Reading, read_directory

__all__ = ["add", "job_directory", "page"]

_SHOWN_FAILURES = 3
_ERROR_LINES = 3
"""Lines of a terminal for one error, which names the missing ranks at its beginning."""
_LEAST_FIRST = ("in use MiB", "groups", "held MiB", "reload ms", "offload ms", "gen", "host")
"""Columns of the table that a narrow terminal omits, in this order, until it fits."""
_REMEDIES_HEIGHT = 30
"""Lines of a terminal that also fits the remedies."""
_WORST_FIRST = ("bad", "warning", "", "note")


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
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the job's status directory (default: ${STATUS_DIR})",
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="of --watch (default: 1 s)"
    )
    parser.add_argument(
        "--frames", type=positive, metavar="N", help="with --watch: stop after N updates"
    )
    parser.add_argument(
        "--json", action="store_true", help="all values as JSON; one line per update"
    )
    parser.set_defaults(run=_run, needs={"rich": "cli"})


def job_directory(given: Path | None) -> Path | None:
    """The given status directory, or that of the environment; None without either."""
    return given or (Path(os.environ[STATUS_DIR]) if os.environ.get(STATUS_DIR) else None)


def _run(options: argparse.Namespace) -> int:
    directory = job_directory(options.directory)
    if directory is None:
        raise CommandError(
            f"no job was named. Pass its status directory, or set {STATUS_DIR} to it."
        )
    frames = options.frames if options.watch else 1
    job = JobView(Reading(""))

    def looks() -> Iterator[JobView]:
        nonlocal job
        for number in count(1):
            job = JobView(read_directory(directory))
            yield job
            if number == frames:
                return
            time.sleep(options.interval)

    try:
        if options.json:
            for look in looks():
                say(json.dumps(look.to_dict()))
        elif options.watch:
            follow(map(_fitting, looks()))
        else:
            show(page(next(looks())))
    except KeyboardInterrupt:
        say(stream=sys.stderr)  # the usual end of --watch, not an error
        return 0 if job.ranks else 1
    return 0 if job.ok else 1


def _fitting(job: JobView) -> Page:
    """A page for the terminal as large as it is now; else the whole page."""
    return page(job, *(terminal_size() or ()))


# -- the page ---------------------------------------------------------------------------------


def page(job: JobView, width: int | None = None, height: int | None = None) -> Page:
    """Show a job as a page. Pure.

    Columns of the table that do not fit the width are left out. Ranks that do not fit the height
    are counted only, and those in trouble are shown first. None shows all.
    """
    reading = job.reading
    failures = [Line(f"unreadable: {failure}", "warning") for failure in reading.failures]
    if not job.ranks:
        remedy = Line(_sentence(reading.remedy))
        return [Line(_sentence(reading.absence), "warning"), remedy, *failures]
    running, lasting = job.running_findings(), job.lasting_findings()
    indent = max(len(one.check) for one in (*running, *lasting))
    remedies = height is None or height >= _REMEDIES_HEIGHT

    def lines(findings: list[Finding]) -> list[Line]:
        return [
            line
            for one in findings
            for line in one.lines(f"{one.check.ljust(indent)}  ", remedies=remedies)
        ]

    if height is not None:  # what does not fit is cut off at the end
        lasting.sort(key=lambda one: one.level != "problem")
    above, below = lines(running), lines(lasting)
    if width is not None:
        errors: dict[str, list[int]] = {}
        for one in job.ranks:
            if one.error:
                errors.setdefault(one.error, []).append(one.rank)
        for error, ranks in list(errors.items())[:_SHOWN_FAILURES]:
            text = f"{'error'.ljust(indent)}  {named_ranks(ranks)}: {error}"
            below.append(Line(text[: width * _ERROR_LINES], "bad", indent + 2))
    below += failures[: height and _SHOWN_FAILURES]
    room = None
    if width is not None and height is not None:
        taken = sum(len(one.wrapped(width).splitlines()) for one in (*above, *below))
        # Heading, table header and rule, the line that counts the rest, three empty ones, and the
        # cursor's own line.
        room = max(1, height - taken - 9)
    if above:
        above.append(Line(""))
    table = _table(job, width, room)
    return [_head(job), Line(""), *above, *table, Line(""), *below]


def _head(job: JobView) -> Line:
    states = ", ".join(f"{len(ranks)} {state}" for state, ranks in job.states.items())
    size = job.reading.world_size
    known = "?" if size is None else size
    at = clock(job.reading.time)
    return Line(f"reloadpg {at}: {len(job.ranks)} of {known} ranks: {states}", "head")


def _table(job: JobView, width: int | None, room: int | None) -> Iterator[Line]:
    shown = list(job.ranks)
    if room is not None and len(shown) > room:
        shown.sort(key=lambda one: (_WORST_FIRST.index(_tone(one)), one.rank))
        del shown[room:]
        shown.sort(key=lambda one: one.rank)
    columns: dict[str, Callable[[RankRecord], object]] = {
        "rank": lambda one: one.rank,
        "host": lambda one: one.host,
        "state": lambda one: one.state,
        "barrier": _barrier,
        "gen": lambda one: one.status.generation,
        "groups": lambda one: len(one.status.groups),
        "held MiB": lambda one: _rounded(one.status.memory_bytes, 1 << 20),
        # A rank's first source is its best one.
        "in use MiB": lambda one: _rounded(next(iter(one.status.memory.values()), None), 1 << 20),
        "offload ms": lambda one: _rounded(one.last_ms.get("offload")),
        "reload ms": lambda one: _rounded(one.last_ms.get("reload")),
        "seen": lambda one: age(one.age_s),
        "last error": lambda one: one.error,
    }
    if len({one.host for one in job.ranks}) < 2:
        del columns["host"]
    if not any(one.running and not one.absent for one in job.ranks):
        del columns["barrier"]
    if width is not None or not any(one.error for one in shown):
        del columns["last error"]
    for omitted in ("", *_LEAST_FIRST):
        columns.pop(omitted, None)
        rows = [[column(one) for column in columns.values()] for one in shown]
        lines = tabled(list(columns), rows, [_tone(one) for one in shown])
        if width is None or max(len(one.text) for one in lines) <= width:
            break
    yield from lines
    if len(shown) < len(job.ranks):
        yield Line(f"and {len(job.ranks) - len(shown)} more ranks", "note")


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
        return f"{running.phase}: waits"
    done = f": {running.groups_done}/{running.groups}" if running.groups else ""
    return f"{running.phase}{done}"


def _rounded(value: float | None, unit: float = 1) -> int | None:
    return None if value is None else round(value / unit)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
