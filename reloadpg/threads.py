"""Run a blocking call in a separate thread, so that the caller can wait with a timeout.

If a peer has ended, a call that creates or destroys a communicator, or a request to a store, can
block in C++ indefinitely. The caller must be able to abandon the call, to notice the failure of
another rank, and to handle signals. Python handles none inside a C++ call in the main thread.

Every thread of the library is a :class:`LibraryThread`, and follows one rule at the end of the
process: the exit of the interpreter waits a limited time for it, and starts no further one.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

from .c10d import devices
from .errors import ReloadpgError
from .settings import GRACE, LOG_WAIT

logger = logging.getLogger("reloadpg")

T = TypeVar("T")

_SECONDS = {GRACE: 1.5, LOG_WAIT: 10.0}

_LATE_S = 0.05
"""Delay of a pause, in seconds, from which it extends the deadline."""

_SIGNAL_S = 1.0
"""Seconds between wake-ups of a wait, to handle signals delivered to another thread."""

_EXIT_S = 5.0
"""Seconds that the exit of the interpreter waits for running threads."""

_BEGIN_S = 0.5
"""Seconds within which a started thread begins to run."""


def wait_seconds(variable: str) -> float:
    """Read a number of seconds from the environment; the default if it is unset or invalid."""
    with suppress(ValueError):
        return float(os.environ.get(variable) or _SECONDS[variable])
    return _SECONDS[variable]


class _Exit:
    """The exit of this interpreter."""

    def __init__(self) -> None:
        self.begun = False
        self.renew()

    def renew(self) -> None:
        """Replace the lock: in a forked child it may be held by a thread of the parent."""
        self.lock = threading.RLock()  # reentrant: a signal handler may start a thread, too

    def begin(self) -> None:
        """Start no further thread, and wait a limited time for running ones.

        Called after the exit handlers that were registered later, while threads still run. Before
        Python 3.14, a thread whose C++ call returns after that is unwound, which ends the process
        with SIGABRT.
        """
        with self.lock:  # no thread is about to start, which could not be joined
            self.begun = True
        threads = [thread for thread in threading.enumerate() if isinstance(thread, LibraryThread)]
        for thread in threads:
            thread.dismiss()
        self._join(threads, _EXIT_S)
        # A request that gets its response a moment later would end the process with SIGABRT.
        for thread in threads:
            if thread.is_alive():
                thread.interrupt()
        self._join(threads, 1.0)

    @staticmethod
    def _join(threads: list[LibraryThread], seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in threads:
            # An interrupt in `start` can leave a thread that never begins, which cannot be joined.
            if thread is not threading.current_thread() and thread.has_begun(end):
                thread.join(max(0.0, end - time.monotonic()))


_exit = _Exit()
atexit.register(_exit.begin)
os.register_at_fork(after_in_child=_exit.renew)


def exiting() -> bool:
    """Whether the interpreter exits, and no thread is started any more. Local."""
    return _exit.begun or sys.is_finalizing()


class LibraryThread(threading.Thread):
    """A thread of this library: the exit of the interpreter waits a limited time for it."""

    def dismiss(self) -> None:
        """End after the current call, if it waits for further ones. Local, non-blocking."""

    def interrupt(self) -> None:
        """Make the current call return, if that is known how. Local, non-blocking."""

    def has_begun(self, end: float) -> bool:
        """Whether the thread has begun; waits a limited time, at most until ``end``. Local."""
        end = min(end, time.monotonic() + _BEGIN_S)
        while self.ident is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.ident is not None

    def start(self) -> None:
        """Start it.

        Raises:
            ReloadpgError: the interpreter exits, or the system starts no thread. Before Python
                3.12, a thread that is started in the finalization never begins, and ``start`` of
                :class:`threading.Thread` waits for it indefinitely.
        """
        with _exit.lock:
            if exiting():
                raise ReloadpgError(
                    f"the thread {self.name} was not started: the interpreter exits. End all "
                    "operations and leave all blocks before the program ends."
                )
            try:
                super().start()
            except RuntimeError as error:
                raise ReloadpgError(
                    f"cannot start a thread ({self.name}): {error}. See the limits of this "
                    "process for threads and memory (ulimit -a, pids.max)."
                ) from error


class Deadline:
    """A deadline: a number of seconds without progress. Logs long waits. Thread-safe.

    Args:
        operation: its name, for messages.
        seconds: the timeout.
        phase: the phase of the operation, for messages.

    Attributes:
        first_log_s: seconds before the first message.
    """

    def __init__(self, operation: str, seconds: float, phase: str = "") -> None:
        self.operation = operation
        self.seconds = seconds
        self.phase = phase
        self._started = time.monotonic()
        self._end = self._started + seconds
        self._next_log = self.first_log_s = wait_seconds(LOG_WAIT)

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds until the deadline; not negative."""
        return max(0.0, self._end - time.monotonic())

    def extend(self) -> None:
        """Restart the timeout after progress."""
        self._end = time.monotonic() + self.seconds

    @contextmanager
    def pause(self, seconds: float) -> Iterator[float]:
        """Sleep in this block, for the yielded number of seconds: at most the rest of the wait.

        The time in which the process was stopped or not scheduled does not count: the deadline is
        extended by the delay of the pause.
        """
        seconds = min(seconds, self.left)
        begun = time.monotonic()
        try:
            yield seconds
        finally:
            late = time.monotonic() - begun - seconds
            if late > _LATE_S:
                self._end += late

    def log(self, detail: Callable[[], str] = str) -> None:
        """Log the reason of the wait, if a message is due."""
        if self.waited >= self._next_log:
            self._next_log *= 2
            text = detail()
            more = f"; {text}" if text else " for other ranks; see `reloadpg status`"
            logger.warning("%s: waiting for %.0f s%s", self._what, self.waited, more)

    def log_end(self) -> None:
        """Log the length of the wait, if the wait was logged."""
        if self.waited >= self.first_log_s:
            logger.info("%s: waited %.1f s", self._what, self.waited)

    @property
    def _what(self) -> str:
        return f"{self.operation}, phase {self.phase}" if self.phase else self.operation


