"""Run one blocking piece of work beside the calling thread, which waits with a bound.

Creating, destroying and even asking a store can block in C++ for ever when a peer is gone. The
caller must stay able to give up, to hear that another rank failed, and to take signals, which
Python handles only while its main thread is not inside such a call.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from . import devices

__all__ = ["Attempt", "Task"]

T = TypeVar("T")

_EXIT_S = 2.0
"""How long the end of the interpreter waits for threads that are still in a call."""


class _Running:
    """The threads of tasks that have not ended, for the end of the interpreter.

    A daemon thread whose C++ call returns while the interpreter is being taken down cannot go
    back to Python. Before Python 3.14 it is unwound instead, which ends the process with
    "terminate called without an active exception" and SIGABRT, whatever its exit code was.
    """

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._registered = False

    def add(self, thread: threading.Thread) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self._at_exit)
        self._threads.add(thread)

    def discard(self, thread: threading.Thread) -> None:
        self._threads.discard(thread)

    def _at_exit(self) -> None:
        end = time.monotonic() + _EXIT_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))
        if sys.version_info < (3, 14) and any(thread.is_alive() for thread in self._threads):
            _let_unwound_threads_hang()


def _let_unwound_threads_hang() -> None:
    """What Python does itself from 3.14 on: a thread that comes back too late stays where it is."""
    try:
        libc, libstdcxx = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
        libstdcxx._ZSt13set_terminatePFvvE(ctypes.cast(libc.pause, ctypes.c_void_p))
    except (OSError, AttributeError):
        return  # another C++ runtime: its exit code is then its own


_running = _Running()


class Attempt:
    """Whether the result of a piece of work is still wanted; settled under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    def abandon(self) -> None:
        """Give the work up: from now on :meth:`commit` says False."""
        with self._lock:
            self._abandoned = True

    @contextmanager
    def commit(self) -> Iterator[bool]:
        """Hold off a change of mind while a result is put in place; whether it is wanted."""
        with self._lock:
            yield not self._abandoned


class Task(Generic[T]):
    """A call in a daemon thread of its own, started at once.

    The thread works on the caller's current accelerator device, which is a per-thread setting.
    A task that is given up goes on until its C++ call returns; ``attempt`` tells it so.
    """

    def __init__(
        self, function: Callable[[Attempt], T], name: str, attempt: Attempt | None = None
    ) -> None:
        self.attempt = attempt or Attempt()
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._device = devices.current_index()
        # Given to the thread alone, which lets go of it: a task that has ended holds nothing.
        self._thread = threading.Thread(
            target=self._run, args=(function,), name=f"reloadpg-{name}", daemon=True
        )
        _running.add(self._thread)
        self._thread.start()

    def _run(self, function: Callable[[Attempt], T]) -> None:
        try:
            devices.use_index(self._device)
            self._result = function(self.attempt)
        except BaseException as error:  # handed to the caller by result()
            self._error = error
        finally:
            self._done.set()
            _running.discard(self._thread)

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds; whether the work has ended."""
        return self._done.wait(max(0.0, seconds))

    def result(self) -> T:
        """The result of work that has ended; raises what it raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result  # type: ignore[return-value]
