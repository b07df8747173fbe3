"""One status file a rank, for ``reloadpg status`` and whoever else looks at a directory.

With ``RELOADPG_STATUS_DIR`` in its environment a process that installs reloadpg keeps
``rank-<n>.json`` there: written anew as each operation begins and ends, and each second,
atomically, so that a reader finds a whole record, and one that is old if the process is gone or
stopped. While an operation runs, also while this rank waits in it, the record says how far it is.
Beside it ``trace-rank-<n>.json`` is the trace of the last operations, for ``reloadpg trace``.
The files are written by a daemon thread of this module alone: a slow or full disk holds up nobody
else.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from reloadpg.lifecycle.report import Report

from .record import process_record
from .trace import write_trace

__all__ = ["STATUS_DIR", "Publisher", "publish_status"]

STATUS_DIR = "RELOADPG_STATUS_DIR"
HEARTBEAT_S = 1.0
_LAST_WRITE_S = 0.5
"""The longest that the end of the process waits for the last record to be written."""

logger = logging.getLogger("reloadpg")


def publish_status(directory: str | os.PathLike[str] | None = None) -> Callable[[], None]:
    """Keep this process's status file up to date from now on.

    Local; returns at once; idempotent for the same directory. A forked child does not go on with
    it: the file is its parent's.

    Args:
        directory: where; None asks the variable ``RELOADPG_STATUS_DIR``, and does nothing if it
            is not set.

    Returns:
        A function that ends it; idempotent. The file stays.
    """
    where = os.fspath(directory) if directory is not None else os.environ.get(STATUS_DIR, "")
    if not where:
        return lambda: None
    return _process.publish(Path(where))


class Publisher:
    """Writes the status file from a thread of its own.

    Args:
        directory: where the file is to be; made if it is not there.
        heartbeat: seconds between two writes where nothing happens.
    """

    def __init__(self, directory: Path, *, heartbeat: float = HEARTBEAT_S) -> None:
        self.directory = directory
        self._heartbeat = heartbeat
        self._record = process_record()
        self._wake = threading.Event()
        self._ended = self._exiting = False
        self._trouble = False
        self._path: Path | None = None
        self._traced: Report | None = None
        self._thread = threading.Thread(target=self._run, name="reloadpg-status", daemon=True)

    def start(self) -> None:
        """Begin to write. Once."""
        self._record.changed = self._wake.set
        self._thread.start()

    def stop(self, *, exiting: bool = False) -> None:
        """Write a last time and end; waits half a second at most. Idempotent.

        Args:
            exiting: whether the last record says that the process has exited.
        """
        self._exiting = exiting
        self._ended = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_LAST_WRITE_S)

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
                        "no status file can be written in %s: %s; the job is not affected, and "
                        "it is tried again each second",
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
            return  # a process that is no rank yet
        path = self.directory / f"rank-{rank}.json"
        part = self.directory / f".{path.name}.{os.getpid()}.part"
        text = self._record.text(exiting=self._exiting)
        try:
            part.write_text(text)
        except FileNotFoundError:
            self.directory.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
        part.replace(path)
        if self._path not in (None, path):  # the launcher had given another rank
            self._path.unlink(missing_ok=True)  # type: ignore[union-attr]
        self._path = path
        self._write_trace(rank)

    def _write_trace(self, rank: int) -> None:
        """Write the trace anew if there is a new report."""
        reports = tuple(self._record.reports)
        if reports and reports[-1] is not self._traced:
            write_trace(reports, self.directory / f"trace-rank-{rank}.json")
            self._traced = reports[-1]


class _Process:
    """The publisher of this process, if it has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publisher: Publisher | None = None
        self._hooked = False

    def publish(self, directory: Path) -> Callable[[], None]:
        with self._lock:
            publisher = self._publisher
            if publisher is None or publisher.directory != directory:
                if publisher is not None:
                    publisher.stop()
                publisher = self._publisher = Publisher(directory)
                if not self._hooked:
                    os.register_at_fork(after_in_child=self._after_fork)
                    atexit.register(self._end)
                    self._hooked = True
                publisher.start()
            return lambda: self._stop(publisher)

    def _stop(self, publisher: Publisher) -> None:
        with self._lock:
            publisher.stop()
            if self._publisher is publisher:
                self._publisher = None

    def _end(self) -> None:
        if self._publisher is not None:
            self._publisher.stop(exiting=True)

    def _after_fork(self) -> None:
        # The thread is not in the child, the lock may be held for ever, and the file is the
        # parent's. The registry has forgotten the parent's callbacks likewise.
        self._lock = threading.Lock()
        self._publisher = None


_process = _Process()
