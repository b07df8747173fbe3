"""A separate store client with a timeout for each request.

A store client of torch is locked during each of its waits, and an unreachable server blocks a
client indefinitely. So the client that torch uses is never used here; requests run in a thread that
can be abandoned; and an abandoned client is replaced.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

from torch.distributed import HashStore, Store

from .. import c10d
from ..errors import ReloadpgError
from . import protocol
from .peers import Peers
from .worker_thread import SpareThread, Task, Wait

T = TypeVar("T")

Root = Callable[[], Store]
"""Returns the store that clients are cloned from. No reference to the job's store is kept."""

_GRACE_S = 1.5
"""Seconds after a timeout within which the store may still respond."""

_LOOK_S = 1.0
"""Seconds between two checks of the processes on this host."""

_PAUSE_S = 0.1
"""Seconds between two checks of the clock after a timeout: see :meth:`Wait.pause`."""

_BRIEF_S = 0.5
"""Seconds that a brief wait for a key lasts."""

_POOLED = 16384
"""Maximum number of pooled clients over all ranks of a job (or one per rank, if it has more ranks).
The store's server has a file descriptor for each, and 65,536 is a common limit."""

_NOTHING = "-"
"""A value that no key holds. A compare-and-set with it reads a key in one request and changes
nothing; ``check`` and ``get`` together take three."""


class PeerDied(RuntimeError):  # noqa: N818 - never leaves this package
    """A process on this host has ended while this rank waited for it."""


class StoreSilent(TimeoutError):  # noqa: N818 - likewise
    """The store did not respond in time."""


class StoreLost(RuntimeError):  # noqa: N818 - likewise
    """The store has ended."""


def read(store: Store, key: str) -> str | None:
    """The value of a key; None if there is no such key. One request."""
    value = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if value == _NOTHING else value


