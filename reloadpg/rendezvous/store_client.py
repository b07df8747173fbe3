"""A store client of this library's own, each question to which has a timeout.

A store client of torch is locked while one of its waits lasts, and a server that is cut off leaves
a client waiting indefinitely. So the client that torch's own code uses is never asked; questions
run in a thread that can be abandoned; and an abandoned client is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from .. import c10d
from .protocol import Absent, Add, Await, Command, Delete, Pause, Read, ReadAll, Set, Swap
from .worker_thread import Task, Wait

__all__ = [
    "GRACE_S",
    "PeerDied",
    "Root",
    "StoreClient",
    "StoreLost",
    "StorePool",
    "StoreSilent",
    "absent",
    "perform",
    "read",
]

T = TypeVar("T")

Root = Callable[[], Store]
"""Finds the store that clients are cloned from: nothing here keeps the store of a job alive."""

GRACE_S = 1.5
"""Seconds past a timeout that a rank, or the store, may take to answer."""

_LOOK_S = 1.0
"""Seconds between two looks at the processes of this host."""

_PAUSE_S = 0.1
"""Seconds between two looks at the clock past a timeout: see :meth:`Wait.pause`."""

_BRIEF_S = 0.5
"""Seconds that a brief wait for a key lasts."""

_POOLED = 16384
"""Clients in the pools of all ranks of a job together, if it has no more ranks than that: the
store's server has a file descriptor for each, and 65,536 is a common limit."""

_NOTHING = "-"
"""What no key holds. A compare-and-set with it reads a key in one request and changes nothing:
``check`` and ``get`` together are three."""


class PeerDied(RuntimeError):  # noqa: N818 - never leaves this package
    """A process on this host has ended while this rank waited for it."""


class StoreSilent(TimeoutError):  # noqa: N818 - likewise
    """The store did not answer in time."""


class StoreLost(RuntimeError):  # noqa: N818 - likewise
    """The store has ended."""


def read(store: Store, key: str) -> str | None:
    """The value of a key; None if there is no such key. One request."""
    value = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if value == _NOTHING else value


def absent(store: Store, stem: str, ranks: Sequence[int]) -> list[int]:
    """The ranks without a key ``stem/rank``, found with few requests when they are few."""
    if not ranks or store.check([f"{stem}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return absent(store, stem, ranks[:half]) + absent(store, stem, ranks[half:])


def perform(
    store: Store,
    command: Command,
    wait: Wait,
    pause_s: float,
    detail: Callable[[Store], str] | None = None,
) -> Any:
    """Perform a command of the protocol, and return the reply. Blocking.

    Args:
        store: the store.
        command: the command.
        wait: the timeout, which a command may start again.
        pause_s: length of a pause.
        detail: says what is waited for, in a wait that is long; None to say nothing.
    """
    match command:
        case Add(key, amount):
            return store.add(key, amount)
        case Read(key):
            return read(store, key)
        case ReadAll(stem, ranks):
            return tuple(read(store, f"{stem}/{rank}") or "" for rank in ranks)
        case Set(key, value):
            return store.set(key, value)
        case Swap(key, expected, value):
            return store.compare_set(key, expected, value).decode()
        case Absent(stem, ranks):
            return tuple(absent(store, stem, ranks))
        case Delete(key):
            with suppress(NotImplementedError):
                store.delete_key(key)
        case Await(key, brief):
            # Torch writes two warnings to stderr for each of its waits that ends without the key,
            # so one such wait is made, which wakes at once; a long one goes on by polling.
            first = min(_BRIEF_S if brief else wait.FIRST_LOG_S, wait.left / 2)
            # Torch's wait can return without the key, too, when several clients give up at a time
            # (seen on 2.13). So what it says is ignored; the next request finds a lost store.
            with suppress(RuntimeError):
                wait.pause(first, lambda s: store.wait([key], timedelta(seconds=max(0.01, s))))
        case Pause(restart, sleeps):
            if restart:
                wait.extend()
            if sleeps:
                if detail is not None:
                    wait.log(partial(detail, store))
                wait.pause(pause_s, time.sleep)
            return wait.left > 0
    return None


class StoreClient:
    """A connection of its own to the store that another client is connected to.

    Args:
        root: finds a client of the store, which is cloned and never asked anything.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._connection: _Connection | None = None

    def connect(self) -> _Connection:
        """Connect in the background, if it is not done. Local, at once.

        Connecting costs the server a look-up of the client's host name: with a name service that
        does not answer, 5 s in which it serves no client (seen on torch 2.13 and 2.15).
        """
        connection = self._connection
        if connection is None:
            connection = self._connection = _Connection(self._root)
        return connection

    def ask(
        self, question: Callable[[Store], T], wait: Wait, died: Callable[[], object] | None = None
    ) -> T:
        """Ask the store something, in a thread. Blocking, bounded; signals are handled.

        Args:
            question: called with the store; raises nothing but what the store raises. It may wait
                until ``wait`` ends, and extend it.
            wait: the timeout; the store has ``GRACE_S`` more to answer.
            died: asked every second whether to give up.

        Raises:
            StoreSilent: no answer in time.
            PeerDied: ``died`` says so.
            StoreLost: the store has ended.
        """
        connection = self.connect()
        try:
            task = Task(lambda: question(connection.store()), "store")
            grace: Wait | None = None
            while not task.ended:
                if wait.left:  # possibly extended since
                    grace = None
                    if died is None:
                        task.wait(wait.left)
                    elif not task.wait(min(wait.left, _LOOK_S)) and died():
                        raise PeerDied
                elif grace is None:
                    grace = Wait(wait.what, GRACE_S)
                elif grace.left:
                    grace.pause(_PAUSE_S, task.wait)
                else:
                    raise StoreSilent
        except BaseException:
            self._connection = None  # the question may go on and hold it
            raise
        try:
            return task.result()
        except RuntimeError as error:
            self._connection = None
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
        """Return the client of a thread. Blocking until it is connected, without a timeout."""
        connection = self._connections.get(index)
        if connection is None:
            connection = self._connections[index] = _Connection(self._root)
        return connection.store()

    def connect(self, count: int) -> None:
        """Connect the first clients now. Blocking, without a timeout; idempotent."""
        for index in range(count):
            self.get(index)

    def connect_ahead(self) -> Task[Any]:
        """Connect the first client in the background. Local, at once."""
        connection = self._connections[0] = _Connection(self._root)
        return connection.task

    def replaced(self) -> StorePool:
        """Return a pool with new clients: those of this one may be held indefinitely. Local."""
        return StorePool(self._root)


class _Connection:
    """One client of the store, connected in a separate thread: no caller holds a lock for it."""

    def __init__(self, root: Root) -> None:
        self._error: RuntimeError | None = None
        self.task: Task[Store | None] = Task(lambda: self._connect(root), "connect")

    def _connect(self, root: Root) -> Store | None:
        try:
            return c10d.clone_store(root())
        except RuntimeError as error:  # raised for each caller
            self._error = error
            return None

    def store(self) -> Store:
        """Return the client. Blocking until it is connected, without a timeout.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        self.task.wait(threading.TIMEOUT_MAX)
        store = self.task.result()
        if store is None:
            raise RuntimeError(f"no connection: {self._error}") from self._error
        return store
