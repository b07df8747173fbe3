"""Publication of this process's status: a record in a file.

If ``RELOADPG_STATUS_DIR`` is set, a process that installs reloadpg keeps ``rank-<n>.json`` there,
for ``reloadpg status``. The file is rewritten atomically each second and at the end of each
operation, so a reader finds a complete record, and an old one if the process has ended or is
stopped. While an operation runs, the record has its progress. A daemon thread of this module writes
the file, so a slow or full disk delays no other thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import reloadpg
from reloadpg import on_report
from reloadpg.c10d import tables
from reloadpg.extend import (
    LibraryThread,
    is_inherited,
    running,
)
from reloadpg.processes import process_table, start_of
from reloadpg.reports import Report, Status
from reloadpg.settings import STATUS_DIR

from .logs import current_rank
from .record import RankRecord

HEARTBEAT_S = 1.0
_LAST_WRITE_S = 0.5
"""Maximum number of seconds that the exit of the process waits for the last record."""

logger = logging.getLogger("reloadpg")

_publishers: dict[int, Publisher] = {}
"""The publisher of this process, by its id. A forked child inherits its parent's publisher, which
has no thread there."""


def start() -> None:
    """Publish the status if it is requested. Local; idempotent, also in a forked child."""
    directory = os.environ.get(STATUS_DIR)
    if not directory or os.getpid() in _publishers:
        return
    try:
        publisher = Publisher(Path(directory), forked=bool(_publishers))
        if _publishers.setdefault(os.getpid(), publisher) is publisher:
            publisher.start()
    except Exception as error:  # monitoring must not stop the job
        logger.warning("the status of this process will not be published: %s", error)


class Publisher:
    """Keeps this process's status file up to date, from a separate thread.

    The status is read at the start and end of operations, in their thread, and between operations
    by the publisher's: it contains the memory of communicators, which an operation may be
    releasing. The progress of a running operation is read whenever the record is written.

    Args:
        directory: directory of the file; created if missing.
        heartbeat: seconds between two writes without a change.
        forked: whether the default group and the launcher's variables belong to the parent.
    """

    def __init__(
        self, directory: Path, *, heartbeat: float = HEARTBEAT_S, forked: bool = False
    ) -> None:
        self.directory = directory
        self._heartbeat = heartbeat
        self._forked = forked
        self._status: Status | None = None
        self._last_ms: dict[str, float] = {}
        self._callbacks = ExitStack()
        self._wake = threading.Event()
        self._ended = self._exiting = self._trouble = False
        self._thread = LibraryThread(target=self._run, name="reloadpg-status", daemon=True)

    def start(self) -> None:
        """Start to write. Call it once."""
        self._callbacks.callback(on_report(self._note))
        atexit.register(self._exit, os.getpid())
        self._thread.start()

    def stop(self) -> None:
        """Write a last time and stop; waits at most half a second. Idempotent."""
        self._callbacks.close()
        atexit.unregister(self._exit)
        self._ended = True
        self._wake.set()
        self._thread.join(_LAST_WRITE_S)

    def _exit(self, pid: int) -> None:
        if pid == os.getpid():  # not in a forked child
            self._exiting = True
            self.stop()

    # -- the status -----------------------------------------------------------------------------

    def _note(self, report: Report) -> None:
        self._last_ms[report.operation] = report.total_ms
        self._look()
        self._wake.set()

    def _look(self) -> None:
        """Read the status. After the default group was destroyed, the last one is kept."""
        status = reloadpg.status()
        if self._status is None or status.initialized or not self._status.initialized:
            self._status = status

    # -- the record -----------------------------------------------------------------------------

    def _rank(self) -> int | None:
        """This process's rank; None if unknown.

        A forked child ignores the inherited group and environment. It has a rank only from a group
        that it has created itself.
        """
        world = tables.world()
        if self._forked and (world is None or is_inherited(world)):
            return None
        return current_rank() if world is None else world.rank()

    def _record(self, rank: int, status: Status) -> RankRecord:
        errors = (status.last_error, *(group.last_error for group in status.groups))
        return RankRecord(
            rank=rank,
            world_size=status.world_size,
            state=_state(status),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=start_of(os.getpid()),
            process_table=process_table(),
            time=time.time(),
            generation=status.generation,
            groups=len(status.groups),
            memory_bytes=status.memory_bytes,
            alone=sum(group.holds for group in status.bypassed_groups),
            error=next((text.strip().partition("\n")[0] for text in errors if text.strip()), ""),
            timeout_s=status.options.get("timeout_s"),
            last_ms=self._last_ms.copy(),
            running=running(),
            absent="exited" if self._exiting else "",
        )

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            ended = self._ended
            try:
                if running() is None or self._status is None:
                    self._look()
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
        rank, status = self._rank(), self._status
        if rank is None or status is None:
            return
        path = self.directory / f"rank-{rank}.json"
        replace_file(path, self._record(rank, status).to_json())


def _state(status: Status) -> str:
    """The state of this rank; of each set, if it has groups in several."""
    if not status.installed:
        return "off" if status.off else "not installed"
    if tables.world() is None:
        return "no group yet"
    sets = [f"{name} {one.state}" for name, one in status.sets.items() if one.groups]
    return ", ".join(sets) if len(sets) > 1 else status.state


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically, even if this process is killed. Local.

    The file, and its directory if that is created, are readable by this user only. A link is not
    followed.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "w", opener=_private) as file:
        file.write(text)
    part.replace(path)


def _private(path: str, flags: int) -> int:
    # In a directory that other users can write to, this name may be their link.
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
