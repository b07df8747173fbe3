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
from typing import Literal, overload

from ..c10d import devices
from ..errors import PendingError, ReloadpgError
from ..reports import Report
from ..threads import Interrupted, Task, exiting
from .callbacks import publish
from .caller import Caller
from .job import Job
from .operation import Operation

logger = logging.getLogger("reloadpg")

Body = Callable[[Operation, Job], object]
"""The steps of an operation."""

_SIGNAL_S = 1.0
"""A wait handles signals at least this often, in seconds, whichever thread they were given to."""

_INTERRUPT_S = 15.0
"""Seconds that an interrupted caller waits for its operation to end, on all ranks."""

_SIGNALS = 5
"""Number of further interrupts that end this wait."""


class Pending(futures.Future[Report]):
    """The handle of an offload or a reload that was started with ``wait=False``.

    A :class:`concurrent.futures.Future` that can be awaited, too. The operation runs in a separate
    thread and ends within its timeouts, whatever happens to the handle; it cannot be cancelled. An
    interrupt of :meth:`result` ends only the wait, and the exit of the interpreter waits for the
    operation. Keep the handle, and call :meth:`result` before the groups are used: it raises the
    operation's error. That error is logged, too.

    Attributes:
        operation: ``offload`` or ``reload``.
    """

    def __init__(self, operation: str) -> None:
        # It holds neither the operation, nor with it the groups.
        super().__init__()
        self.operation = operation
        self._pid = os.getpid()
        self._claimed = threading.Lock()

    def _start(self, perform: Callable[[], object], caller: Caller) -> None:
        """Start the thread of the operation. Local; may be called again after an interrupt.

        If the system starts no thread, an operation that is to end does so in this one.
        """
        if exiting():
            raise ReloadpgError(
                f"{self.operation} was called while the interpreter exits, in an exit handler or a "
                "finalizer; nothing was changed. No thread can be started any more. Call it, and "
                "leave offloaded() blocks, before the program ends."
            )
        if self._claimed.locked():
            return
        try:
            Task(perform, self.operation, daemon=False)
        except ReloadpgError:
            if caller.error is None:
                raise
            perform()

    def _claim(self) -> bool:
        """Whether the calling thread is the first to perform the operation. Local."""
        return self._claimed.acquire(blocking=False)

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
        """Wait as :meth:`result`, and return the error of the operation, or None."""
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
        """Wait in a coroutine, as :meth:`result`."""
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
    after that or after a limited time. The operation begins and ends in its thread, which no signal
    interrupts: so it ends as all ranks know, however often this thread is interrupted.

    Args:
        op: the operation.
        body: its steps.
        wait: if False, return a handle, without a wait. Callbacks run in the operation's thread.
    """
    call = None
    try:
        call = _Call(op, body, wait)
        return call.wait()
    except BaseException as error:
        (call or _Call(op, body, wait)).leave(error)
        raise
    finally:
        del call  # the traceback holds this frame


class _Call:
    """A call of an operation, in the caller's thread."""

    def __init__(self, op: Operation, body: Body, wait: bool) -> None:
        self._op = op
        self._pending, self._caller = Pending(op.name), Caller(waits=wait)
        self._perform = partial(_perform, op, body, self._pending, self._caller)

    def wait(self) -> Report | Pending:
        """Wait until the operation has ended; if its caller does not wait, until it has begun."""
        if text := devices.difference():  # of this thread's current device
            self._op.record.warn(text)
        pending, caller = self._pending, self._caller
        caller.wait(self._start, caller.serve if caller.waits else caller.await_begin)
        return pending if caller.begun and not caller.waits else pending.result()

    def leave(self, error: BaseException) -> None:
        """Tell the operation to end for an error, and wait a limited time until it has ended."""
        end = time.monotonic() + _INTERRUPT_S
        for _ in range(_SIGNALS):
            try:
                self._caller.leave(error, self._start)
                self._caller.await_end(end)
                break
            except BaseException:
                continue

    def _start(self) -> None:
        self._pending._start(self._perform, self._caller)


def _perform(op: Operation, body: Body, pending: Pending, caller: Caller) -> None:
    """Run the operation; the whole of its thread."""
    if not pending._claim():
        return
    pending.set_running_or_notify_cancel()
    try:
        _run(op, body, caller)
    except BaseException as error:  # raised in the caller's thread by result()
        if not caller.waits and caller.begun:  # the program may have dropped the handle
            logger.error("%s(wait=False) has failed: %r", op.name, error)
        pending.set_exception(error)
        del pending  # the traceback holds this frame
    else:
        pending.set_result(op.report)
    finally:
        caller.end()


def _run(op: Operation, body: Body, caller: Caller) -> None:
    operation = op.begin(caller)
    try:
        with operation:
            caller.begin()
            if op.job is not None:
                body(op, op.job)
    finally:
        if op.job is not None:
            try:
                op.in_caller(partial(publish, op.report))
            except Interrupted:
                publish(op.report)
