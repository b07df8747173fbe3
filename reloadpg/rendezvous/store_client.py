"""A store client of this library's own, every question to which has a bound.

A store client of torch is locked while one of its waits lasts, and a server that is cut off leaves
a client waiting for ever. So the client that torch's own code uses is never asked; questions run
in a thread that can be abandoned; and an abandoned client is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import Store

from .. import c10d
from .worker_thread import Task, Wait

__all__ = ["GRACE_S", "Root", "StoreClient", "StoreLost", "StorePool", "StoreSilent"]

T = TypeVar("T")

Root = Callable[[], Store]
"""Finds the store that clients are cloned from: nothing here keeps the store of a job alive."""

GRACE_S = 1.5
"""Seconds past a bound that a rank, or the store, may take to answer."""


_PAUSE_S = 0.1
"""Seconds between two looks at the clock past a bound: see :meth:`Wait.pause`."""

_POOLED = 16384
"""Clients in the pools of all ranks of a job together, if it has no more ranks than that: the
store's server has a file descriptor for each, and 65,536 is a common limit."""


class StoreSilent(TimeoutError):  # noqa: N818 - never leaves this package
    """The store did not answer in time."""


class StoreLost(RuntimeError):  # noqa: N818 - likewise
    """The store has ended."""


class StoreClient:
    """A connection of its own to the store that another client is connected to.

    Args:
        root: finds a client of the store, which is cloned and never asked anything.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._connection = _Connection(root)

    def connect_ahead(self, first: Callable[[Store], T]) -> Task[T]:
        """Connect in the background, and ask a first question then; its error is dropped. Local.

        Connecting costs the server a look-up of the client's host name: with a name service that
        does not answer, 5 s in which it serves nobody (seen on torch 2.13 and 2.15).
        """
        connection = self._connection
        return Task(lambda: first(connection.store()), "connect")

    def ask(self, question: Callable[[Store], T], wait: Wait) -> T:
        """Ask the store something, in a thread. Blocking, bounded; handles signals meanwhile.

        Args:
            question: called with the store; raises nothing but what the store raises. It may wait
                until ``wait`` ends, and extend it.
            wait: the bound; the store has ``GRACE_S`` more to answer.

        Raises:
            StoreSilent: no answer in time.
            StoreLost: the store has ended.
        """
        connection = self._connection
        try:
            task = Task(lambda: question(connection.store()), "store")
            grace: Wait | None = None
            while not task.ended:
                if wait.left:  # possibly extended meanwhile
                    grace = None
                    task.wait(wait.left)
                elif grace is None:
                    grace = Wait(wait.what, GRACE_S)
                elif grace.left:
                    grace.pause(_PAUSE_S, task.wait)
                else:
                    raise StoreSilent
        except BaseException:
            self._connection = _Connection(self._root)  # the question may go on and hold it
            raise
        try:
            return task.result()
        except RuntimeError as error:
            self._connection = _Connection(self._root)
            raise StoreLost(str(error)) from error


class StorePool:
    """Store clients for threads that create groups: one each, shared with no other code.

    A creation that was abandoned holds its client for as long as it waits for its peers, and two
    creations on one client would wait for each other.

    Args:
        root: finds a client of the store, which is cloned and never asked anything.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._connections: dict[int, _Connection] = {}

    @staticmethod
    def clients_of_a_rank(size: int) -> int:
        """How many clients a rank of a job of so many ranks may have; at least 1. Pure."""
        return max(1, _POOLED // size)

    def get(self, index: int) -> Store:
        """Return the client of a thread. Blocking until it is connected, possibly for ever."""
        return self._connections.setdefault(index, _Connection(self._root)).store()

    def connect(self, count: int) -> None:
        """Connect the first clients now. Blocking, possibly for ever; idempotent."""
        for index in range(count):
            self.get(index)

    def connect_ahead(self) -> Task[Store]:
        """Connect the first client in the background. Local, at once."""
        return Task(lambda: self.get(0), "connect")

    def replaced(self) -> StorePool:
        """Return a pool with clients of its own: those of this one may be held for ever. Local."""
        return StorePool(self._root)


class _Connection:
    """One client of the store, connected when it is first needed."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._store: Store | None = None

    def store(self) -> Store:
        """Return the client. Blocking until it is connected, possibly for ever."""
        with self._lock:
            if self._store is None:
                self._store = c10d.clone_store(self._root())
            return self._store
