"""This rank's own line to the rendezvous store: every question to it has a bound.

A store client of torch is locked for as long as one of its waits lasts, and a server that is cut
off leaves a client waiting for ever. So the library never asks the client that torch's own code
uses; it asks from a thread that can be given up; and it takes a new client after giving one up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import Store

from . import c10d
from .errors import ReloadpgError, RendezvousTimeoutError
from .supervised import Task

__all__ = ["Connection"]

T = TypeVar("T")


class Connection:
    """A connection of its own to the store that another client is connected to.

    Args:
        root: a client of the store; it is copied and never asked anything.
    """

    def __init__(self, root: Store) -> None:
        self._root = root
        self._line = _Line(root)

    def connect_ahead(self, first: Callable[[Store], object]) -> None:
        """Connect in the background, so that the first question need not. Local, at once.

        What the store is asked ``first`` is asked then, too; its error stays unheard.

        Connecting costs the server a look-up of the client's host name; with a name service that
        does not answer, 5 s in which it serves nobody (seen on torch 2.13 and 2.15).
        """
        line = self._line
        Task(lambda _: first(line.store()), "connect")

    def ask(self, question: Callable[[Store], T], seconds: float, purpose: str) -> T:
        """Ask the store something, in a thread. Blocking, bounded; takes signals meanwhile.

        The first question, and the first one after a question that was given up, connects.

        Args:
            question: called with the store; raises nothing but what the store raises.
            seconds: how long to wait for the answer.
            purpose: what it is asked for, for messages.

        Raises:
            RendezvousTimeoutError: no answer in time.
            ReloadpgError: the store has ended.
        """
        line = self._line
        try:
            task = Task(lambda _: question(line.store()), "store")
            if not task.wait(seconds):
                raise RendezvousTimeoutError(
                    f"{purpose}: the rendezvous store did not answer within {seconds:g} s. Its "
                    "server, usually in rank 0's process or the launcher's agent, is gone or cut "
                    "off: restart the job.",
                    seconds=seconds,
                )
        except BaseException:
            self._line = _Line(self._root)  # the question may go on and hold the client
            raise
        try:
            return task.result()
        except RuntimeError as error:
            self._line = _Line(self._root)
            raise ReloadpgError(
                f"{purpose}: the rendezvous store is lost: {error}. Its server, usually in rank "
                "0's process or the launcher's agent, has ended: restart the job."
            ) from error


class _Line:
    """One client of the store, connected when it is first needed."""

    def __init__(self, root: Store) -> None:
        self._root = root
        self._connecting = threading.Lock()
        self._store: Store | None = None

    def store(self) -> Store:
        """The client. Blocking until it is connected, or for good."""
        with self._connecting:
            if self._store is None:
                self._store = c10d.clone_store(self._root)
            return self._store
