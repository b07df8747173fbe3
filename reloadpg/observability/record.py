"""The record of this process that status files and torch's debug server give to others."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import reloadpg
from reloadpg import c10d
from reloadpg.groups.registry import registry
from reloadpg.lifecycle.report import Report
from reloadpg.lifecycle.status import running

from .logs import current_rank
from .subscription import subscribe

__all__ = ["VERSION", "StatusRecord", "process_record"]

VERSION = 1

KEPT_REPORTS = 50

logger = logging.getLogger("reloadpg")


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
        self._body = ""
        self._host = socket.gethostname()
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
        if not self._body:
            self._body = self._encoded()
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
        }
        return f"{json.dumps(head)[:-1]}, {self._body}"

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
        self._status = reloadpg.status().details()
        self._seen = seen
        self._body = ""  # encoded by the thread that needs it, which is not the job's
        self.changed()

    def _encoded(self) -> str:
        body = {
            "installed": bool(self._status.get("installed", reloadpg.is_installed())),
            "status": self._status,
            "last_report": None if self._report is None else self._report.details(),
        }
        return json.dumps(body, default=str)[1:]

    @staticmethod
    def _signature() -> tuple[Any, ...]:
        return reloadpg.is_installed(), id(c10d.world()), len(c10d.known_groups())


def _nobody() -> None:
    """Do nothing: called for changes while nobody has subscribed."""


class _Process:
    """The one record of this process; a forked child starts with a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._record: StatusRecord | None = None
        self._hooked = self._forked = False

    def record(self) -> StatusRecord:
        with self._lock:
            if self._record is None:
                self._record = StatusRecord(forked=self._forked)
            if not self._hooked:
                os.register_at_fork(after_in_child=self._after_fork)
                self._hooked = True
            return self._record

    def _after_fork(self) -> None:
        # The registry has forgotten the parent's callbacks likewise.
        self._lock = threading.Lock()
        self._record = None
        self._forked = True


process_record = _Process().record
"""The record of this process, made at its first use. Local."""
