"""Publication of this process's status: a record in a file.

If ``RELOADPG_STATUS_DIR`` is set, a process that installs reloadpg keeps ``rank-<n>.json`` there,
for ``reloadpg status``. The file is rewritten atomically at the start and end of each operation and
each second, so a reader finds a complete record, and an old one if the process has ended or is
stopped. While an operation runs, the record has its progress. A daemon thread of this module writes
the file, so a slow or full disk delays no other thread.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reloadpg
from reloadpg import on_report
from reloadpg.c10d import inspection, tables
from reloadpg.extend import (
    LibraryThread,
    between_operations,
    callbacks,
    collectives_begun,
    is_inherited,
    managed_groups,
    running,
)
from reloadpg.processes import process_table, start_of
from reloadpg.reports import Report
from reloadpg.settings import STATUS_DIR

from .logs import current_rank, name_rank_in_records

VERSION = 1
"""Version of the record's format."""

HEARTBEAT_S = 1.0
_LASTING = ("rank", "world_size", "generation", "cycles", "groups", "memory_bytes", "last_error")
"""Values of a status that are kept after the job's groups were destroyed."""
_LAST_WRITE_S = 0.5
"""Maximum number of seconds that the exit of the process waits for the last record."""

_STILL_S = 2.0
"""Seconds without a new collective after which the record contains the main thread's stack."""

logger = logging.getLogger("reloadpg")


def start() -> None:
    """Set the rank in log records, and publish the status if it is requested.

    Local; idempotent. Each ``install`` calls it, also if the library is already installed, so that
    a forked child gets the same.
    """
    name_rank_in_records()
    try:
        publish_status()
    except Exception as error:  # monitoring must not stop the job
        logger.warning("the status of this process will not be published: %s", error)


def publish_status(directory: str | os.PathLike[str] | None = None) -> Callable[[], None]:
    """Keep this process's status file up to date.

    Local; non-blocking; idempotent for the same directory. A forked child does not continue it,
    since the file belongs to its parent.

    Args:
        directory: the directory; None reads the variable ``RELOADPG_STATUS_DIR``, and does nothing
            if it is not set.

    Returns:
        A function that stops it; idempotent. The file is kept.
    """
    where = os.fspath(directory) if directory is not None else os.environ.get(STATUS_DIR, "")
    if not where:
        return lambda: None
    return _process.publish(Path(where))


class StatusRecord:
    """The record of this process: its status, and the report of its last operation.

    Updated at the start and end of operations, in their thread, and by :meth:`refresh` from any
    thread. The progress of a running operation is read whenever the record is read.

    Attributes:
        changed: called after a change, in the thread that made it; must not block.
    """

    def __init__(self, *, forked: bool = False) -> None:
        self._forked = forked
        self._report: Report | None = None
        self._last_ms: dict[str, float] = {}
        self._status: dict[str, Any] = {}
        self._seen: tuple[Any, ...] | None = None
        self._host = socket.gethostname()
        self._begun: dict[str, int] = {}
        self._begun_at = time.time()
        self.changed: Callable[[], object] = _ignore
        on_report(self._note)
        callbacks.begin.append(self._begin)

    @property
    def rank(self) -> int | None:
        """This process's rank; None if unknown.

        A forked child ignores the inherited group and environment. It has a rank only from a group
        that it has created itself.
        """
        world = tables.world()
        if self._forked and (world is None or is_inherited(world)):
            return None
        return current_rank() if world is None else world.rank()

    def refresh(self) -> None:
        """Update the status if groups were created or destroyed. Local, non-blocking, thread-safe.

        Does nothing while an operation runs or begins: a status reads the memory of communicators,
        which another thread may be releasing. The operation's report follows.
        """
        with between_operations() as free:
            if free:
                self._update()

    def text(self, *, exiting: bool = False) -> str:
        """The record as JSON, with the current time; ``exiting`` marks the last one.

        Built by the thread that writes it, not by the job's.
        """
        status, report, operation = self._status, self._report, running()
        record = {
            "version": VERSION,
            "pid": os.getpid(),
            "started": start_of(os.getpid()),
            "process_table": process_table(),
            "rank": self.rank,
            "world_size": status.get("world_size"),
            "host": self._host,
            "time": time.time(),
            "exited": exiting,
            "running": None if operation is None else operation.details(),
            "collectives": self._collectives(),
            "installed": bool(status.get("installed", reloadpg.is_installed())),
            "status": status,
            "last_report": None if report is None else report.details(),
            "last_ms": dict(self._last_ms),
        }
        return json.dumps(record, default=str)

    def _collectives(self) -> dict[str, Any]:
        """The collectives started: numbers by group, Unix time of the last one, and, some seconds
        later, the main thread's stack and what NCCL's flight recorder lists as not completed.

        Torch counts them, so this costs nothing. Uses no communicator while an operation runs.
        """
        with between_operations() as free:
            if free and (begun := collectives_begun(managed_groups())) != self._begun:
                self._begun, self._begun_at = begun, time.time()
        found: dict[str, Any] = {"begun": self._begun, "since": self._begun_at}
        if time.time() - self._begun_at >= _STILL_S:
            found |= {
                "stack": _main_stack(),
                "unfinished": inspection.unfinished_collectives(_MOST),
            }
        return found

    def _begin(self) -> None:
        """Record the groups at the start of an operation; no other thread does while it runs."""
        if self.changed is _ignore:
            return
        try:
            self._update()
            self.changed()
        except Exception as error:  # monitoring must not stop the job
            logger.warning("the status record is not up to date: %s", error)

    def _note(self, report: Report) -> None:
        self._report = report
        self._last_ms[report.operation] = report.total_ms
        self._seen = None
        if self.changed is not _ignore:  # status() takes up to some ms, so only if it is published
            self._update()

    def _update(self) -> None:
        """Read the status if groups were created or destroyed, or an operation has ended."""
        seen = reloadpg.is_installed(), id(tables.world()), len(tables.known_groups())
        if seen == self._seen:
            return
        status = reloadpg.status().details()
        if self._status.get("world_size") and not status["initialized"]:
            # The default group was destroyed; keep the last values of its job.
            status |= {name: self._status[name] for name in _LASTING}
        self._status = status
        self._seen = seen
        self.changed()


