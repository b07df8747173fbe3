"""The record of a rank, which it keeps in a file for ``reloadpg status``, and its reader.

Each rank of a job writes ``rank-<n>.json`` into the directory ``RELOADPG_STATUS_DIR``. The file is
one :class:`RankRecord`. A file that cannot be read is named with the reason. Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..processes import absence_of, process_table
from ..reports import OperationStatus

SILENT_S = 5.0
"""Seconds without an update after which a rank is called silent; it updates each second."""


@dataclass(frozen=True)
class RankRecord:
    """What a rank says about itself.

    Attributes:
        world_size: size of its job, None if it does not know yet.
        state: ``live``, ``offloaded``, ``failed``, ``no group yet``, ``not installed`` or ``off``.
            With several sets of groups the state of each.
        pid, started, process_table: its process, when that started, and where the id is known.
        time: Unix time of the update, in seconds.
        groups: number of its reloadable groups.
        memory_bytes: bytes that its communicators report; None if none reports.
        alone: number of its bypassed groups of one rank with a communicator.
        error: the last error, in one line; empty if there was none.
        timeout_s: the ``timeout`` of ``install``; None if not installed.
        last_ms: wall time of its last operation of each kind.
        running: the progress of a running operation.
        absent: why it no longer takes part. ``exited``, if it has written that itself; ``gone``,
            ``stopped`` or ``silent``, if its reader has found that; otherwise empty.
    """

    rank: int
    world_size: int | None
    state: str
    host: str
    pid: int
    started: str
    process_table: str
    time: float
    generation: int = 0
    groups: int = 0
    memory_bytes: int | None = None
    alone: int = 0
    error: str = ""
    timeout_s: float | None = None
    last_ms: Mapping[str, float] = field(default_factory=dict)
    running: OperationStatus | None = None
    absent: str = ""

    def to_json(self) -> str:
        """The record as text, for :func:`decoded`. Local."""
        return json.dumps(asdict(self))

    def looked_up(self, now: float) -> RankRecord:
        """Return a copy that says if the rank is gone, stopped or silent. Local.

        A process is looked up if the record is of this process table: a process id of another PID
        namespace, such as a container's, means nothing here.
        """
        absent = self.absent
        if not absent and self.started and self.process_table == process_table():
            absent = absence_of(self.pid, self.started)
        if not absent and now - self.time > SILENT_S:
            absent = "silent"
        return replace(self, absent=absent)


def decoded(text: str) -> RankRecord:
    """Return the record that was written as this text. Pure.

    Raises:
        ValueError, TypeError: it is not a record of a rank, or not one of this version.
    """
    record = RankRecord(**json.loads(text))
    running: Any = record.running
    return replace(record, running=OperationStatus(**running)) if running else record


# -- the files of a job -------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """All records that were found at one time.

    Attributes:
        ranks: the job's records, in the order of ranks; files of an earlier, larger job are
            omitted.
        failures: the failures to read, as text.
        absence: why no rank was found; empty if one was.
        time: Unix time of the reading, in seconds.
    """

    ranks: Sequence[RankRecord]
    failures: Sequence[str] = ()
    absence: str = ""
    time: float = field(default_factory=time.time)

    @property
    def world_size(self) -> int | None:
        """The latest world size that is above the rank of its record."""
        sizes = [
            (one.time, one.world_size)
            for one in self.ranks
            if one.world_size is not None and one.rank < one.world_size
        ]
        return max(sizes)[1] if sizes else None

    @property
    def missing(self) -> list[int]:
        """The ranks of the job without a record."""
        present = {record.rank for record in self.ranks}
        return [rank for rank in range(self.world_size or 0) if rank not in present]


def read_directory(directory: Path) -> Reading:
    """Read the files of a status directory. Local, non-blocking, read-only."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        return Reading((), absence=f"{directory} {what}")
    now, failures = time.time(), []
    latest: dict[int, RankRecord] = {}
    for file in sorted(directory.glob("rank-*.json")):
        try:
            record = decoded(file.read_text()).looked_up(now)
        except FileNotFoundError:
            continue  # the file was removed
        except (OSError, ValueError, TypeError) as error:
            failures.append(f"{file.name}: not a record of this version of reloadpg: {error}")
        else:
            latest[record.rank] = max(record, latest.get(record.rank, record), key=_time)
    if not latest:
        return Reading((), failures, f"no rank of a job was found in {directory}", now)
    found = Reading([latest[rank] for rank in sorted(latest)], failures, time=now)
    size = found.world_size
    return replace(found, ranks=[one for one in found.ranks if size is None or one.rank < size])


def _time(record: RankRecord) -> float:
    return record.time
