"""An offload or reload that runs in a separate thread while its caller continues."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from ..errors import PendingError
from ..groups.offloaded import UnderWay
from ..groups.registry import Job
from ..rendezvous.worker_thread import Attempt, Task
from .failure import perform
from .operation import Operation
from .report import Report

__all__ = ["Pending"]

Outcome = tuple["Report | None", "BaseException | None"]


class Pending:
    """The handle of an offload or a reload that was started with ``wait=False``.

    The operation runs in a separate thread, with its usual timeouts, independently of the handle.
    An interrupt of :meth:`result` ends only the wait. The exit of the interpreter waits for the
    operation. A RuntimeWarning reports a handle that is deleted before :meth:`result` has returned
    or raised.

    Attributes:
        operation: ``offload`` or ``reload``.
    """

    def __init__(self, op: Operation, run: Callable[[Operation], Report]) -> None:
        self.operation = op.name
        self._pid = os.getpid()
        self._heard = True  # until it is certain that the operation begins
        attempt, begun = Attempt(), threading.Event()
        under_way = UnderWay(op.name)
        try:
            op.begin()
            op.reserve(under_way)
            call = partial(_perform, op, run, under_way, attempt, begun)
            self._task: Task[Outcome] = Task(call, op.name, daemon=False)
            begun.wait()
        except BaseException as error:
            attempt.abandon()
            if begun.is_set():
                raise
            failed = error

            def fail(op: Operation, job: Job) -> None:
                raise failed

            try:
                perform(op, fail)
            finally:
                under_way.end()
            raise
        self._heard = False

    def done(self) -> bool:
        """Whether the operation has completed or failed. Local, at any time."""
        return self._task.ended

    def result(self, timeout: timedelta | float | None = None) -> Report:
        """Wait until the operation has ended, and return its report. Blocking; may be repeated.

        Args:
            timeout: how long to wait; a number is in seconds. None waits until the operation ends,
                which its own timeouts ensure.

        Returns:
            The report of this rank.

        Raises:
            PendingError: it has not ended in that time and is still running; or this is a forked
                child.
            Exception: see ``offload()`` and ``reload()``.
        """
        if os.getpid() != self._pid:
            raise PendingError(
                f"{self.operation}(wait=False): result() was called in a forked child (pid "
                f"{os.getpid()}), in which the operation does not run. Call it in the parent."
            )
        given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = threading.TIMEOUT_MAX if given is None else min(given, threading.TIMEOUT_MAX)
        if not self._task.wait(seconds):
            raise PendingError(
                f"{self.operation}(wait=False) is still running after {given:g} s. Call "
                "result() again."
            )
        self._heard = True
        report, error = self._task.result()
        if error is not None:
            raise error
        if report is None:
            raise PendingError(f"{self.operation}(wait=False) did not begin; this is a bug")
        return report

    def __repr__(self) -> str:
        return f"<Pending {self.operation}, {'ended' if self.done() else 'running'}>"

    def __del__(self) -> None:
        if self._heard or os.getpid() != self._pid:
            return
        state = "the operation is still running"
        if self._task.ended:
            error = self._task.result()[1]
            state = "it completed" if error is None else f"it raised {error!r}"
        warnings.warn(
            f"the handle of {self.operation}(wait=False) was deleted before result() was called; "
            f"{state}. Keep the handle, and call result() before the groups are used.",
            RuntimeWarning,
            stacklevel=2,
        )


def _perform(
    op: Operation,
    run: Callable[[Operation], Report],
    under_way: UnderWay,
    attempt: Attempt,
    begun: threading.Event,
) -> Outcome:
    """Run the operation; the body of its thread."""
    with attempt as wanted:
        if not wanted:
            return None, None
        begun.set()
    under_way.enter()
    try:
        return run(op), None
    except BaseException as error:  # result() raises it in the caller's thread
        return None, error
    finally:
        under_way.end()