def _main_stack() -> list[str]:
    """The Python stack of the main thread, innermost first. Local, from any thread.

    Uses faulthandler: reading the frames of other threads can deadlock or crash (python#106883).
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().split("\n\n")
    mine = f"{threading.main_thread().ident:x} "
    for thread in threads:
        head, *lines = thread.strip().splitlines() or [""]
        if mine in head:
            return [line.strip() for line in lines[:_MOST_FRAMES]]
    return []


_MOST_FRAMES, _MOST = 24, 8
"""Maximum number of stack frames, and of flight recorder entries, in a record."""


def _ignore() -> None:
    """Do nothing: called for changes while there is no subscriber."""


class Publisher:
    """Writes the status file from a separate thread.

    Args:
        directory: directory of the file; created if missing.
        heartbeat: seconds between two writes without a change.
    """

    def __init__(self, directory: Path, *, heartbeat: float = HEARTBEAT_S) -> None:
        self.directory = directory
        self._heartbeat = heartbeat
        self._record = process_record()
        self._wake = threading.Event()
        self._ended = self._exiting = False
        self._trouble = False
        self._path: Path | None = None
        self._thread = LibraryThread(target=self._run, name="reloadpg-status", daemon=True)

    def start(self) -> None:
        """Start to write. Call it once."""
        self._record.changed = self._wake.set
        self._thread.start()

    def stop(self, *, exiting: bool = False) -> None:
        """Write a last time and stop; waits at most half a second. Idempotent.

        With ``exiting``, the last record says that the process has exited.
        """
        self._exiting = exiting
        self._ended = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            for _ in range(10):  # a pause of the machine consumes only one part of the timeout
                self._thread.join(_LAST_WRITE_S / 10)

    def _run(self) -> None:
        while True:
            ended = self._ended
            try:
                self._record.refresh()
                self._write()
                self._trouble = False
            except Exception as error:  # the directory may come back
                if not self._trouble:
                    logger.warning(
                        "the status file in %s cannot be written: %s; the job is not affected. "
                        "Retrying each second",
                        self.directory,
                        error,
                    )
                self._trouble = True
            if ended:
                return
            self._wake.wait(self._heartbeat)
            self._wake.clear()

    def _write(self) -> None:
        rank = self._record.rank
        if rank is None:
            return  # the rank is unknown
        path = self.directory / f"rank-{rank}.json"
        replace_file(path, self._record.text(exiting=self._exiting))
        if self._path not in (None, path):  # the launcher had given another rank
            self._path.unlink(missing_ok=True)  # type: ignore[union-attr]
        self._path = path


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


class _Process:
    """The published record of this process. Reset in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._record: StatusRecord | None = None
        self._publisher: Publisher | None = None
        self._hooked = self._forked = False

    def record(self) -> StatusRecord:
        """The record of this process, created on first use. Local."""
        if self._record is not None:  # without the lock, which publish has
            return self._record
        with self._lock:
            if self._record is None:
                self._record = StatusRecord(forked=self._forked)
            if not self._hooked:
                os.register_at_fork(after_in_child=self._after_fork)
                atexit.register(self._end)
                self._hooked = True
            return self._record

    def publish(self, directory: Path) -> Callable[[], None]:
        self.record()
        with self._lock:
            before = publisher = self._publisher
            if publisher is None or publisher.directory != directory:
                publisher = self._publisher = Publisher(directory)
                publisher.start()
        if before is not None and before is not publisher:
            before.stop()
        return lambda: self._stop(publisher)

    def _stop(self, publisher: Publisher) -> None:
        with self._lock:
            if self._publisher is publisher:
                self._publisher = None
        publisher.stop()

    def _end(self) -> None:
        if self._publisher is not None:
            self._publisher.stop(exiting=True)

    def _after_fork(self) -> None:
        # The publisher's thread does not exist in the child, and the lock may stay locked. The
        # registry has dropped the parent's callbacks, too.
        self._lock = threading.Lock()
        self._record = self._publisher = None
        self._forked = True


_process = _Process()
process_record = _process.record
