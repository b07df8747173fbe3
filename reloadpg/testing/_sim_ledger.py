"""What the simulated accelerator holds and has done in this process: memory and counters."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

__all__ = ["GroupInfo", "Ledger", "Record", "SimState", "Stats"]

_PAGE = mmap.PAGESIZE
_KEPT = 1024
"""Ended groups that are remembered; older ones are forgotten, so that soak runs stay flat."""


class SimState(str, Enum):
    """Where a communicator of the simulated accelerator is in its life."""

    CREATED = "created"
    CONNECTED = "connected"
    RELEASED = "released"
    LEAKED = "leaked"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Stats:
    """Counters of one process since it registered the backend, or was forked.

    Attributes:
        created: groups that the creating function made.
        connected: groups that were used at least once.
        released: groups ended by ``shutdown`` or ``abort``.
        leaked: groups that were collected without either; their memory is freed all the same.
        live: groups that exist now.
        held_bytes: memory that communicators hold now.
        peak_bytes: the most that they held at one time.
        collectives: collective and point-to-point operations that were started.
    """

    created: int
    connected: int
    released: int
    leaked: int
    live: int
    held_bytes: int
    peak_bytes: int
    collectives: int


@dataclass(frozen=True)
class GroupInfo:
    """One group, with what the creating function really received.

    Attributes:
        name: name of the group that torch gave to the creating function.
        desc: description that torch set afterwards.
        rank: rank in the group, as received.
        size: number of members, as received.
        ranks: global ranks as received; torch passes none for the default group.
        timeout: the timeout as received.
        pg_options: the very object that was received.
        state: :class:`SimState`.
        held_bytes: memory that it holds now.
        collectives: operations that were started on it.
    """

    name: str
    desc: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    timeout: timedelta
    pg_options: object
    state: SimState
    held_bytes: int
    collectives: int


@dataclass(eq=False)
class Record:
    """One group's account; :meth:`info` is what others see of it."""

    name: str
    rank: int
    size: int
    ranks: Sequence[int]
    timeout: timedelta
    pg_options: object
    serial: int = 0
    desc: str = ""
    state: SimState = SimState.CREATED
    collectives: int = 0
    memory: mmap.mmap | None = None
    ending: bool = False

    @property
    def held_bytes(self) -> int:
        return len(self.memory) if self.memory is not None else 0

    @property
    def is_open(self) -> bool:
        return self.state in (SimState.CREATED, SimState.CONNECTED)

    def info(self) -> GroupInfo:
        return GroupInfo(
            self.name,
            self.desc,
            self.rank,
            self.size,
            tuple(self.ranks),
            self.timeout,
            self.pg_options,
            self.state,
            self.held_bytes,
            self.collectives,
        )


class Ledger:
    """Accounts of all communicators of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may close a record while we hold it
        self._live: dict[int, Record] = {}
        self._ended: deque[Record] = deque(maxlen=_KEPT)
        self._counts = dict.fromkeys(SimState, 0)
        self._held = self._peak = self._collectives = 0

    def open(self, record: Record) -> None:
        with self._lock:
            self._counts[SimState.CREATED] += 1
            record.serial = self._counts[SimState.CREATED]
            self._live[record.serial] = record

    def connect(self, record: Record, size: int) -> None:
        """Take ``size`` bytes of real memory for a communicator."""
        memory = _resident(size)
        with self._lock:
            record.memory = memory
            record.state = SimState.CONNECTED
            self._counts[SimState.CONNECTED] += 1
            self._held += size
            self._peak = max(self._peak, self._held)

    def used(self, record: Record) -> None:
        with self._lock:
            record.collectives += 1
            self._collectives += 1

    def close(self, record: Record, state: SimState) -> None:
        """Give the memory back to the operating system. Idempotent: the first state counts."""
        with self._lock:
            if not record.is_open:
                return
            self._held -= record.held_bytes
            self._counts[state] += 1
            record.state = state
            if record.memory is not None:
                record.memory.close()
                record.memory = None
            self._ended.append(self._live.pop(record.serial))

    def stats(self) -> Stats:
        with self._lock:
            counts = self._counts
            released, leaked = counts[SimState.RELEASED], counts[SimState.LEAKED]
            return Stats(
                created=counts[SimState.CREATED],
                connected=counts[SimState.CONNECTED],
                released=released,
                leaked=leaked,
                live=counts[SimState.CREATED] - released - leaked,
                held_bytes=self._held,
                peak_bytes=self._peak,
                collectives=self._collectives,
            )

    def groups(self, *, ended: bool) -> tuple[GroupInfo, ...]:
        with self._lock:
            records = [*self._ended, *self._live.values()] if ended else list(self._live.values())
        return tuple(r.info() for r in sorted(records, key=lambda record: record.serial))


def _resident(size: int) -> mmap.mmap | None:
    """Private anonymous memory with every page present, outside malloc."""
    if size == 0:
        return None
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[::_PAGE] = b"\x01" * len(range(0, size, _PAGE))
    return memory
