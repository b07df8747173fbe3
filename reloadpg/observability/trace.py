"""Chrome/Perfetto trace of offloads and reloads: JSON trace events, one process track per rank.

An operation is a complete event; its phases, its waits for other ranks and its groups lie within
it; memory in use is a counter. Times are Unix time in microseconds, so the files of several ranks
need no alignment but that of their hosts' clocks. Open a file in ui.perfetto.dev or
chrome://tracing; ``reloadpg trace`` shows a folder of them in a terminal.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reloadpg.reports import Report

from .exporters import subscribe

KEPT = 1000
"""Number of operations that a writer keeps; a new one replaces the oldest."""

_TRACK = 1
_TIMES = ("name", "ms", "start_ms")
"""What an event of a group has outside of its arguments."""


class TraceWriter:
    """Writes this rank's trace: rewrites the whole file atomically after each operation.

    Local. The file is always valid JSON, also if the job dies during a write. If it cannot be
    written, one warning is logged and the trace ends. A context manager.

    Args:
        path: the file. ``{rank}`` is replaced by the rank. Without it, a job of several ranks adds
            ``-rank<n>`` before the suffix, so that each rank has a separate file.
        kept: number of operations to keep, the latest ones.
    """

    def __init__(self, path: str | os.PathLike[str], *, kept: int = KEPT) -> None:
        self._path = os.fspath(path)
        self._chunks: deque[str] = deque(maxlen=kept)
        self._remove = subscribe(f"the trace {self._path}", self.add)

    def add(self, report: Report) -> None:
        """Write one more report; called by the subscription."""
        self._chunks.append(",\n".join(map(_encoded, _events(report))))
        events = ",\n".join([*map(_encoded, _track(report)), *self._chunks])
        replace_file(rank_path(self._path, report), _document(events))

    def close(self) -> None:
        """Stop writing; the file is kept. Idempotent."""
        self._remove()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_trace(reports: Iterable[Report], path: str | os.PathLike[str]) -> None:
    """Write a trace of reports, of one rank or of several. Local, atomic."""
    reports = list(reports)
    tracks = {report.rank: report for report in reports}
    events = [event for report in tracks.values() for event in _track(report)]
    events += [event for report in reports for event in _events(report)]
    replace_file(Path(path), _document(",\n".join(map(_encoded, events))))


def rank_path(path: str, report: Report) -> Path:
    rank = report.rank or 0
    if "{rank}" in path:
        return Path(path.replace("{rank}", str(rank)))
    if (report.world_size or 1) == 1:
        return Path(path)
    whole = Path(path)
    return whole.with_name(f"{whole.stem}-rank{rank}{whole.suffix}")


# ---------------------------------------------------------------------------------------------
# events


def _track(report: Report) -> Iterator[dict[str, Any]]:
    """The name and sort index of the rank's track."""
    rank = report.rank or 0
    names: dict[str, dict[str, Any]] = {
        "process_name": {"name": f"rank {rank}"},
        "process_labels": {"labels": f"{socket.gethostname()}, pid {os.getpid()}"},
        "process_sort_index": {"sort_index": rank},
        "thread_name": {"name": "offload and reload"},
    }
    for name, args in names.items():
        yield {"ph": "M", "name": name, "pid": rank, "tid": _TRACK, "args": args}


def _events(report: Report) -> Iterator[dict[str, Any]]:
    """The operation with its phases and groups, nested as trace viewers require."""
    rank = report.rank or 0
    origin = report.started_at * 1e6
    details = {name: value for name, value in report.details().items() if name != "groups"}
    inner: list[tuple[float, float, str, str, dict[str, Any]]] = []
    for span in report.spans:
        kind = "wait" if span.is_wait else "phase"
        inner.append((span.start_ms, span.ms, span.name, kind, {}))
    for group in report.groups:
        args = {k: v for k, v in asdict(group).items() if k not in _TIMES and v not in (None, "")}
        inner.append((group.start_ms, group.ms, f"group {group.name}", "group", args))
    inner.sort(key=lambda one: (one[0], -one[1]))
    outer = (0.0, report.total_ms, report.operation, "operation", details)
    ends: list[float] = []  # of the open events, outermost first
    for start, length, name, category, args in (outer, *inner):
        begin, end = start, start + max(length, 0.0)
        # Clocks are read one after the other; remove the overlaps that result from this.
        while len(ends) > 1 and end > ends[-1]:
            begin = max(begin, ends.pop())
        while len(ends) > 1 and begin >= ends[-1]:
            ends.pop()
        if ends:
            begin, end = min(begin, ends[-1]), min(end, ends[-1])
        end = max(begin, end)
        ends.append(end)
        yield {
            "ph": "X",
            "name": name,
            "cat": f"reloadpg,{category}",
            "pid": rank,
            "tid": _TRACK,
            "ts": origin + begin * 1e3,
            "dur": (end - begin) * 1e3,
            "args": args,
        }
    yield from _memory_events(report, rank)


def _memory_events(report: Report, rank: int) -> Iterator[dict[str, Any]]:
    """Memory in use when it was measured, as a counter."""
    source = report.memory_source
    for moment, ms in sorted(report.moments_ms.items(), key=lambda one: one[1]):
        used = report.memory.get(moment, {}).get(source)
        if used is not None:
            yield {
                "ph": "C",
                "name": f"memory ({source})",
                "cat": "reloadpg,memory",
                "pid": rank,
                "ts": report.started_at * 1e6 + ms * 1e3,
                "args": {"bytes": used},
            }


# ---------------------------------------------------------------------------------------------
# files


def _encoded(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _document(events: str) -> str:
    head = '{"displayTimeUnit":"ms","otherData":{"clock":"unix, us"},"traceEvents":['
    return f"{head}\n{events}\n]}}\n"


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically, even if this process is killed. Local.

    The file, and its directory if that is created, are readable by this user only. A link at that
    name is replaced, never followed.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    # In a directory that other users can write to, this name may be their link or file.
    if os.path.lexists(part) and (part.is_symlink() or part.lstat().st_uid != os.geteuid()):
        part.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with open(os.open(part, flags, 0o600), "w") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError(f"{part} belongs to another user; it was not written to")
            file.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