def absent(store: Store, stem: str, ranks: Sequence[int], most: int | None = None) -> list[int]:
    """The ranks without a key ``stem/rank``; if ``most`` is given, the first of them.

    Takes few requests if there are few such ranks, or few are wanted.
    """
    if not ranks or store.check([f"{stem}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    missing = absent(store, stem, ranks[:half], most)
    if most is None:
        return missing + absent(store, stem, ranks[half:])
    return (
        missing
        if len(missing) >= most
        else missing + absent(store, stem, ranks[half:], most - len(missing))
    )


def execute(
    store: Store,
    command: protocol.Command,
    wait: Wait,
    pause_s: float,
    peers: Peers,
    detail: Callable[[Store], str] | None = None,
) -> Any:
    """Execute a command of the protocol, and return the reply. Blocking.

    Args:
        store: the store.
        command: the command.
        wait: the deadline, which a command may restart.
        pause_s: length of a pause.
        peers: the ranks of this host.
        detail: returns a text for the log of a long wait; None to log none.
    """
    match command:
        case protocol.Add(key, amount):
            return store.add(key, amount)
        case protocol.Read(key):
            return read(store, key)
        case protocol.ReadAll(stem, ranks):
            return tuple(read(store, f"{stem}/{rank}") or "" for rank in ranks)
        case protocol.Set(key, value):
            return store.set(key, value)
        case protocol.Swap(key, expected, value):
            return store.compare_set(key, expected, value).decode()
        case protocol.Absent(stem, ranks):
            return tuple(absent(store, stem, ranks))
        case protocol.Delete(key):
            with suppress(NotImplementedError):
                store.delete_key(key)
        case protocol.Await(key, brief):
            # Torch writes two warnings to stderr for each wait that times out, so there is only one
            # such wait, which returns as soon as the key exists. A long wait continues by polling.
            first = min(_BRIEF_S if brief else wait.first_log_s, wait.left / 2)
            # Torch's wait can also return without the key if several clients time out at once (seen
            # on 2.13), so its result is ignored. The next request finds out if the store is lost.
            with suppress(RuntimeError), wait.pause(first) as seconds:
                store.wait([key], timedelta(seconds=max(0.01, seconds)))
        case protocol.Pause(restart, sleeps):
            if restart:
                wait.extend()
            if sleeps:
                if detail is not None:
                    wait.log(partial(detail, store))
                with wait.pause(pause_s) as seconds:
                    time.sleep(seconds)
            return wait.left > 0
        case protocol.Publish(key):
            with suppress(NotImplementedError):
                cast(Any, store).append(key, peers.entry())
        case protocol.Meet(key):
            return peers.meet(read(store, key) or "")
    return None


class StoreClient:
    """A separate connection to the store of another client.

    Args:
        root: returns a client of the store, which is cloned and not used otherwise; None for a
            store of this process alone.
        prepare: called with the client of a new connection, before it is used.
    """

    def __init__(
        self, root: Root | None, prepare: Callable[[Store], object] = lambda store: None
    ) -> None:
        self._root = root
        self._prepare = prepare
        self._own = HashStore()
        self._connection: Task[Store] | None = None
        self._spare: SpareThread | None = None

    def reserve(self) -> None:
        """Start a thread in advance, which sends requests if no other one can be started. Local."""
        if self._root is not None and (self._spare is None or not self._spare.is_idle):
            with suppress(ReloadpgError):
                self._spare = SpareThread()
                weakref.finalize(self, self._spare.dismiss)

    def connect(self) -> Task[Store]:
        """Connect in the background, if not yet connected. Local, non-blocking. Idempotent.

        For each connection the server looks up the client's host name. If DNS does not respond,
        the server serves no client for 5 s (seen on torch 2.13 and 2.15).
        """
        connection = self._connection
        if connection is None:
            connection = self._connection = Task(self._connect, "connect", spare=self._spare)
        return connection

    def _connect(self) -> Store:
        store = self._own if self._root is None else c10d.clone_store(self._root())
        self._prepare(store)
        return store

    def ask(
        self, question: Callable[[Store], T], wait: Wait, died: Callable[[], object] | None = None
    ) -> T:
        """Send requests to the store from a thread. Blocking, with a timeout; handles signals.

        Args:
            question: called with the store; raises only what the store raises. It may block until
                ``wait`` ends, and extend it.
            wait: the deadline; the store has ``_GRACE_S`` more to respond.
            died: called every second; if it returns True, the request is abandoned.

        Raises:
            StoreSilent: no response in time.
            PeerDied: ``died`` returned True.
            StoreLost: the store has ended.
        """
        if self._root is None:
            return question(self._connect())
        connection = self.connect()
        self._connection = None  # an abandoned request, after any interrupt, may hold its lock
        try:
            _await(connection, wait, died)
            store = connection.result()
            interrupt = partial(c10d.shut_store_connections, store)
            task = Task(partial(question, store), "store", spare=self._spare, interrupt=interrupt)
            _await(task, wait, died)
            result = task.result()
        except (PeerDied, ReloadpgError):  # the latter: no thread could be started
            raise
        except RuntimeError as error:
            raise StoreLost(str(error)) from error
        self._connection = connection
        return result


def _await(task: Task[Any], wait: Wait, died: Callable[[], object] | None) -> None:
    """Wait until a request has ended; see :meth:`StoreClient.ask`."""
    grace: Wait | None = None
    while not task.ended:
        if wait.left:  # it may have been extended
            grace = None
            if died is None:
                with wait.pause(_LOOK_S) as seconds:
                    task.wait(seconds)
            elif not task.wait(min(wait.left, _LOOK_S)) and died():
                raise PeerDied
        elif grace is None:
            grace = Wait(wait.operation, _GRACE_S)
        elif grace.left:
            with grace.pause(_PAUSE_S) as seconds:
                task.wait(seconds)
        else:
            raise StoreSilent


class StorePool:
    """Store clients for threads that create groups: a separate one for each thread.

    An abandoned creation holds its client while it waits for its peers, and two creations on one
    client would wait for each other.

    Args:
        root: returns a client of the store, which is cloned and not used otherwise.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._connections: dict[int, Task[Store]] = {}
        self._ended = False

    @staticmethod
    def clients_of_a_rank(size: int) -> int:
        """Maximum number of clients per rank in a job of ``size`` ranks; at least 1."""
        return max(1, _POOLED // size)

    def get(self, index: int) -> Store:
        """Return the client of a thread. Blocking until it is connected, without a timeout."""
        connection = self._connect(index)
        connection.wait(threading.TIMEOUT_MAX)
        try:
            return connection.result()
        except RuntimeError:
            self._connections.pop(index, None)
            raise

    def connect(self, count: int) -> None:
        """Connect the first clients, all at once. Blocking, without a timeout; idempotent."""
        for index in range(count):
            self._connect(index)
        for index in range(count):
            self.get(index)

    def connect_ahead(self, count: int) -> list[Task[None]]:
        """Connect the first clients in the background, one after the other. Local, non-blocking.

        It stops at :meth:`end` and when the interpreter exits, with at most one connection in
        progress. Returns the task, if there is a client to connect.
        """

        def connect() -> None:
            for index in range(count):
                if self._ended:
                    return
                self._connect(index).wait(threading.TIMEOUT_MAX)

        missing = any(index not in self._connections for index in range(count))
        return [Task(connect, "connect")] if missing else []

    def end(self) -> None:
        """Connect no further clients in the background. Local, non-blocking; idempotent."""
        self._ended = True

    def _connect(self, index: int) -> Task[Store]:
        with self._lock:
            if index not in self._connections:
                connect = Task(lambda: c10d.clone_store(self._root()), "connect")
                self._connections[index] = connect
            return self._connections[index]

    def replaced(self) -> StorePool:
        """Return a pool with new clients, since those of this one may be blocked. Local."""
        self.end()
        return StorePool(self._root)
