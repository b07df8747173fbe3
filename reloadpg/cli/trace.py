"""``reloadpg trace``: a picture of a job's offloads and reloads, from the files that it leaves."""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .console import counted, new_file, positive, say
from .records import STATUS_DIR, RankRecord, items, mapping, number, read_directory, text, whole
from .timeline import Part, Run, drawn

__all__ = ["add", "read_runs"]

_SLACK_S = 1e-6
"""Times are Unix times in microseconds, as floats."""


def read_runs(path: Path) -> tuple[list[Run], list[str]]:
    """The operations that the files of a job say something about. Local, reads only.

    Args:
        path: a trace file, or a directory with the trace files or the status files of ranks. A
            status file has the last operation of its rank, and the one that is in progress.

    Returns:
        The operations; and what could not be read, in words.
    """
    found: dict[tuple[int, str, int], Run] = {}
    failures: list[str] = []
    files = [path]
    if path.is_dir():
        reading = read_directory(path)
        failures += reading.failures
        for record in reading.ranks:
            for run in _of_record(record):
                found[_key(run)] = run
        files = sorted(one for one in path.glob("*.json") if not one.match("rank-*.json"))
    for file in files:
        try:
            data = json.loads(file.read_bytes().decode("utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError) as error:
            failures.append(f"{file.name}: {error}")
            continue
        events = mapping(data).get("traceEvents")
        if isinstance(events, list):
            found.update((_key(run), run) for run in _of_events(items(events)))
        elif not path.is_dir():
            failures.append(f"{file.name}: not a trace file of reloadpg")
    return list(found.values()), failures


def _key(run: Run) -> tuple[int, str, int]:
    """Equal for one operation of a rank in all files that have it."""
    return run.rank, run.operation, round(run.start * 1e3)


def _of_record(record: RankRecord) -> Iterator[Run]:
    """The last operation of a rank, and the one that it is in."""
    report, running = record.report, record.running
    start, total = number(report.get("started_at")), number(report.get("total_ms"))
    if start is not None and total is not None:
        source = text(report.get("memory_source"))
        moments = mapping(report.get("moments_ms"))
        levels = {
            moment: whole(mapping(by_source).get(source))
            for moment, by_source in mapping(report.get("memory")).items()
        }
        at = {moment: number(moments.get(moment)) for moment in levels}
        yield Run(
            record.rank,
            text(report.get("operation")),
            start,
            start + max(total, 0.0) / 1e3,
            [
                Part(text(span.get("name")), start + begun / 1e3, start + (begun + length) / 1e3)
                for span in items(report.get("spans"))
                if (begun := number(span.get("start_ms"))) is not None
                and (length := number(span.get("ms"))) is not None
            ],
            [
                (start + ms / 1e3, size)
                for moment, size in levels.items()
                if size is not None and (ms := at[moment]) is not None
            ],
            source,
            text(report.get("error")),
        )
    start, since = number(running.get("started_at")), number(running.get("since"))
    if start is None or since is None or record.time is None:
        return
    end = max(start, since, record.time)
    phase = text(running.get("phase"))
    waits = running.get("waiting") is True
    parts = [Part(f"wait.{phase}", since, end)] if waits else []
    yield Run(record.rank, text(running.get("operation")), start, end, parts, running=True)


def _of_events(events: Iterable[Mapping[str, Any]]) -> Iterator[Run]:
    """The operations in trace events, each with what lies within it."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        rank = whole(event.get("pid"))
        if rank is not None and number(event.get("ts")) is not None:
            by_rank.setdefault(rank, []).append(event)
    for rank, mine in by_rank.items():
        outer = sorted(filter(_is_operation, mine), key=_start)
        starts = [_start(one) for one in outer]
        parts: list[list[Part]] = [[] for _ in outer]
        memory: list[list[tuple[float, int]]] = [[] for _ in outer]
        source = ""
        for event in mine:
            begun, end = _start(event), _end(event)
            index = bisect_right(starts, begun + _SLACK_S) - 1
            if index < 0:
                continue
            kind = text(event.get("cat")).rpartition(",")[2]
            if kind in ("phase", "wait"):
                parts[index].append(Part(text(event.get("name")), begun, end))
            size = whole(mapping(event.get("args")).get("bytes"))
            if kind == "memory" and size is not None:
                memory[index].append((begun, size))
                source = text(event.get("name")).removeprefix("memory ").strip("()")
        for event, inside, levels in zip(outer, parts, memory, strict=True):
            error = text(mapping(event.get("args")).get("error"))
            name = text(event.get("name"))
            yield Run(rank, name, _start(event), _end(event), inside, levels, source, error)


def _is_operation(event: Mapping[str, Any]) -> bool:
    return text(event.get("cat")) == "reloadpg,operation"


def _start(event: Mapping[str, Any]) -> float:
    return (number(event.get("ts")) or 0.0) / 1e6


def _end(event: Mapping[str, Any]) -> float:
    return _start(event) + max(number(event.get("dur")) or 0.0, 0.0) / 1e6


# -- the command ------------------------------------------------------------------------------


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "trace",
        help="draw a job's offloads and reloads",
        description=(
            "Draw the offloads and reloads of a job as an SVG or HTML picture: one lane a rank, "
            "phases in colours, waits for other ranks hatched, memory in use as a line. Exit code "
            "1 if there is no operation to draw."
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
        *("-o", "--output"),
        type=_picture,
        default=Path("timeline.svg"),
        metavar="FILE",
        help="an .svg or .html file to write (default: timeline.svg)",
    )
    parser.add_argument(
        *("--last",),
        type=positive,
        default=6,
        metavar="N",
        help="the last N operations of each rank (default: 6)",
    )
    parser.add_argument(
        *("--ranks",),
        type=positive,
        default=32,
        metavar="N",
        help="at most so many ranks, the lowest ones (default: 32)",
    )
    parser.set_defaults(run=_run)


def _picture(name: str) -> Path:
    path = new_file(name)
    if path.suffix not in (".svg", ".html"):
        raise argparse.ArgumentTypeError(f"{name!r} ends in neither .svg nor .html")
    return path


def _run(options: argparse.Namespace) -> int:
    where = options.path or (Path(os.environ[STATUS_DIR]) if os.environ.get(STATUS_DIR) else None)
    if where is None:
        say(
            f"reloadpg trace: no job to draw. Name its directory, or set {STATUS_DIR} to it.",
            sys.stderr,
        )
        return 2
    runs, failures = read_runs(where)
    for failure in failures:
        say(f"reloadpg trace: unreadable: {failure}", sys.stderr)
    if not runs:
        say(
            f"reloadpg trace: no offload or reload was found in {where}; nothing was written. Run "
            f"the job with {STATUS_DIR} set to it, or with reloadpg.observability.TraceWriter.",
            sys.stderr,
        )
        return 1
    shown, note = _selected(runs, options.last, options.ranks)
    picture = drawn(shown, note=note)
    if options.output.suffix == ".html":
        picture = _page(picture)
    options.output.write_text(picture, encoding="utf-8")
    say(f"{options.output}: {counted(len(shown), 'operation')}{f'. {note}' if note else ''}")
    return 0


def _selected(runs: Sequence[Run], last: int, ranks: int) -> tuple[list[Run], str]:
    """The latest operations of the lowest ranks, and what is left out, in words."""
    by_rank: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda one: one.start):
        by_rank.setdefault(run.rank, []).append(run)
    shown = sorted(by_rank)[:ranks]
    longest = max(len(by_rank[rank]) for rank in shown)
    notes = []
    if longest > last:
        notes.append(f"The last {last} of {longest} operations")
    if len(shown) < len(by_rank):
        notes.append(f"The first {len(shown)} of {len(by_rank)} ranks")
    return [run for rank in shown for run in by_rank[rank][-last:]], ". ".join(notes)


def _page(picture: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>reloadpg</title>\n'
        f"<style>body {{ margin: 0; overflow-x: auto }}</style></head><body>\n{picture}"
        "</body></html>\n"
    )
