"""The dump of NCCL's flight recorder at a timeout, once torch's first NCCL group was released.

A rank of ``ProcessGroupNCCL`` that notices a timeout or an error sets a key in the store. On each
rank the process's first group of this class, by its ``uid``, polls the key and writes the dump
(``HeartbeatMonitor::runLoop``; torch 2.8, 2.13, and the older engine of 2.15, over stand-ins). Its
number cannot be given to another group, so a thread of this library takes its place after a reload.
It writes one dump, of the first timeout in the job, as torch does.

``ProcessGroupNCCL2`` (2.15) writes the dump of the rank that notices the timeout, in any group.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import Store

from ..c10d import backends, nccl, stores, tables
from ..groups.proxy import managed
from ..groups.registry import registry
from ..threads import LibraryThread

logger = logging.getLogger("reloadpg")

DUMP_SIGNAL = "exception_dump"
"""The key, beneath all prefixes of the store, by which a rank signals a timeout."""

_POLL_S = 1.0
"""The interval between requests, in seconds: torch's default."""

_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_SWITCHES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_OFF = ("0", "n", "no", "f", "false")

_END_S = 6.0
"""Seconds within which a started request to the store ends."""


class DumpWatch(LibraryThread):
    """A thread that looks for the signal of a timeout and writes this rank's dump. Daemon.

    It makes the requests that torch's group made before, with a separate client of the store.
    """

    def __init__(self, root: Callable[[], Store], rank: int) -> None:
        super().__init__(name="reloadpg-dumps", daemon=True)
        self._root = root
        self._rank = rank
        self._ended = threading.Event()

    def dismiss(self) -> None:
        self._ended.set()

    def end(self) -> None:
        """End the thread; waits a limited time. Local, idempotent."""
        self.dismiss()
        if self is not threading.current_thread():
            self.join(_END_S)

    def run(self) -> None:
        with suppress(RuntimeError):  # the store has ended, and the job with it
            self._watch(stores.clone_store(stores.unprefixed(self._root())))

    def _watch(self, store: Store) -> None:
        if store.check([DUMP_SIGNAL]):  # of a timeout before the reload
            return
        while not self._ended.wait(_POLL_S):
            if store.check([DUMP_SIGNAL]):
                self._write()
                return

    def _write(self) -> None:
        """Write what torch would write to the file that torch would write."""
        path = Path(f"{_given(_PREFIXES) or nccl.flight_recorder_prefix()}{self._rank}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(nccl.flight_recorder_dump())
        except OSError as error:
            logger.error("the flight recorder's dump of rank %d failed: %s", self._rank, error)
        else:
            logger.error(
                "a rank signalled a timeout or an error of NCCL: the flight recorder's dump of "
                "rank %d is in %s",
                self._rank,
                path,
            )


def lacks_dumps() -> bool:
    """Whether no live group writes dumps, although one may signal a timeout. Local."""
    if _given(_SIZES) == "0" or _given(_SWITCHES).lower() in _OFF:
        return False
    groups = [group for group in tables.known_groups() if managed(group) is None]
    groups += [g.communicator for g in registry.managed() if g.communicator is not None]
    watched: list[Any] = [one for group in groups for one in backends.monitored_backends(group)]
    return bool(watched) and all(backend.uid for backend in watched)


def _given(names: Iterable[str]) -> str:
    """The value of the first of these variables that is set; empty if none is."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
