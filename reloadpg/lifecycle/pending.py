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

from ..c10d import devices
from ..errors import PendingError, ReloadpgError
from ..groups.registry import registry
from ..reports import Report
from ..settings import IS_OFF
from ..threads import Interrupted, Task, exiting
from .callbacks import publish
from .caller import Caller
from .kinds import Kind
from .operation import Operation

logger = logging.getLogger("reloadpg")

Steps = Callable[[Operation], object]
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


class Call:
    """One call of an operation. It runs in a thread, and its callbacks in the caller's.

    An error in the caller's thread, such as KeyboardInterrupt, tells the operation to end. The
    operation begins and ends in its thread, which no signal interrupts: so it ends as all ranks
    know, however often the caller is interrupted.

    Args:
        kind: offload, reload or recover.
        steps: its steps.
        named: the sets named in the call; empty for all.
        seconds: the timeout of the wait for ranks that have not made the call; None for the
            installation's.
        wait: whether the caller waits; otherwise callbacks run in the operation's thread.
    """

    def __init__(
        self,
        kind: Kind,
        steps: Steps,
        named: frozenset[str] = frozenset(),
        seconds: float | None = None,
        *,
        wait: bool = True,
    ) -> None:
        self._kind, self._steps, self._named, self._seconds = kind, steps, named, seconds
        self._caller, self._pending = Caller(waits=wait), Pending(kind.name)
        self._claimed = threading.Lock()
        self._warning = ""
        self._operation: Operation | None = None

    @property
    def committed(self) -> bool:
        """Whether all ranks have passed the last barrier."""
        return self._operation is not None and self._operation.committed

    # -- in the caller's thread -----------------------------------------------------------------

    def run(self) -> Pending:
        """Wait until the operation has ended, or has begun if the caller does not wait.

        An error here is raised when the operation has ended for it, or after a limited time.

        Returns:
            The handle.

        Raises:
            ReloadpgError: it was refused.
        """
        caller = self._caller
        try:
            self._warning = devices.difference()  # of this thread's current device
            self._start()
            caller.wait()
            if not caller.begun:
                self._pending.result()
            return self._pending
        except BaseException as error:
            # Python handles a further signal only in a call or a loop, so not before this line.
            caller.error = error
            self._leave(error, time.monotonic() + _INTERRUPT_S)
            raise

    def _leave(self, error: BaseException, end: float) -> None:
        """Tell the operation to end for an error, and wait until it has ended, or until this time.

        If it has not begun, it is started: only an operation that runs can tell the other ranks.
        """
        for _ in range(_SIGNALS):
            try:
                self._caller.tell(error)
                self._start()
                self._caller.await_end(end)
                break
            except BaseException:
                continue

    def _start(self) -> None:
        """Start the thread of the operation. Local; may be called again after an interrupt.

        If the system starts no thread, an operation that is to end does so in this one.
        """
        if self._claimed.locked():
            return
        if exiting():
            raise ReloadpgError(
                f"{self._kind.name} was called while the interpreter exits, in an exit handler or "
                "a finalizer; nothing was changed. No thread can be started any more. Call it, and "
                "leave offloaded() blocks, before the program ends."
            )
        try:
            Task(self._perform, self._kind.name, daemon=False)
        except ReloadpgError:
            if self._caller.error is None:
                raise
            self._perform()

    # -- in the operation's thread --------------------------------------------------------------

    def _perform(self) -> None:
        """Run the operation; the whole of its thread. Only the first call does."""
        if not self._claimed.acquire(blocking=False):
            return
        pending, caller = self._pending, self._caller
        pending.set_running_or_notify_cancel()
        try:
            report = self._run()
        except BaseException as error:  # raised in the caller's thread by result()
            if not caller.waits and caller.begun:  # the program may have dropped the handle
                logger.error("%s(wait=False) has failed: %r", self._kind.name, error)
            pending.set_exception(error)
            del pending  # the traceback holds this frame
        else:
            pending.set_result(report)
        finally:
            caller.end()

    def _run(self) -> Report:
        caller, kind = self._caller, self._kind
        self._operation = op = Operation.begin(kind, self._named, caller, self._seconds)
        if op is None:
            caller.begin()
            note = IS_OFF if registry.off else "torch.distributed is not initialized"
            return Report(operation=kind.name, changed=False, generation=0, note=note)
        if self._warning:
            op.record.warn(self._warning)
        try:
            with op:
                op.reserve()
                caller.begin()
                self._steps(op)
        finally:
            try:
                op.in_caller(partial(publish, op.report))
            except Interrupted:
                publish(op.report)
        return op.report
