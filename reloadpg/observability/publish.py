"""The status of this process for others: its record, in a file and at torch's debug server.

With ``RELOADPG_STATUS_DIR`` in its environment a process that installs reloadpg keeps
``rank-<n>.json`` there, for ``reloadpg status``: written anew as each operation begins and ends,
and each second, atomically, so that a reader finds a whole record, and one that is old if the
process is gone or stopped. While an operation runs, also while this rank waits in it, the record
says how far it is. Beside it ``trace-rank-<n>.json`` is the trace of the last operations, for
``reloadpg trace``. The files are written by a daemon thread of this module alone: a slow or full
disk holds up nobody else.

``torch.distributed.debug.start_debug_server()`` starts one server a rank (torch 2.13 and later);
at ``/handler/reloadpg`` it answers with the same record. Nothing is started here.
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
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reloadpg
from reloadpg import c10d
from reloadpg.errors import STATUS_DIR
from reloadpg.groups.registry import registry
from reloadpg.lifecycle.recover import collectives_begun
from reloadpg.lifecycle.report import Report
from reloadpg.lifecycle.status import running

from .exporters import subscribe
from .logs import current_rank, name_rank_in_records
from .trace import replace_file, write_trace

__all__ = [
    "Publisher",
    "StatusRecord",
    "process_record",
    "publish_status",
    "serve_status",
    "start_with_installations",
]

VERSION = 1
"""Of the record's form."""

HANDLER = "reloadpg"
KEPT_REPORTS = 50
HEARTBEAT_S = 1.0
_LASTING = ("rank", "world_size", "generation", "cycles", "groups", "memory_bytes", "last_error")
"""Values of a status that stay when the job's groups have been destroyed."""
_LAST_WRITE_S = 0.5
"""The longest that the end of the process waits for the last record to be written."""

_STILL_S = 2.0
"""Seconds without a new collective after which the record has the stack of the main thread."""

logger = logging.getLogger("reloadpg")


def start_with_installations() -> None:
    """Call :func:`start` with every ``install`` from now on. Local; idempotent."""
    if start not in registry.callbacks.install:
        registry.callbacks.install.append(start)


def start() -> None:
    """Name the rank in log records, answer torch's debug server, publish the status if asked to.

    Local; idempotent; called by ``install``, also by one that finds the library installed: a
    forked child gets what its parent had.
    """
    name_rank_in_records()
    try:
        serve_status()
        publish_status()
    except Exception as error:  # what only shows the job must not stop it
        logger.warning("no status of this process will be shown: %s", error)


def serve_status() -> bool:
    """Let a debug server of this process, now or later, answer with the status record.

    Local; idempotent; costs nothing until it is asked. The answer is made in the server's thread
    and asks no communicator for anything while an operation runs.

    Returns:
        Whether the installed torch takes handlers (2.8 does not).
    """
    return _process.serve()


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


