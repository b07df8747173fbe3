"""Writes the flight recorder's dump at a timeout once torch's first NCCL group was released."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import Store

from ..c10d import flight_recorder, stores, tables
from ..errors import ReloadpgError
from ..groups.proxy import managed
from ..groups.registry import registry
from ..rendezvous.worker_thread import LibraryThread

logger = logging.getLogger("reloadpg")

_END_S = 6.0
"""Seconds within which a request to the store that has begun ends."""


class DumpWatch(LibraryThread):
    """A thread that looks for the signal of a timeout and writes this rank's dump. Daemon.

    It makes the requests that torch's group made before: one each second, with a separate client.
    """

    def __init__(self, root: Callable[[], Store], rank: int) -> None:
        super().__init__(name="reloadpg-dumps", daemon=True)
        self._root = root
        self._rank = rank
        self._ended = threading.Event()
        self._clears = True

    def expect_next(self) -> None:
        """Forget a signal from before the last reload, which all ranks have completed. Local."""
        self._clears = True

    def end(self) -> None:
        """End the thread; waits a limited time. Local, idempotent."""
        atexit.unregister(self.end)
        self._ended.set()
        if self.ident is not None and self is not threading.current_thread():
            self.join(_END_S)

    def run(self) -> None:
        with suppress(RuntimeError):  # the store has ended, and the job with it
            self._watch(stores.clone_store(stores.unprefixed(self._root())))

    def _watch(self, store: Store) -> None:
        seen = True  # a signal counts once it was seen to be absent
        while not self._ended.wait(flight_recorder.dump_interval()):
            if not store.check([flight_recorder.DUMP_SIGNAL]):
                seen = self._clears = False
            elif not seen:
                seen = True
                self._write()
            elif self._clears and self._rank == 0:
                store.delete_key(flight_recorder.DUMP_SIGNAL)

    def _write(self) -> None:
        try:
            path = flight_recorder.write_dump(self._rank)
        except OSError as error:
            logger.error("the flight recorder's dump of rank %d failed: %s", self._rank, error)
        else:
            logger.error(
                "a rank signalled a timeout or an error of NCCL: the flight recorder's dump of "
                "rank %d is in %s",
                self._rank,
                path,
            )


def watch(running: DumpWatch | None, root: Callable[[], Store], rank: int) -> DumpWatch | None:
    """Start to watch for timeouts, after a reload, if torch's groups do not. Local, non-blocking.

    Args:
        running: what an earlier call has returned.
        root: returns the job's store.
        rank: the rank of this process.
    """
    if running is not None:
        running.expect_next()
        return running
    plain = [group for group in tables.known_groups() if managed(group) is None]
    inner = [group.communicator for group in registry.managed()]
    if not flight_recorder.lacks_dumps([*plain, *(group for group in inner if group is not None)]):
        return None
    started = DumpWatch(root, rank)
    with suppress(ReloadpgError):  # no thread can be started
        started.start()
        atexit.register(started.end)  # before the interpreter's exit waits for threads
        return started
    return None
