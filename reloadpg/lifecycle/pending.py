"""An offload or reload in a thread of its own, beside what its caller does meanwhile."""

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
    """The handle on an offload or a reload that was begun with ``wait=False``.

    The operation goes on in a thread of its own, bounded as ever, whatever happens to the handle.
    An interrupt of :meth:`result` ends only the wait, and the exit of the interpreter waits for
    the operation. A handle that goes away before :meth:`result` has said how the operation ended
    is reported by a RuntimeWarning.

    Attributes:
        operation: ``offload`` or ``reload``.
    """

    def __init__(self, op: Operation, run: Callable[[Operation], Report]) -> None:
        self.operation = op.name
        self._pid = os.getpid()
        self._heard = True  # until the operation is sure to begin
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
        """Whether the operation has ended, one way or the other. Local, at any time."""
        return self._task.ended

    def result(self, timeout: timedelta | float | None = None) -> Report:
        """Wait until the operation has ended, and return its report. Blocking; may be repeated.

        Args:
            timeout: how long to wait; a number is in seconds. None waits until the operation ends,
                which its own bounds see to.

        Returns:
            What was done on this rank.

        Raises:
            PendingError: it has not ended in that time, and goes on; or this is a forked child.
            Exception: what ``offload()`` or ``reload()`` raises, on all ranks alike.
        """
        if os.getpid() != self._pid:
            raise PendingError(
                f"{self.operation}(wait=False): result() was called in a forked child (pid "
                f"{os.getpid()}), in which nothing runs. Call it in the parent."
            )
        given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = threading.TIMEOUT_MAX if given is None else min(given, threading.TIMEOUT_MAX)
        if not self._task.wait(seconds):
            raise PendingError(
                f"{self.operation}(wait=False) has not ended after {given:g} s; it goes on. Call "
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
        return f"<Pending {self.operation}, {'ended' if self.done() else 'under way'}>"

    def __del__(self) -> None:
        if self._heard or os.getpid() != self._pid:
            return
        state = "the operation goes on"
        if self._task.ended:
            error = self._task.result()[1]
            state = "it completed" if error is None else f"it raised {error!r}"
        warnings.warn(
            f"the handle of {self.operation}(wait=False) went away and result() was never called; "
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
    """Run the operation; the whole of its thread."""
    with attempt as wanted:
        if not wanted:
            return None, None
        begun.set()
    under_way.enter()
    try:
        return run(op), None
    except BaseException as error:  # raised in the caller's thread by result()
        return None, error
    finally:
        under_way.end()
