"""The thread of an operation, and the handle on it.

Every operation runs in a separate thread. A blocking call waits for it here: signals and
``KeyboardInterrupt`` reach the waiting caller, and never the code of the operation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal, overload

from ..errors import PendingError
from ..groups.offloaded import UnderWay
from ..rendezvous.round import Interrupted
from ..reports import Report
from ..threads import Task
from .callbacks import publish
from .job import Job
from .operation import Operation

logger = logging.getLogger("reloadpg")

Body = Callable[[Operation, Job], object]
"""The steps of an operation."""

_SIGNAL_S = 1.0
"""A wait handles signals at least this often, in seconds, whichever thread they were given to."""

_LEFT_S = 0.1
"""Seconds after which a call that the caller is to make looks whether the caller has left."""

_INTERRUPT_S = 15.0
"""Seconds that an interrupted caller waits for its operation to end, on all ranks."""


class Pending(futures.Future[Report]):
    """The handle of an offload or a reload that was started with ``wait=False``.

    A :class:`concurrent.futures.Future` that can be awaited, too. The operation runs in a separate
    thread and ends within its timeouts, whatever happens to the handle; it cannot be cancelled. An
    interrupt of :meth:`result` ends only the wait, and the exit of the interpreter waits for the
    operation. Keep the handle, and call :meth:`result` before the groups are used: it raises the
    error of the operation, which is logged, too.

    Attributes:
        operation: ``offload`` or ``reload``.
    """

    def __init__(self, operation: str) -> None:
        # It holds neither the operation, nor with it the groups.
        super().__init__()
        self.operation = operation
        self._pid = os.getpid()
        self._begun = threading.Event()

    def _start(self, op: Operation, body: Body) -> None:
        """Begin the operation, and run it in a thread."""
        op.begin()
        op.reserve()
        Task(partial(_perform, op, body, self), self.operation, daemon=False)
        self._begun.wait()  # from now on, cancel() returns False

    def _interrupt(self, op: Operation, error: BaseException) -> None:
        """Tell the operation to end, for an error in the caller. Waits a limited time.

        If its thread has not begun, the operation ends here.
        """
        if not self.cancel():
            op.interrupt(error)
            return
        op.fail(error)

    def result(self, timeout: float | None = None) -> Report:
        """Wait until the operation has ended, and return its report. Blocking; may be repeated.

        Args:
            timeout: how long to wait, in seconds. None waits until the operation ends, which its
                own timeouts ensure.

        Returns:
            The report of this rank.

        Raises:
            PendingError: it has not ended in that time and continues; or this is a forked child.
            Exception: what ``offload()`` or ``reload()`` raises, on all ranks.
        """
        self._await_end(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return the error of the operation, or None."""
        self._await_end(timeout)
        return super().exception()

    def _await_end(self, timeout: float | None) -> None:
        if os.getpid() != self._pid:
            raise PendingError(
                f"{self.operation}(wait=False): result() was called in a forked child (pid "
                f"{os.getpid()}), in which the operation does not run. Call it in the parent."
            )
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.done():
            left = end - time.monotonic()
            if left <= 0:
                raise PendingError(
                    f"{self.operation}(wait=False) is still running after {timeout:g} s. "
                    "Call result() again."
                )
            with suppress(futures.TimeoutError):
                super().exception(min(_SIGNAL_S, left))

    def __await__(self) -> Generator[object, None, Report]:
        """Wait in a coroutine; the result is that of :meth:`result`."""
        return asyncio.wrap_future(self).__await__()


@overload
def run(op: Operation, body: Body, *, wait: Literal[True] = True) -> Report: ...
@overload
def run(op: Operation, body: Body, *, wait: Literal[False]) -> Pending: ...
@overload
def run(op: Operation, body: Body, *, wait: bool) -> Report | Pending: ...
def run(op: Operation, body: Body, *, wait: bool = True) -> Report | Pending:
    """Run an operation in a thread, and wait for it. Callbacks run in this thread.

    An error in this thread, such as KeyboardInterrupt, tells the operation to end, and is raised
    after that or after a limited time.

    Args:
        op: the operation.
        body: its steps.
        wait: if False, return a handle, without a wait. Callbacks run in the operation's thread.
    """
    pending = caller = None
    try:
        if wait:
            caller = _Caller()
            op.in_caller = caller.call
        else:
            op.under_way = UnderWay(op.name)
        pending = Pending(op.name)
        pending._start(op, body)
        if caller is None:
            return pending
        pending.add_done_callback(caller.end)
        caller.serve()
    except BaseException as error:
        if pending is None:
            op.fail(error)
        else:
            pending._interrupt(op, error)
        if caller is not None:
            caller.leave()
            if pending is not None and pending.running():
                with suppress(PendingError):
                    pending.exception(_INTERRUPT_S)
        raise
    return pending.result()


class _Caller:
    """The thread that waits for an operation, and makes calls for it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], object], futures.Future[None]] | None]
        self._calls = SimpleQueue()
        self._left = threading.Event()

    def serve(self) -> None:
        """Make the calls of the operation until it has ended."""
        while True:
            with suppress(Empty):
                request = self._calls.get(timeout=_SIGNAL_S)
                if request is None:
                    return
                function, ended = request
                try:
                    function()
                except BaseException as error:  # raised in the operation, which ends
                    ended.set_exception(error)
                else:
                    ended.set_result(None)
                del request, function, ended

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the caller's thread; from that of the operation.

        Raises:
            Interrupted: the caller waits no more.
        """
        ended: futures.Future[None] = futures.Future()
        self._calls.put((function, ended))
        while not futures.wait([ended], _LEFT_S).done:
            if self._left.is_set():
                raise Interrupted
        ended.result()

    def leave(self) -> None:
        """Make no further call. One that has not ended raises Interrupted in the operation."""
        self._left.set()

    def end(self, _: object) -> None:
        """Let :meth:`serve` return: the operation has ended."""
        self._calls.put(None)


def _perform(op: Operation, body: Body, pending: Pending) -> None:
    """Run the operation; the whole of its thread."""
    if not pending.set_running_or_notify_cancel():
        return
    pending._begun.set()
    if op.under_way is not None:
        op.under_way.enter()
    try:
        try:
            with op:
                if op.job is not None:
                    body(op, op.job)
        finally:
            if op.job is not None:
                _publish(op)
    except BaseException as error:  # raised in the caller's thread by result()
        if op.under_way is not None:  # the program may have dropped the handle
            logger.error("%s(wait=False) has failed: %r", op.name, error)
        pending.set_exception(error)
        del pending  # the traceback holds this frame
    else:
        pending.set_result(op.report)


def _publish(op: Operation) -> None:
    try:
        op.in_caller(partial(publish, op.report))
    except Interrupted:
        publish(op.report)
