"""Run a blocking call in a thread of its own, so that the caller can wait with a bound.

Creating and destroying communicators, and even asking a store, can block in C++ for ever when a
peer is gone. The caller must stay able to abandon the call, to see that another rank failed, and
to handle signals, which Python does only while its main thread is not inside such a call.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar, cast

from ..c10d import devices

__all__ = ["Attempt", "Task", "Wait"]

logger = logging.getLogger("reloadpg")

T = TypeVar("T")

_LATE_S = 0.05
"""Seconds by which a pause may end late before that is not counted."""

_SIGNAL_S = 1.0
"""Seconds after which a wait lets Python handle a signal that another thread was given."""

_EXIT_S = 5.0
"""Seconds that the exit of the interpreter waits for threads that are still in a call."""


class _Running:
    """The threads of tasks that have not ended: the exit of the interpreter waits for them.

    Before Python 3.14 a daemon thread whose C++ call returns during the exit is unwound, which
    ends the process with SIGABRT.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._registered = False

    def add(self, thread: threading.Thread) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self._join)
        self._threads.add(thread)

    def discard(self, thread: threading.Thread) -> None:
        self._threads.discard(thread)

    def _join(self) -> None:
        end = time.monotonic() + _EXIT_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))


_running = _Running()


class Wait:
    """The bound of a wait: so many seconds without progress. Logs a wait that is long.

    Read and extended from several threads.

    Args:
        what: operation and phase, for messages.
        seconds: the bound.
    """

    FIRST_LOG_S = 10.0
    """The first message comes after so many seconds, the next ones after 2, 4, 8 times that."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        self.detail = ""
        self._started = time.monotonic()
        self._end = self._started + seconds
        self._next_log = self.FIRST_LOG_S

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds until the bound; not negative."""
        return max(0.0, self._end - time.monotonic())

    def extend(self) -> None:
        """Start the bound again: there was progress."""
        self._end = time.monotonic() + self.seconds

    def pause(self, seconds: float, sleep: Callable[[float], T]) -> T:
        """Let at most so many seconds of the wait pass, by ``sleep``; return what it returns.

        A process that was stopped, or that a loaded machine did not let run, has not waited: the
        bound moves by what the pause ends late.
        """
        seconds = min(seconds, self.left)
        begun = time.monotonic()
        try:
            return sleep(seconds)
        finally:
            late = time.monotonic() - begun - seconds
            if late > _LATE_S:
                self._end += late

    def log(self, detail: Callable[[], str]) -> None:
        """Log what is being waited for, if a message is due."""
        if self.waited >= self._next_log:
            self._next_log *= 2
            self.detail = detail()
            more = f"; {self.detail}" if self.detail else ""
            logger.warning("%s: waiting for %.0f s%s", self.what, self.waited, more)

    def log_end(self) -> None:
        """Log the length of a wait that was logged."""
        if self.waited >= self.FIRST_LOG_S:
            logger.info("%s: waited %.1f s", self.what, self.waited)


class Attempt:
    """Whether the result of some work is still wanted.

    Work that was abandoned may return much later; it commits its result within ``with attempt as
    wanted``, during which nobody can abandon it, and drops it if ``wanted`` is False.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    def abandon(self) -> None:
        """Stop wanting the result. Blocking while a commit is in progress."""
        with self._lock:
            self._abandoned = True

    def __enter__(self) -> bool:
        self._lock.acquire()
        return not self._abandoned

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class Task(Generic[T]):
    """A call in a thread, started at once.

    The thread works on the caller's current accelerator device, which is a per-thread setting,
    and with the caller's context variables. A task that nobody waits for any more goes on until
    its call returns.

    Args:
        function: what to call.
        name: of the thread.
        daemon: False lets the exit of the interpreter wait until the call has returned.
    """

    def __init__(self, function: Callable[[], T], name: str, *, daemon: bool = True) -> None:
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._device = devices.current_index()
        self._function: Callable[[], T] | None = partial(contextvars.copy_context().run, function)
        self._thread = threading.Thread(target=self._run, name=f"reloadpg-{name}", daemon=daemon)
        _running.add(self._thread)
        self._thread.start()

    def _run(self) -> None:
        function, self._function = self._function, None
        try:
            devices.use_index(self._device)
            self._result = cast("Callable[[], T]", function)()
        except BaseException as error:  # raised for the caller by result()
            self._error = error
        finally:
            del function  # the caller may rely on it: a task that has ended holds nothing
            self._ended.set()
            _running.discard(self._thread)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def is_current(self) -> bool:
        """Whether this is the thread that runs the call."""
        return self._thread is threading.current_thread()

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds; whether the call has ended.

        Signals are handled meanwhile, within a second also where the system gave one to another
        thread, as it does when the process was stopped: that does not wake the main thread.
        """
        end = time.monotonic() + seconds
        while not self._ended.wait(min(_SIGNAL_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True

    def result(self) -> T:
        """Return the result of a call that has ended, or raise what it raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result  # type: ignore[return-value]
