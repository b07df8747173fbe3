"""A separate store client, with a thread that sends its requests and a timeout for each of them.

A store client of torch is locked during each of its waits, and an unreachable server blocks a
client indefinitely. So the client that torch uses is never used here; one thread sends the requests
of a job; and a client whose request was abandoned is replaced, with its thread.

A connection may have been reset while it was idle: by a firewall, a load balancer, or address
translation, after minutes. A request that may be repeated is then repeated once on a new one.
Before any other request, an idle connection is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from torch.distributed import HashStore, Store

from ..c10d import stores
from ..errors import ReloadpgError
from ..processes import Peers
from ..threads import Deadline, LibraryThread
from .decision import store_lost, store_silent

T = TypeVar("T")

Root = Callable[[], Store]
"""Returns the store that clients are cloned from. No reference to the job's store is kept."""

_GRACE_S = 1.5
"""Seconds after a timeout within which the store may still respond."""

_LOOK_S = 0.2
"""Seconds between two checks, during a request, for an interrupt or the end of a process."""

_CHECK_S = 5.0
"""Seconds within which an idle connection must respond before it is replaced."""

_NOTHING = "-"
"""A value that no key holds. A compare-and-set with it reads a key in one request and changes
nothing; ``check`` and ``get`` together take three."""


def read(store: Store, key: str) -> str | None:
    """The value of a key; None if there is no such key. One request."""
    value = store.compare_set(key, _NOTHING, _NOTHING).decode()
    return None if value == _NOTHING else value


def append(store: Store, key: str, text: str) -> None:
    """Append to a key. One request, or some on a store that cannot append, such as a FileStore."""
    try:
        cast(Any, store).append(key, text)
    except RuntimeError as error:
        if "append" not in str(error):
            raise
        now = read(store, key) or ""
        while (found := store.compare_set(key, now, now + text).decode()) != now + text:
            now = found


class _Connection(LibraryThread):
    """A client of the store, and the thread that connects it and sends its requests."""

    def __init__(self, root: Root, *, again: bool) -> None:
        super().__init__(name="reloadpg-store", daemon=True)
        self._root, self._again = root, again
        self._used, self._interrupted = 0.0, False
        self._requests: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._requests = SimpleQueue()
        self._store: Store | None = None
        self.start()

    def run(self) -> None:
        while (request := self._requests.get()) is not None:
            question, future = request
            try:
                future.set_result(self._reply(question))
            except BaseException as error:  # raised by ask()
                future.set_exception(error)
            del request, question, future  # they hold references
        self._store = None

    def _reply(self, question: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = stores.clone_store(self._root(), again=self._again, stopped=self._check)
        reply = question(self._store)
        self._used = time.monotonic()
        return reply

    def _check(self) -> None:
        if self._interrupted:
            raise RuntimeError("the process ends")

    def send(self, question: Callable[[Store], T]) -> Future[T]:
        future: Future[T] = Future()
        self._requests.put((question, future))
        return future

    @property
    def is_used(self) -> bool:
        """Whether it has got a response."""
        return self._used > 0

    @property
    def is_idle(self) -> bool:
        """Whether its last response was so long ago that it may have been reset."""
        return self.is_used and time.monotonic() - self._used > stores.IDLE_S

    def dismiss(self) -> None:
        """End the thread after its current request. Local, non-blocking."""
        self._requests.put(None)

    def interrupt(self) -> None:
        """Make the current request return, since the process ends. Local, non-blocking."""
        self._interrupted = True
        with suppress(RuntimeError):  # the job has ended
            stores.shut_store_connections(self._root() if self._store is None else self._store)


class StoreClient:
    """A separate connection to the store of another client. One request at a time.

    For each connection the server looks up the client's host name. If DNS does not respond, the
    server serves no client for 5 s (seen on torch 2.13 and 2.15).

    Args:
        root: returns a client of the store, which is cloned and not used otherwise; None for a
            store of this process alone.
        rank: this rank, for errors.
        peers: the processes of this host, which show what the process of the server does.
    """

    def __init__(self, root: Root | None, rank: int = 0, peers: Peers | None = None) -> None:
        self._root, self._rank, self._peers = root, rank, peers
        self._again = False
        self._own = HashStore()
        self._connection: _Connection | None = None

    def ask(
        self,
        question: Callable[[Store], T],
        deadline: Deadline,
        stopped: Callable[[], object] = lambda: None,
        *,
        repeats: bool = False,
    ) -> T:
        """Send a request in the client's thread. Blocking, with a timeout; handles signals.

        Args:
            question: called with the store; raises only what the store raises. It may block until
                ``deadline`` ends.
            deadline: when to give up; the store has ``_GRACE_S`` more to respond.
            stopped: called again and again; the request is abandoned if it raises.
            repeats: whether the request may be repeated, since it may have been executed before.

        Raises:
            ReloadpgError: the store is lost, or cannot be used.
            RendezvousTimeoutError: the store does not respond in time.
        """
        if self._root is None:
            return question(self._own)
        used = self._connection is not None and self._connection.is_used
        idle = self._connection is not None and self._connection.is_idle
        if idle and not repeats:
            self.ask(lambda store: read(store, _NOTHING), deadline, stopped, repeats=True)
        if used and repeats:
            seconds = min(_CHECK_S, deadline.left)
            limit = Deadline(deadline.operation, seconds, deadline.phase) if idle else deadline
            try:
                return self._ask(question, limit, stopped)
            except ReloadpgError:
                if limit is deadline and deadline.left == 0:
                    raise
        return self._ask(question, deadline, stopped)

    def _ask(
        self, question: Callable[[Store], T], deadline: Deadline, stopped: Callable[[], object]
    ) -> T:
        """Send a request once."""
        connection, self._connection = self._connection, None
        if connection is None or not connection.is_alive():
            connection = _Connection(cast(Root, self._root), again=self._again)
            self._again = True
        answer, works = connection.send(question), False
        try:
            self._await(answer, deadline, stopped)
            works = answer.exception() is None
        finally:
            # After any error or interrupt, the abandoned request may hold the lock of the client.
            # A signal handler may have asked, too.
            if works and self._connection is None:
                self._connection = connection
            else:
                connection.dismiss()
        error = answer.exception()
        if isinstance(error, RuntimeError) and not isinstance(error, ReloadpgError):
            raise store_lost(deadline, error, self._host_says) from error
        return answer.result()

    @property
    def _host_says(self) -> str:
        """What the processes of this host show of the server's, which is usually rank 0's."""
        return "" if self._peers is None or self._rank == 0 else self._peers.state_of(0)

    def _await(
        self, answer: Future[Any], deadline: Deadline, stopped: Callable[[], object]
    ) -> None:
        """Wait for the answer to a request."""
        limit = deadline
        while not answer.done():
            if limit.left == 0:
                if limit is not deadline:
                    raise store_silent(deadline, self._rank, self._host_says)
                limit = Deadline(deadline.operation, _GRACE_S)
            with limit.pause(_LOOK_S) as seconds:
                wait([answer], seconds)
            if not answer.done():
                stopped()

    def end(self) -> LibraryThread | None:
        """End the thread after its current request, and return it. Local, non-blocking."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.dismiss()
        return connection

    def __del__(self) -> None:
        self.end()