class StatusRecord:
    """This process's own account: its status, and the report of its last operation.

    Kept up to date as operations begin and end, in the job's own thread, and by :meth:`refresh`
    from any other. How far a running operation is, is asked whenever the record is read.

    Attributes:
        changed: called in the thread that brought something new; must not block.
        reports: the last reports, for a trace; kept while there is somebody to call.
    """

    def __init__(self, *, forked: bool = False) -> None:
        self._forked = forked
        self._report: Report | None = None
        self.reports: deque[Report] = deque(maxlen=KEPT_REPORTS)
        self._status: dict[str, Any] = {}
        self._seen: tuple[Any, ...] | None = None
        self._body: tuple[object, object, str] = (None, None, "")
        self._host = socket.gethostname()
        self._begun: dict[str, int] = {}
        self._begun_at = time.time()
        self.changed: Callable[[], object] = _nobody
        subscribe("the status record", self._note)
        registry.callbacks.begin.append(self._begin)

    @property
    def rank(self) -> int | None:
        """This process's rank; None as long as nobody knows it.

        A forked child is its parent's rank neither by the group nor by the environment that it
        has inherited, but only what a group of its own says.
        """
        world = c10d.world()
        if self._forked and (world is None or registry.is_inherited(world)):
            return None
        return current_rank() if world is None else world.rank()

    def refresh(self) -> None:
        """Look again if groups have come or gone since. Local, non-blocking, from any thread.

        Not while an operation runs or begins: status asks communicators for their memory, and
        none may be asked while another thread releases it. The operation's report follows.
        """
        seen = self._signature()
        if seen == self._seen or not registry.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            return
        try:
            if not registry.busy:
                self._look(seen)
        finally:
            registry.lock.release()  # type: ignore[attr-defined]

    def text(self, *, exiting: bool = False) -> str:
        """The record as JSON, with the time of now.

        Args:
            exiting: whether the process is at its exit, and this is the last record.
        """
        body = self._encoded()
        size, operation = self._status.get("world_size"), running()
        head = {
            "version": VERSION,
            "pid": os.getpid(),
            "rank": self.rank,
            "world_size": size,
            "host": self._host,
            "time": time.time(),
            "exited": exiting,
            "running": None if operation is None else operation.details(),
            "collectives": self._collectives(),
        }
        return f"{json.dumps(head)[:-1]}, {body}"

    def _collectives(self) -> dict[str, Any]:
        """How many collectives this rank has begun on each group, since when, and where it is.

        Torch counts them, so that they cost nothing. No communicator is asked while an operation
        runs. Where none has begun for some seconds: the stack, and NCCL's unfinished collectives.
        """
        if registry.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                begun = self._begun if registry.busy else collectives_begun(registry.managed())
            finally:
                registry.lock.release()  # type: ignore[attr-defined]
            if begun != self._begun:
                self._begun, self._begun_at = begun, time.time()
        found: dict[str, Any] = {"begun": self._begun, "since": self._begun_at}
        if time.time() - self._begun_at >= _STILL_S:
            found |= {"stack": _main_stack(), "unfinished": c10d.unfinished_collectives(_MOST)}
        return found

    def _begin(self) -> None:
        """Note the groups as an operation begins: no other thread looks while it runs."""
        if self.changed is _nobody:
            return
        try:
            seen = self._signature()
            if seen != self._seen:
                self._look(seen)
            self.changed()
        except Exception as error:  # what only shows the job must not stop it
            logger.warning("the status record is not up to date: %s", error)

    def _note(self, report: Report) -> None:
        self._report = report
        self._seen = None
        if self.changed is not _nobody:  # status takes up to some ms, so only where it is shown
            self.reports.append(report)
            self._look(self._signature())

    def _look(self, seen: tuple[Any, ...]) -> None:
        status = reloadpg.status().details()
        if self._status.get("world_size") and not status["initialized"]:
            # The default group was destroyed: the last figures of its job are what counts.
            status |= {name: self._status[name] for name in _LASTING}
        self._status = status
        self._seen = seen
        self.changed()

    def _encoded(self) -> str:
        """Status and report as JSON, by the thread that needs it, which is not the job's.

        The text is kept beside what it was made of: a look meanwhile brings another status.
        """
        status, report = self._status, self._report
        of_status, of_report, text = self._body
        if of_status is not status or of_report is not report:
            body = {
                "installed": bool(status.get("installed", reloadpg.is_installed())),
                "status": status,
                "last_report": None if report is None else report.details(),
            }
            text = json.dumps(body, default=str)[1:]
            self._body = status, report, text
        return text

    @staticmethod
    def _signature() -> tuple[Any, ...]:
        return reloadpg.is_installed(), id(c10d.world()), len(c10d.known_groups())


def _main_stack() -> list[str]:
    """The Python stack of the main thread, innermost first. Local, from any thread.

    By faulthandler, which stops at nothing: to ask the interpreter for the frames of other threads
    can deadlock or crash (python#106883).
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
"""Frames of the stack, and entries of the flight recorder, in a record."""


def _nobody() -> None:
    """Do nothing: called for changes while nobody has subscribed."""


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
            for _ in range(10):  # a machine that stands still takes one part of it
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
        replace_file(path, self._record.text(exiting=self._exiting))
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
    """What this process shows of itself. A forked child starts anew: the files are its parent's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._record: StatusRecord | None = None
        self._publisher: Publisher | None = None
        self._served: bool | None = None
        self._hooked = self._forked = False

    def record(self) -> StatusRecord:
        """The record of this process, made at its first use. Local."""
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

    def serve(self) -> bool:
        self.record()  # so that it has the reports from now on
        with self._lock:
            if self._served is None:
                self._served = c10d.register_debug_handler(HANDLER, self._answer)
            return self._served

    def _answer(self) -> str:
        record = self.record()
        record.refresh()
        return record.text()

    def publish(self, directory: Path) -> Callable[[], None]:
        self.record()
        with self._lock:
            publisher = self._publisher
            if publisher is None or publisher.directory != directory:
                if publisher is not None:
                    publisher.stop()
                publisher = self._publisher = Publisher(directory)
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
        # The publisher's thread is not in the child, and the lock may be held for ever. The
        # registry has forgotten the parent's callbacks likewise.
        self._lock = threading.Lock()
        self._record = self._publisher = None
        self._forked = True


_process = _Process()
process_record = _process.record
