"""A separate store client, with a thread that sends its requests and a timeout for each of them.

A store client of torch is locked during each of its waits, and an unreachable server blocks a
client indefinitely. So the client that torch uses is never used here; one thread sends the requests
of a job; and a client whose request was abandoned is replaced, with its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from torch.distributed import HashStore, Store

from ..c10d import stores
from ..errors import ReloadpgError
from .worker_thread import LibraryThread, Task, Wait

T = TypeVar("T")

Root = Callable[[], Store]
"""Returns the store that clients are cloned from. No reference to the job's store is kept."""

_GRACE_S = 1.5
"""Seconds after a timeout within which the store may still respond."""

_LOOK_S = 1.0
"""Longest time between two checks of the processes on this host, in seconds."""

_PAUSE_S = 0.1
"""Seconds between two checks of the clock after a timeout: see :meth:`Wait.pause`."""

_POOLED = 16384
"""Maximum number of pooled clients over all ranks of a job (or one per rank, if it has more ranks).
The store's server has a file descriptor for each, and 65,536 is a common limit."""

_NOTHING = "-"
"""A value that no key holds. A compare-and-set with it reads a key in one request and changes
nothing; ``check`` and ``get`` together take three."""


class StoreSilent(TimeoutError):  # noqa: N818 - never leaves this package
    """The store did not respond in time."""


class StoreLost(RuntimeError):  # noqa: N818 - likewise
    """The store has ended."""


def read(store: Store, key: str) -> str | None:
    """The value of a key; None if there is no such key. One request."""
    value = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if value == _NOTHING else value


def append(store: Store, key: str, text: str) -> None:
    """Append to a key. One request, or some on a store that cannot append, such as a FileStore."""
    try:
        cast(Any, store).append(key, text)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "append" not in str(error):
            raise
        now = read(store, key) or ""
        while (found := store.compare_set(key, now, now + text).decode()) != now + text:
            now = found


class _Request(Generic[T]):
    def __init__(self, question: Callable[[Store], T]) -> None:
        self.question: Callable[[Store], T] | None = question
        self.woken = threading.Event()  # by the end, or by :meth:`StoreClient.wake`
        self.ended = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self, store: Store) -> None:
        question, self.question = self.question, None
        try:
            self.result = cast("Callable[[Store], T]", question)(store)
        except BaseException as error:
            self.error = error
        self.ended = True
        self.woken.set()


class _Connection(LibraryThread):
    """A client of the store, and the thread that connects it and sends its requests."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        super().__init__(name="reloadpg-store", daemon=True)
        self._connect: Callable[[], Store] | None = connect
        self._requests: SimpleQueue[_Request[Any] | None] = SimpleQueue()
        self._store: Store | None = None
        self.start()

    def run(self) -> None:
        connect, self._connect, failed = self._connect, None, None
        try:
            store = self._store = cast("Callable[[], Store]", connect)()
        except BaseException as error:  # each request raises it
            failed = error
        del connect
        while (request := self._requests.get()) is not None:
            if failed is None:
                request.run(store)
            else:
                request.error, request.ended = failed, True
                request.woken.set()
            del request  # it holds references
        self._store = None

    def send(self, request: _Request[Any]) -> None:
        self._requests.put(request)

    def dismiss(self) -> None:
        """End the thread after its current request. Local, non-blocking."""
        self._requests.put(None)

    def interrupt(self) -> None:
        """Make the current request return, since the process ends. Local, non-blocking."""
        if (store := self._store) is not None:
            stores.shut_store_connections(store)


class StoreClient:
    """A separate connection to the store of another client. One request at a time.

    Args:
        root: returns a client of the store, which is cloned and not used otherwise; None for a
            store of this process alone.
    """

    def __init__(self, root: Root | None) -> None:
        self._root = root
        self._own = HashStore()
        self._connection: _Connection | None = None
        self._request: _Request[Any] | None = None

    def connect(self) -> None:
        """Connect in the background, if not yet connected. Local, non-blocking. Idempotent.

        For each connection the server looks up the client's host name. If DNS does not respond,
        the server serves no client for 5 s (seen on torch 2.13 and 2.15).
        """
        if self._root is not None and (self._connection is None or not self._connection.is_alive()):
            root = self._root
            self._connection = _Connection(lambda: stores.clone_store(root()))

    def wake(self) -> None:
        """Let the current request call ``stopped`` now. Local, from any thread."""
        if (request := self._request) is not None:
            request.woken.set()

    def ask(
        self,
        question: Callable[[Store], T],
        wait: Wait,
        stopped: Callable[[], object] = lambda: None,
    ) -> T:
        """Send a request in the client's thread. Blocking, with a timeout; handles signals.

        Args:
            question: called with the store; raises only what the store raises. It may block until
                ``wait`` ends.
            wait: the deadline; the store has ``_GRACE_S`` more to respond.
            stopped: called every second; the request is abandoned if it raises.

        Raises:
            StoreSilent: no response in time.
            StoreLost: the store has ended.
        """
        if self._root is None:
            return question(self._own)
        request = self._request = _Request(question)
        self.connect()
        # After any error or interrupt, the abandoned request may hold the lock of the client.
        connection, self._connection = cast(_Connection, self._connection), None
        try:
            connection.send(request)
            _await(request, wait, stopped)
        except BaseException:
            connection.dismiss()
            raise
        finally:
            self._request = None
        if request.error is not None:
            connection.dismiss()
            if isinstance(request.error, ReloadpgError) or not isinstance(
                request.error, RuntimeError
            ):
                raise request.error
            raise StoreLost(str(request.error)) from request.error
        if self._connection is None:
            self._connection = connection
        else:  # a signal handler has asked, too
            connection.dismiss()
        return request.result  # type: ignore[return-value]

    def end(self) -> LibraryThread | None:
        """End the thread after its current request, and return it. Local, non-blocking."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.dismiss()
        return connection

    def __del__(self) -> None:
        self.end()


def _await(request: _Request[Any], wait: Wait, stopped: Callable[[], object]) -> None:
    """Wait until a request has ended; see :meth:`StoreClient.ask`."""
    grace: Wait | None = None
    while not request.ended:
        limit, longest = (wait, _LOOK_S) if grace is None else (grace, _PAUSE_S)
        if limit.left == 0 and grace is not None:
            raise StoreSilent
        if limit.left == 0:
            grace = Wait(wait.operation, _GRACE_S)
            continue
        with limit.pause(longest) as seconds:
            if request.woken.wait(seconds) and not request.ended:
                request.woken.clear()
        if not request.ended:
            stopped()


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
                connect = Task(lambda: stores.clone_store(self._root()), "connect")
                self._connections[index] = connect
            return self._connections[index]

    def replaced(self) -> StorePool:
        """Return a pool with new clients, since those of this one may be blocked. Local."""
        self.end()
        return StorePool(self._root)
