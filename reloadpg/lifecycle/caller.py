"""The thread that calls an operation, and waits for it while it runs in another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from ..errors import ReloadpgError
from ..threads import Interrupt

_SIGNAL_S = 1.0
"""A wait handles signals at least this often, in seconds, whichever thread they were given to."""

_LEFT_S = 0.1
"""Seconds after which a call for the caller looks whether the caller has left."""

_TAKEN_S = 60.0
"""Seconds within which the caller begins a call. It may be in a signal handler."""


class _Request:
    """A function that the caller is to call.

    It is claimed once: by the caller, or by the operation if that waits no more.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        return self._claimed.acquire(blocking=False)

    @property
    def is_claimed(self) -> bool:
        return self._claimed.locked()


class Caller(Interrupt):
    """The thread that has called an operation: it makes the operation's calls while it waits.

    If an error ends its wait, the operation is to end: :attr:`error`.

    Args:
        waits: whether it waits; otherwise calls are made in the operation's thread.

    Attributes:
        begun: whether the operation has begun.
        ended: whether it has ended, or has not begun and will not.
    """

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__()
        self.waits = waits
        self.begun = self.ended = False
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()

    # -- in the thread of the caller --------------------------------------------------------

    def wait(self) -> None:
        """Make the calls of the operation until it has ended; or wait until it has begun."""
        while not self.ended and (self.waits or not self.begun):
            with suppress(Empty):
                request = self._requests.get(timeout=_SIGNAL_S)
                if request is not None and request.claim():
                    try:
                        request.function()
                    except BaseException as error:  # raised in the operation, which ends
                        request.ended.put(error)
                    else:
                        request.ended.put(None)
                del request

    def await_end(self, end: float) -> None:
        """Wait until the operation has ended, without making its calls, or until this time."""
        while not self.ended and (left := end - time.monotonic()) > 0:
            with suppress(Empty):
                self._requests.get(timeout=min(_SIGNAL_S, left))

    # -- in the thread of the operation -----------------------------------------------------

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the caller's thread. Blocking.

        Raises:
            Interrupted: the caller waits no more.
            ReloadpgError: the caller does not respond.
        """
        if not self.waits:
            function()
            return
        request = _Request(function)
        self._requests.put(request)
        end = time.monotonic() + _TAKEN_S
        while True:
            self.check()
            with suppress(Empty):
                error = request.ended.get(timeout=_LEFT_S)
                break
            if not request.is_claimed and time.monotonic() > end and request.claim():
                raise ReloadpgError(
                    f"the thread that called the operation did not respond for {_TAKEN_S:g} s: it "
                    "is in a signal handler, or an interrupt has ended its wait"
                )
        if error is not None:
            raise error

    def begin(self) -> None:
        """Tell the caller that the operation has begun. Local, non-blocking."""
        self.begun = True
        self._requests.put(None)

    def end(self) -> None:
        """Tell the caller that the operation has ended. Local, non-blocking."""
        self.ended = True
        self._requests.put(None)
