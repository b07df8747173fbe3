"""What the simulated accelerator holds and has done in this process: memory and counters."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from torch.distributed import DistBackendError

__all__ = ["GroupInfo", "Ledger", "Record", "SimState", "Stats"]

_PAGE = mmap.PAGESIZE
_KEPT = 1024
"""Ended groups that are remembered; older ones are forgotten, so that soak runs stay flat."""


class SimState(str, Enum):
    """Where a communicator of the simulated accelerator is in its life."""

    CREATED = "created"
    CONNECTED = "connected"
    SUSPENDED = "suspended"
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
        suspended, resumed: how often a communicator was.
    """

    created: int
    connected: int
    released: int
    leaked: int
    live: int
    held_bytes: int
    peak_bytes: int
    collectives: int
    suspended: int = 0
    resumed: int = 0


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
    persistent: mmap.mmap | None = None
    suspendable_bytes: int = 0
    ending: bool = False

    @property
    def held_bytes(self) -> int:
        return _length(self.memory) + _length(self.persistent)

    @property
    def is_open(self) -> bool:
        return self.state in (SimState.CREATED, SimState.CONNECTED, SimState.SUSPENDED)

    def memory_stats(self) -> dict[str, int]:
        """The account that NCCL gives of a communicator, under its names."""
        return {
            "suspend": self.suspendable_bytes,
            "suspended": int(self.state is SimState.SUSPENDED),
            "persist": _length(self.persistent),
            "total": self.held_bytes,
        }

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
        self._held = self._peak = self._collectives = self._resumed = 0
        self.capacity: int | None = None

    def open(self, record: Record) -> None:
        with self._lock:
            self._counts[SimState.CREATED] += 1
            record.serial = self._counts[SimState.CREATED]
            self._live[record.serial] = record

    @property
    def free_bytes(self) -> int | None:
        """What is left of the device; None if it has no end."""
        with self._lock:
            return None if self.capacity is None else self.capacity - self._held

    def connect(self, record: Record, size: int, persistent: int) -> None:
        """Take ``size`` bytes of real memory for a communicator.

        Args:
            record: the communicator.
            size: bytes in all.
            persistent: how many of them a suspend leaves.
        """
        with self._lock:
            self._take(size)
        record.persistent, record.memory = _resident(persistent), _resident(size - persistent)
        with self._lock:
            record.suspendable_bytes = size - persistent
            record.state = SimState.CONNECTED
            self._counts[SimState.CONNECTED] += 1

    def suspend(self, record: Record, *, works: bool) -> None:
        """Give back what a suspend gives back; nothing, if it does not work."""
        with self._lock:
            if works and record.memory is not None:
                self._held -= len(record.memory)
                record.memory.close()
                record.memory = None
            record.state = SimState.SUSPENDED
            self._counts[SimState.SUSPENDED] += 1

    def resume(self, record: Record) -> None:
        """Take again what a suspend gave back."""
        with self._lock:
            missing = record.suspendable_bytes if record.memory is None else 0
            self._take(missing)
        memory = _resident(missing)
        with self._lock:
            record.memory = memory or record.memory
            record.state = SimState.CONNECTED
            self._resumed += 1

    def _take(self, size: int) -> None:
        if self.capacity is not None and self._held + size > self.capacity:
            raise DistBackendError(
                f"out of memory: the simulated device has {self.capacity - self._held} bytes "
                f"left, and {size} are wanted"
            )
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
            for memory in (record.memory, record.persistent):
                if memory is not None:
                    memory.close()
            record.memory = record.persistent = None
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
                suspended=counts[SimState.SUSPENDED],
                resumed=self._resumed,
            )

    def groups(self, *, ended: bool) -> tuple[GroupInfo, ...]:
        with self._lock:
            records = [*self._ended, *self._live.values()] if ended else list(self._live.values())
        return tuple(r.info() for r in sorted(records, key=lambda record: record.serial))


def _length(memory: mmap.mmap | None) -> int:
    return len(memory) if memory is not None else 0


def _resident(size: int) -> mmap.mmap | None:
    """Private anonymous memory with every page present, outside malloc."""
    if size == 0:
        return None
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[::_PAGE] = b"\x01" * len(range(0, size, _PAGE))
    return memory
