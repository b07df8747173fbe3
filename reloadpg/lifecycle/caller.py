"""The thread that calls an operation, and waits for it while it runs in another one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

from ..errors import ReloadpgError
from ..threads import Deadline, Interrupt

Request: TypeAlias = "tuple[Callable[[], object], futures.Future[None]]"

_SIGNAL_S = 1.0
"""A wait handles signals at least this often, in seconds, whichever thread they were given to."""

_LEFT_S = 0.1
"""Seconds after which a call that the caller is to make looks whether the caller has left."""

_STARTS = 5
"""Attempts to start an operation that is to tell the other ranks of an interrupt. Each further
signal ends one of them."""

_TAKEN_S = 60.0
"""Seconds within which the caller begins a call. It may be in a signal handler."""


class Caller(Interrupt):
    """The thread that has called an operation: it makes the operation's calls while it waits.

    If an error ends its wait, the operation is to end: :attr:`error`.

    Args:
        waits: whether it waits; otherwise calls are made in the operation's thread.
    """

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__()
        self.waits = waits
        self._requests: SimpleQueue[Request | None] = SimpleQueue()

    def wait(self, start: Callable[[], object], until: Callable[[], object]) -> None:
        """Start an operation, and wait in ``until``. Blocking; in the thread of the caller.

        An error here, such as that of a signal handler, tells the operation to end.
        """
        try:
            start()
            until()
        except BaseException as error:
            # Python handles a further signal only in a call or a loop, so not before this line.
            self.error = error
            self.leave(error, start)
            raise

    def leave(self, error: BaseException, start: Callable[[], object]) -> None:
        """Tell the operation to end for an error. Local, non-blocking, idempotent.

        If it has not begun, it is started: only an operation that runs can tell the other ranks.
        """
        self.error = self.error or error
        for _ in range(_STARTS):
            try:
                self._wake.set()
                start()
                break
            except BaseException:
                continue

    def serve(self) -> None:
        """Make the calls of the operation until it has ended."""
        while True:
            with suppress(Empty):
                request = self._requests.get(timeout=_SIGNAL_S)
                if request is None:
                    return
                function, ended = request
                if ended.set_running_or_notify_cancel():
                    try:
                        function()
                    except BaseException as error:  # raised in the operation, which ends
                        ended.set_exception(error)
                    else:
                        ended.set_result(None)
                del request, function, ended

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the caller's thread; from that of the operation. Blocking.

        Raises:
            Interrupted: the caller waits no more.
            ReloadpgError: the caller does not respond.
        """
        if not self.waits:
            function()
            return
        ended: futures.Future[None] = futures.Future()
        self._requests.put((function, ended))
        taken = Deadline("call", _TAKEN_S)
        while not futures.wait([ended], _LEFT_S).done:
            self.check()
            if taken.left == 0 and ended.cancel():
                raise ReloadpgError(
                    f"the thread that called the operation did not respond for {_TAKEN_S:g} s: it "
                    "is in a signal handler, or an interrupt has ended its wait"
                )
        ended.result()

    def end(self) -> None:
        """Let :meth:`serve` return: the operation has ended."""
        self._requests.put(None)
