"""A rank on the store of its job: it performs the commands of :mod:`.protocol` by requests."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch.distributed import PrefixStore, Store

from ..c10d.stores import delete_keys
from ..errors import ReloadpgError
from ..processes import Peers
from ..settings import GRACE
from ..threads import Deadline, Interrupted, wait_seconds
from . import protocol
from .decision import Decision
from .protocol import GaveUp, Rank, Steps
from .store_client import Root, StoreClient, append, read

T = TypeVar("T")

Wait: TypeAlias = Callable[[str, bool, Deadline], object]
"""Waits for a key, for a while; see :meth:`Rendezvous.drive`."""

PREFIX = "reloadpg"
"""Prefix of the keys of a job."""

REQUESTS_S = 5.0
"""Seconds for the requests that count a job; minimum for notifications of a failure."""

_BRIEF_S = 0.5
"""Seconds to read whether a recovery was requested, and of the first wait for a key before all
ranks have met."""

_SILENT_S = 10.0
"""Seconds until an unresponsive store is asked again whether a recovery was requested."""

_READ_S = 0.2
"""Seconds within which a rank waiting at a barrier reads how it has ended, unless it polls."""


class Rendezvous:
    """The rendezvous of the ranks of a job, or of a group, on a store.

    Args:
        root: returns the store; None for a rank without peers.
        rank: this rank.
        size: number of ranks.
        watches: whether to watch the processes on this host.
        client: the connection to the store; None for a separate one.
        prefix: prefix of its keys.

    Attributes:
        alone: whether this rank has no peers.
        client: the connection to the whole store.
        recovered: number of the last completed recovery; 0 before the first.
        peers: the ranks of this host.
        pause_s: seconds between two polls; it limits the requests of all ranks of a large job to
            some thousand per second.
    """

    def __init__(
        self,
        root: Root | None,
        rank: int,
        size: int,
        *,
        watches: bool = False,
        client: StoreClient | None = None,
        prefix: str = PREFIX,
    ) -> None:
        self.rank, self.size = rank, size
        self.alone = root is None
        self.recovered = 0
        self.peers = Peers(rank)
        host = self.peers.host if watches else ""
        self.pause_s = max(0.1, size / 2000)
        self.client = client or StoreClient(root, rank, self.peers)
        self._prefix = prefix
        self.state = Rank(rank, 1 if root is None else size, host, self.peers.entry)
        self._requested = 0  # number of the last recovery that was requested
        self._ask_again = 0.0
        self._progress = 0
        self._driven = -math.inf
        if rank == 0 and not self.alone:
            _hosts.add(self)

    @property
    def grace_s(self) -> float:
        """Seconds within which ranks must respond after a failure."""
        return wait_seconds(GRACE) + 2 * self.pause_s

    # -- the job ----------------------------------------------------------------------------

    def count_job(self, seconds: float = REQUESTS_S) -> None:
        """Count this job on its store. Blocking, for at most ``seconds``; idempotent.

        All ranks call this when the job begins: the first operation may be called by some ranks
        only, and later another job may use the store's port. It also starts the thread that sends
        the requests: if the process can start no other one later, it can still notify the other
        ranks. If it fails, the first operation does it.
        """
        if not self.state.job:
            with suppress(ReloadpgError):
                self.drive(self.state.count(), Deadline("count", seconds))

    def end(self, deadline: Deadline) -> None:
        """End the thread of the requests, and wait for it. Local, with a timeout."""
        self.linger()
        thread = self.client.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline.left)

    def linger(self) -> None:
        """Let the other ranks read how the last operation has ended, before the store ends.

        For rank 0, which usually hosts it. Local; waits until no rank polls, for a limited time.
        A rank that does not poll reads the end at once.
        """
        _hosts.discard(self)
        since = time.monotonic() - self._driven
        if self.rank or since > self.grace_s:
            return
        deadline, key = Deadline("the end of the job", self.grace_s), self.polls
        with suppress(ReloadpgError):
            time.sleep(max(0.0, _READ_S - since))
            while int(self.ask(lambda store: read(store, key), deadline, repeats=True) or 0) > 0:
                if not deadline.left:
                    break
                time.sleep(_READ_S / 4)

    @property
    def polls(self) -> str:
        """The key that counts the polling ranks of a barrier."""
        return f"{self.state.job}/polls"

    def watch(self, deadline: Deadline) -> None:
        """Watch the processes of this host that have joined the job."""
        if self.state.host:
            listed = self.ask(lambda store: read(store, self.state.listed), deadline, repeats=True)
            self.peers.meet(listed or "")

    def note_recovery(self, number: int) -> None:
        """Record a recovery that all ranks have completed. Local."""
        self.recovered = number

    def recovery_requested(self) -> bool:
        """Whether a recovery was requested that this rank has not joined. Local, with a timeout.

        Polls at most once per ``pause_s``, or per 10 s while the store does not respond; otherwise
        returns the cached answer.
        """
        if not self.alone and time.monotonic() >= self._ask_again:
            pause = _SILENT_S
            with suppress(ReloadpgError):
                now = self.drive(self.state.read(), Deadline("flag", _BRIEF_S))
                self._requested, pause = now.recovery, self.pause_s
            self._ask_again = time.monotonic() + pause
        return self.state.is_requested(self._requested)

    # -- the store --------------------------------------------------------------------------

    def ask(
        self,
        question: Callable[[Store], T],
        deadline: Deadline,
        stopped: Callable[[], object] = lambda: None,
        *,
        repeats: bool = False,
    ) -> T:
        """Send requests to this part of the store; see :meth:`StoreClient.ask`."""

        def within(root: Store) -> T:
            return question(PrefixStore(self._prefix, root))

        return self.client.ask(within, deadline, stopped, repeats=repeats)

    def drive(self, steps: Steps, deadline: Deadline, wait: Wait | None = None) -> Any:
        """Perform the commands of a generator, and return its result. Blocking, with a timeout.

        A late reply to an abandoned request reaches no generator.

        Args:
            steps: the generator.
            deadline: when to give up.
            wait: how an operation waits for a key, for a while; and whether it is another wait for
                the same key.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
            Ended, GaveUp, Interrupted: see :mod:`.protocol`.
        """
        awaited, wait = "", wait or self._wait
        try:
            command = next(steps)
            while True:
                try:
                    if isinstance(command, protocol.Await):
                        again, awaited, reply = command.key == awaited, command.key, None
                        if deadline.left == 0:
                            raise GaveUp(Decision("timeout", self.rank))
                        wait(command.key, again, deadline)
                    else:
                        repeats = not isinstance(command, protocol.Add)
                        reply = self.ask(partial(perform, command), deadline, repeats=repeats)
                except (GaveUp, Interrupted) as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(reply)
        except StopIteration as stop:
            return stop.value
        finally:
            self._driven = time.monotonic()
            steps.close()

    def _wait(self, key: str, again: bool, deadline: Deadline) -> None:
        if not again:
            self.await_key(key, deadline)
        else:
            with deadline.pause(self.pause_s) as seconds:
                time.sleep(seconds)

    def await_key(
        self, key: str, deadline: Deadline, stopped: Callable[[], object] = lambda: None
    ) -> None:
        """Wait for a key: the first wait for it, by a request that returns when it exists.

        Torch writes two warnings to stderr for each such wait that times out, so there is only one
        for each key; a long wait continues by polling.
        """
        first = deadline.first_log_s if self.state.confirmed else _BRIEF_S
        first = min(first, deadline.left / 2)

        def wait(store: Store) -> None:
            # It can return without the key if several clients time out at once (torch 2.13), so
            # its result is ignored. The next request finds out if the store is lost.
            with suppress(RuntimeError), deadline.pause(first) as left:
                store.wait([key], timedelta(seconds=max(0.01, left)))

        self.ask(wait, deadline, stopped)

    def extend(self, deadline: Deadline, news: int = 0) -> bool:
        """Report the progress of this rank, and restart the timeout if any rank has progressed."""
        key = f"{self.state.job}/progress"
        total = self.ask(lambda store: store.add(key, news), deadline, repeats=True)
        moved, self._progress = total != self._progress, total
        if moved:
            deadline.extend()
        return moved


def perform(command: protocol.Command, store: Store) -> Any:
    """Perform a command on the store, and return the reply."""
    match command:
        case protocol.Read(key):
            return read(store, key)
        case protocol.Swap(key, expected, value):
            return store.compare_set(key, expected, value).decode()
        case protocol.Add(key, amount):
            return store.add(key, amount)
        case protocol.Set(key, value):
            store.set(key, value)
        case protocol.Append(key, text):
            append(store, key, text)
        case protocol.Delete(keys):
            delete_keys(store, keys)
    return None


_hosts: weakref.WeakSet[Rendezvous] = weakref.WeakSet()
"""Those of the ranks that usually host the store, until they have ended."""


@atexit.register
def _linger() -> None:
    for rendezvous in list(_hosts):
        rendezvous.linger()


os.register_at_fork(after_in_child=_hosts.clear)