class Interrupted(Exception):  # noqa: N818 - never leaves this package
    """The caller of an operation has told it to end."""


class Interrupt:
    """Whether the caller of an operation has told it to end, and for which error. Thread-safe.

    Signals interrupt the caller. A signal within an Event or a Future of Python can leave its lock
    locked indefinitely, so what the caller shares with the operation is a SimpleQueue, in C.

    Attributes:
        error: the error in the caller; None before that.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._wake: SimpleQueue[None] = SimpleQueue()

    def tell(self, error: BaseException) -> None:
        """Tell the operation to end. Local, non-blocking, idempotent."""
        self.error = self.error or error
        self._wake.put(None)

    def check(self) -> None:
        """Raise Interrupted if the operation is to end."""
        if self.error is not None:
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Sleep for this time, or until the operation is to end."""
        if self.error is None:
            with suppress(Empty):
                self._wake.get(timeout=seconds)


class CancelToken:
    """A cancellation token: whether the result of some work is still wanted.

    Cancelled work may return much later. It commits its result within ``with token as wanted``,
    during which it cannot be cancelled, and drops the result if ``wanted`` is False.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the work. Blocks while a commit is in progress."""
        with self._lock:
            self._cancelled = True

    def __enter__(self) -> bool:
        self._lock.acquire()
        return not self._cancelled

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Task(LibraryThread, Generic[T]):
    """A call in a new thread, started immediately.

    In the thread this rank's accelerator device is current, whichever is in the caller's, and it
    has the caller's context variables. An abandoned task runs until its call returns.

    Args:
        function: the function to call.
        name: name of the thread.
        daemon: if False, the exit of the interpreter waits until the call has returned.
    """

    def __init__(
        self,
        function: Callable[[], T],
        name: str,
        *,
        daemon: bool = True,
    ) -> None:
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._device = devices.index_of_rank()
        self._function: Callable[[], T] | None = partial(contextvars.copy_context().run, function)
        super().__init__(name=f"reloadpg-{name}", daemon=daemon)
        self.start()

    def run(self) -> None:
        function, self._function = self._function, None
        try:
            devices.use_index(self._device)
            self._result = cast("Callable[[], T]", function)()
        except BaseException as error:  # raised by result()
            self._error = error
        finally:
            del function  # an ended task holds no references
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for at most this many seconds; return whether the call has ended.

        Signals are handled during the wait. A signal that the system delivers to another thread,
        for example after the process was stopped, is handled within a second.
        """
        end = time.monotonic() + seconds
        while not self._ended.wait(min(_SIGNAL_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True

    def result(self) -> T:
        """Return the result of a call that has ended, or raise its exception."""
        if self._error is not None:  # its traceback holds references
            error, self._error = self._error, RuntimeError(str(self._error))
            raise error
        return self._result  # type: ignore[return-value]
