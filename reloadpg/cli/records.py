"""Read the records of the ranks of a running job, from outside the job.

Each rank keeps one file in the status directory (``RELOADPG_STATUS_DIR`` in the job). A record is
decoded into the dataclasses that it was written from. A file that does not fit them is unreadable:
it is named with the reason, and the other ranks are shown.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ..processes import process_table, start_of
from ..reports import OperationStatus, Report, Status
from ..settings import STATUS_DIR

VERSION = 1
"""Version of the record's format."""

SILENT_S = 5.0
"""Seconds without an update after which a rank is called silent; it updates each second."""

UNREADABLE = (OSError, ValueError, TypeError, OverflowError, RecursionError)
"""The exceptions of reading and decoding a file."""

_LARGEST = 64 << 20
_LARGEST_JOB = 1 << 20


def typed(kind: Any, value: Any) -> Any:
    """Convert a decoded value to this type.

    The type is a scalar, ``Any``, a dataclass, ``Mapping[str, kind]``, ``tuple[kind, ...]`` or
    ``kind | None``. Missing fields of a dataclass have their default; unknown ones are omitted.

    Raises:
        ValueError, TypeError, OverflowError: a value is missing or does not fit.
    """
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _typed_fields(kind, _of_type(dict, value))
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(typed(inner[0], one) for one in _of_type(list, value))
    if get_origin(kind) is Mapping:
        return {key: typed(inner[1], one) for key, one in _of_type(dict, value).items()}
    if inner:
        return None if value is None else typed(inner[0], value)
    return float(value) if kind is float and type(value) is int else _of_type(kind, value)


def _typed_fields(kind: Any, given: dict[str, Any]) -> Any:
    fields = [(name, part) for name, part in _types(kind).items() if name in given]
    return kind(**{name: typed(part, given[name]) for name, part in fields})


@cache
def _types(of: Any) -> dict[str, Any]:
    return get_type_hints(of)


