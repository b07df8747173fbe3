"""An offload or reload that runs in a separate thread, and the handle on it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from datetime import timedelta
from functools import partial

from ..errors import PendingError
from ..groups.offloaded import UnderWay
from ..rendezvous.worker_thread import Attempt, Task, exiting
from ..reports import Report
from ..texts import warn
from .job import Job
from .operation import Operation
from .run import perform

_SIGNAL_S = 1.0
"""A wait handles signals at least this often, in seconds, whichever thread they were given to."""


class Pending:
    """The handle of an offload or a reload that was started with ``wait=False``.

    It has the methods of :class:`concurrent.futures.Future`, and can be awaited. The operation
    runs in a separate thread and ends within its timeouts, whatever happens to the handle; it
    cannot be cancelled. An interrupt of :meth:`result` ends only the wait, and the exit of the
    interpreter waits for the operation. A RuntimeWarning names a handle that is deleted before
    anything has asked how the operation ended.

    Attributes:
        operation: ``offload`` or ``reload``.
    """

    def __init__(self, op: Operation, run: Callable[[Operation], Report]) -> None:
        self.operation = op.name
        self._pid = os.getpid()
        self._read = True  # until the operation is sure to begin
        self._future: futures.Future[Report] = futures.Future()
        self._future.set_running_or_notify_cancel()
        attempt, begun = Attempt(), threading.Event()
        under_way = UnderWay(op.name)
        try:
            op.begin()
            op.reserve(under_way)
            call = partial(_perform, op, run, under_way, attempt, begun, self._future)
            Task(call, op.name, daemon=False)
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
        self._read = False

    def done(self) -> bool:
        """Whether the operation has ended, with or without an error. Local."""
        return self._future.done()

    def running(self) -> bool:
        """Whether the operation has not ended. Local."""
        return not self.done()

    def cancel(self) -> bool:
        """Return False: an operation cannot be cancelled."""
        return False

    def cancelled(self) -> bool:
        """Return False: an operation cannot be cancelled."""
        return False

    def result(self, timeout: timedelta | float | None = None) -> Report:
        """Wait until the operation has ended, and return its report. Blocking; may be repeated.

        Args:
            timeout: how long to wait, in seconds or as a timedelta. None waits until the operation
                ends, which its own timeouts ensure.

        Returns:
            The report of this rank.

        Raises:
            PendingError: it has not ended in that time and continues; or this is a forked child.
            Exception: what ``offload()`` or ``reload()`` raises, on all ranks.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def exception(self, timeout: timedelta | float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return the error of the operation, or None."""
        if os.getpid() != self._pid:
            raise PendingError(
                f"{self.operation}(wait=False): result() was called in a forked child (pid "
                f"{os.getpid()}), in which the operation does not run. Call it in the parent."
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        end = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                error = self._future.exception(min(_SIGNAL_S, left))
            except futures.TimeoutError:
                if left == 0.0:
                    raise PendingError(
                        f"{self.operation}(wait=False) is still running after {seconds:g} s. "
                        "Call result() again."
                    ) from None
            else:
                self._read = True
                return error

    def add_done_callback(self, function: Callable[[Pending], object]) -> None:
        """Call ``function(self)`` when the operation has ended: in its thread, or now."""

        def call(_: futures.Future[Report]) -> None:
            self._read = True
            function(self)

        self._future.add_done_callback(call)

    def __await__(self) -> Generator[object, None, Report]:
        """Wait in a coroutine; the result is that of :meth:`result`."""
        self._read = True
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        return f"<Pending {self.operation}, {'ended' if self.done() else 'running'}>"

    def __del__(self) -> None:
        if self._read or os.getpid() != self._pid:
            return
        state = "the operation is still running"
        if self.done():
            error = self._future.exception()
            if error is None and exiting():
                return  # nothing can use the groups any more
            state = "it completed" if error is None else f"it raised {error!r}"
        warn(
            f"the handle of {self.operation}(wait=False) was deleted and result() was never "
            f"called; {state}. Keep the handle, and call result() before the groups are used.",
            RuntimeWarning,
        )


def _perform(
    op: Operation,
    run: Callable[[Operation], Report],
    under_way: UnderWay,
    attempt: Attempt,
    begun: threading.Event,
    future: futures.Future[Report],
) -> None:
    """Run the operation; the whole of its thread."""
    with attempt as wanted:
        if not wanted:
            return
        begun.set()
    under_way.enter()
    try:
        try:
            report = run(op)
        finally:
            under_way.end()
    except BaseException as error:  # raised in the caller's thread by result()
        future.set_exception(error)
    else:
        future.set_result(report)