def _of_type(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{json.dumps(value)[:50]} is not of type {kind.__name__}")
    return value


@dataclass(frozen=True)
class Collectives:
    """The collectives that a rank has started; see ``StatusRecord`` of the publisher."""

    begun: Mapping[str, int] = field(default_factory=dict)
    since: float = 0.0
    stack: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()


_NO_STATUS = json.loads(Status(False, False, None, None, "", 0, 0, {}, (), 0).to_json())
"""In place of the status that a process has not read yet."""


@dataclass(frozen=True)
class RankRecord:
    """The last record of one rank; the fields up to ``last_ms`` are those that it wrote.

    Attributes:
        world_size: size of its job, None if it does not know yet.
        time: Unix time of its last update, in seconds.
        started: the start time of its process; empty if unknown.
        process_table: the identifier of the host and namespace of ``pid``; empty if unknown.
        report: the report of its last operation; None before the first.
        last_ms: wall time of its last operation of each kind.
        exited: whether this is the last record of a process that has exited.
        age_s: age of the last update when it was read, in seconds.
        raw: the record as it was written.
        process: ``gone`` or ``stopped``, from this host's process table; empty if it runs, or
            is on another host.
    """

    rank: int
    world_size: int | None
    installed: bool
    host: str
    pid: int | None
    time: float | None
    status: Status
    report: Report | None
    running: OperationStatus | None
    exited: bool
    collectives: Collectives
    last_ms: Mapping[str, float]
    started: str = ""
    process_table: str = ""
    age_s: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    process: str = ""

    @classmethod
    def of(cls, data: Any, now: float) -> RankRecord:
        """Build it from a decoded record.

        Raises:
            ValueError, TypeError, OverflowError: it is not a record of a rank.
        """
        given = _of_type(dict, data)
        status, report = given.get("status") or _NO_STATUS, given.get("last_report")
        record: RankRecord = typed(cls, {**given, "status": status, "report": report})
        # The clock of another host may be ahead of this one.
        age_s = None if record.time is None else max(0.0, now - record.time)
        return replace(record, raw=data, age_s=age_s)

    def looked_up(self) -> RankRecord:
        """Return a copy with the state of the rank's process, from this host's process table.

        The process is found if the record is of the same table: a process id of another PID
        namespace, such as a container's, means nothing here. It has ended if the id is not in use,
        or by a process that began at another time.
        """
        known = self.pid is not None and self.started and self.process_table == process_table()
        if self.exited or not known:
            return self
        gone = start_of(self.pid or 0) != self.started
        return replace(self, process="gone" if gone else _process_state(self.pid or 0))

    @property
    def absent(self) -> str:
        """``exited``, ``gone``, ``stopped`` or ``silent``; empty for a running rank."""
        if self.exited or self.process:
            return "exited" if self.exited else self.process
        return "silent" if self.age_s is not None and self.age_s > SILENT_S else ""

    @property
    def state(self) -> str:
        """``live``, ``offloaded``, ``failed``, or why it is unknown."""
        if self.absent:
            return self.absent
        if not self.installed:
            return "off" if self.status.off else "not installed"
        if self.running:
            return f"in {self.running.operation}"
        if not self.status.state:
            return "unknown"
        return self.status.state if self.status.initialized else "no group yet"

    @property
    def error(self) -> str:
        found = [self.status.last_error, self.report.error if self.report else ""]
        found += [group.last_error for group in self.status.groups]
        return next((error.strip().splitlines()[0] for error in found if error.strip()), "")


@dataclass(frozen=True)
class Reading:
    """All records that were found at one time.

    Attributes:
        failures: the failures to read, as text.
        left_over: ranks of an earlier, larger job, whose files still exist.
        absence, remedy: if no rank was found, the reason and the action to take.
        time: Unix time of the reading, in seconds.
    """

    source: str
    ranks: Sequence[RankRecord] = ()
    failures: Sequence[str] = ()
    left_over: Sequence[int] = ()
    absence: str = ""
    remedy: str = ""
    time: float = field(default_factory=time.time)

    @property
    def world_size(self) -> int | None:
        return _world_size(self.ranks)

    @property
    def missing(self) -> list[int]:
        """The ranks of the job without a record."""
        present = {record.rank for record in self.ranks}
        size = min(self.world_size or 0, _LARGEST_JOB)
        return [rank for rank in range(size) if rank not in present]


def read_directory(directory: Path) -> Reading:
    """Read the files of a status directory. Local, non-blocking, read-only."""
    files: list[Path] = []
    failures: list[str] = []
    absence = f"no rank of a job was found in {directory}"
    remedy = f"set {STATUS_DIR} to this directory on every rank; reloadpg.install() then writes it"
    try:
        if directory.is_dir():
            files = sorted(directory.glob("rank-*.json"))
        else:
            absence += f", which {'is not a directory' if directory.exists() else 'does not exist'}"
            remedy = f"pass the directory that the ranks have in {STATUS_DIR}; they create it"
    except OSError as error:
        failures.append(f"{directory}: {error.strerror}")
    records: list[RankRecord] = []
    for file in files:
        try:
            records.append(_read(file))
        except FileNotFoundError:
            continue  # the file was removed
        except UNREADABLE as error:
            failures.append(f"{file.name}: {error}")
    # There may be files of an earlier job.
    latest = {one.rank: one for one in sorted(records, key=lambda one: one.time or 0.0)}
    size = _world_size(latest.values())
    left_over = [rank for rank in sorted(latest) if size is not None and rank >= size]
    ranks = [latest[rank] for rank in sorted(latest) if rank not in left_over]
    return Reading(str(directory), ranks, failures, left_over, absence, remedy)


def _read(file: Path) -> RankRecord:
    data = json.loads(_own_file(file).decode("utf-8", errors="replace"))
    version = data.get("version", VERSION) if isinstance(data, dict) else VERSION
    if version != VERSION:
        raise ValueError(
            f"written by another version of reloadpg (format {version!r}, not {VERSION}); use the "
            "version of the job"
        )
    return RankRecord.of(data, time.time()).looked_up()


def _own_file(path: Path) -> bytes:
    """Read a file of this user that is not a link, since others may write to the directory."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("a link, which is not followed") from None
        raise
    with open(number, "rb") as file:
        owner = os.fstat(number).st_uid
        if owner not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise ValueError(f"belongs to another user (uid {owner}); it was not read")
        return file.read(_LARGEST)


def _process_state(pid: int) -> str:
    """``gone``, ``stopped``, or empty for a running process of this host. Local."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "gone"
    letter = stat.rpartition(")")[2].split()[0]
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "")


def _world_size(records: Iterable[RankRecord]) -> int | None:
    """World size from the latest record that has one; it must be above the record's rank."""
    sizes = [
        (one.time or 0.0, one.world_size)
        for one in records
        if one.world_size is not None and one.rank < one.world_size
    ]
    return max(sizes)[1] if sizes else None
