"""State of the simulated accelerator in one process: settings, memory and counters, faults.

Everything here can be called by a signal handler: locks are reentrant, and records are always
readable.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch.distributed import DistBackendError

_KEPT = 1024
"""Maximum number of ended groups that are recorded, so that memory stays constant in long runs."""


@dataclass(frozen=True)
class Settings:
    bytes_per_communicator: int = 32 << 20
    eager: bool = False
    creation_seconds: float = 0.0
    release_seconds: float = 0.0


# ---------------------------------------------------------------------------------------------
# groups


class SimState(str, Enum):
    """State of a communicator of the simulated accelerator."""

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
        created: number of created groups.
        connected: number of groups that were used at least once.
        released: number of groups ended by ``shutdown`` or ``abort``.
        leaked: number of groups collected without either; their memory is freed anyway.
        live: number of existing groups.
        held_bytes: memory that communicators hold.
        peak_bytes: maximum of ``held_bytes``.
        collectives: number of collective and point-to-point operations that were started.
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
    """One group, with the arguments that the creating function received.

    Attributes:
        name: name of the group that torch gave to the creating function.
        desc: description that torch set afterwards.
        rank: rank in the group, as received.
        size: number of members, as received.
        ranks: global ranks as received; torch passes none for the default group.
        timeout: the timeout as received.
        pg_options: the object that was received.
        state: :class:`SimState`.
        held_bytes: memory that it holds now.
        collectives: operations that were started on it.
        serial: number of the group in this process, counted from 1.
    """

    name: str
    desc: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    timeout: timedelta
    pg_options: object
    state: SimState = SimState.CREATED
    held_bytes: int = 0
    collectives: int = 0
    serial: int = 0


@dataclass(frozen=True)
class BarrierInfo:
    """A barrier, or the next one of a rank that has failed.

    Attributes:
        name: the operation and the phase: ``reload.enter``.
        global_rank: rank of this process.
    """

    name: str
    global_rank: int


@dataclass(eq=False)
class GroupRecord:
    """The record of a group, with what its communicator holds."""

    info: GroupInfo
    memory: mmap.mmap | None = None
    releasing: bool = False

    def change(self, **values: Any) -> None:
        """Replace values of ``info``. The device's lock is held."""
        held_bytes = len(self.memory) if self.memory is not None else 0
        self.info = replace(self.info, held_bytes=held_bytes, **values)

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job; torch passes no ranks for the default group."""
        info = self.info
        return info.ranks[info.rank] if info.ranks else info.rank

    @property
    def is_open(self) -> bool:
        return self.info.state not in (SimState.RELEASED, SimState.LEAKED)

    def __str__(self) -> str:
        return f"group {self.info.name!r} ({self.info.desc})"


# ---------------------------------------------------------------------------------------------
# faults


FaultPoint = Literal["create", "connect", "release", "collective", "barrier", "failure"]
FaultAction = Literal["raise", "stall", "call"]
FaultMoment = Literal["before", "waiting", "after"]


class InjectedFaultError(RuntimeError):
    """Raised by an injected fault."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject: the action, the place, and the time.

    Attributes:
        at: ``create`` (the creating function), ``connect`` (first use of a group), ``release``
            (``shutdown`` or ``abort``), ``collective`` (the start of an operation). On any
            backend: ``barrier`` (of an offload, a reload or a recovery), ``failure`` (this rank is
            about to notify the others that it has failed).
        action: ``raise`` an :class:`InjectedFaultError`; ``stall`` the calling thread until the
            fault is cleared or ``seconds`` have passed, then continue; ``call`` a function.
        group: only groups whose name or description matches this pattern (``fnmatch``: ``1@*``
            is every later generation of group ``1``). A group has no description at ``create``.
        operation: only this method of the group (``allreduce``, ``shutdown``, ``abort``), or
            this barrier (``offload.enter``, ``offload.released``, ``reload.done``).
        rank: only in the process of this global rank.
        nth: the first matching event that fails, counted from 1 since the injection.
        times: number of matching events that fail, from the ``nth`` on; None for all.
        moment: ``before`` the step, which is then not done, or ``after`` it. A group that fails
            after ``create`` is released. A collective has no ``after``. A rank is ``before`` a
            barrier until it arrives; ``waiting`` for other ranks when it has been counted, in
            another thread, where nothing can be raised; ``after`` it has read the decision.
        seconds: maximum duration of ``stall``; None stalls until it is cleared.
        message: text of the error.
        call: for ``call``: called in the thread of the event, with the group's current info, or
            the barrier's :class:`BarrierInfo`. Its exceptions, including ``KeyboardInterrupt``,
            propagate from the step.
    """

    at: FaultPoint
    action: FaultAction = "raise"
    group: str | None = None
    operation: str | None = None
    rank: int | None = None
    nth: int = 1
    times: int | None = 1
    moment: FaultMoment = "before"
    seconds: float | None = None
    message: str = ""
    call: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        allowed = {"at": FaultPoint, "action": FaultAction, "moment": FaultMoment}
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in get_args(values):
                raise ValueError(
                    f"Fault({name}={value!r}): use one of {', '.join(get_args(values))}"
                )
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError(
                f"Fault(nth={self.nth}, times={self.times}): events are counted from 1, and at "
                "least one must fail"
            )
        if (self.action == "call") is not callable(self.call):
            raise ValueError("Fault: the action call and the function call go together")
        moments = {
            "barrier": get_args(FaultMoment),
            "collective": ("before",),
            "failure": ("before",),
        }
        if self.moment not in moments.get(self.at, ("before", "after")):
            raise ValueError(
                f"Fault(at={self.at!r}, moment={self.moment!r}): there is no such moment"
            )
        if self.at in ("barrier", "failure") and self.group is not None:
            raise ValueError(f"Fault(at={self.at!r}, group={self.group!r}): it is of no group")
        if (self.action, self.moment) == ("raise", "waiting"):
            raise ValueError("Fault(moment='waiting'): nothing can be raised there")

    def matches(
        self, at: FaultPoint, operation: str, record: GroupRecord | BarrierInfo, moment: FaultMoment
    ) -> bool:
        if (at, moment) != (self.at, self.moment) or self.operation not in (None, operation):
            return False
        if self.rank not in (None, record.global_rank):
            return False
        if self.group is None or not isinstance(record, GroupRecord):
            return True
        pattern, info = self.group, record.info
        return fnmatchcase(info.name, pattern) or fnmatchcase(info.desc, pattern)


class InjectedFault:
    """Handle of one injected fault; as a context manager it removes it at the end.

    Attributes:
        fault: the injected fault.
        seen: number of matching events so far.
        fired: number of failed events so far.
    """

    def __init__(self, fault: Fault, remove: Callable[[InjectedFault], None]) -> None:
        self.fault = fault
        self.seen = 0
        self.fired = 0
        self._remove = remove
        self._has_fired = threading.Event()
        self._cleared = threading.Event()

    def clear(self) -> None:
        """Remove the fault; stalled threads continue. Idempotent."""
        self._remove(self)
        self._cleared.set()

    def wait_fired(self, timeout: float) -> bool:
        """Wait until the fault has fired (a stall: until it stalls); return whether it has."""
        return self._has_fired.wait(timeout)

    def __enter__(self) -> InjectedFault:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def strikes(self) -> bool:
        """Count one matching event; return whether it fails. The device's lock is held."""
        self.seen += 1
        last = None if self.fault.times is None else self.fault.nth + self.fault.times - 1
        if self.seen < self.fault.nth or (last is not None and self.seen > last):
            return False
        self.fired += 1
        return True

    def act(self, where: str, info: GroupInfo | BarrierInfo) -> None:
        fault = self.fault
        self._has_fired.set()
        if fault.call is not None:
            fault.call(info)
        elif fault.action == "raise":
            raise InjectedFaultError(fault.message or f"injected fault {where}")
        else:
            self._cleared.wait(fault.seconds)


# ---------------------------------------------------------------------------------------------
# the device


class Device:
    """The simulated device of this process: settings, memory, records of groups, faults.

    Thread-safe. No lock is held while a fault acts.
    """

    def __init__(self) -> None:
        # A collection may close a record, or a signal handler read it, while we hold this.
        self.lock = threading.RLock()
        self.settings = Settings()
        self.capacity: int | None = None
        self._live: dict[int, GroupRecord] = {}
        self._ended: deque[GroupRecord] = deque(maxlen=_KEPT)
        self._counts = dict.fromkeys((one.name for one in fields(Stats)), 0)
        self._faults: list[InjectedFault] = []

    # -- memory and counters ---------------------------------------------------------------------

    def open(self, record: GroupRecord) -> None:
        with self.lock:
            self._counts["live"] += 1
            self._counts["created"] += 1
            record.change(serial=self._counts["created"])
            self._live[record.info.serial] = record

    def rename(self, record: GroupRecord, **names: str) -> None:
        with self.lock:
            record.change(**names)

    @property
    def free_bytes(self) -> int | None:
        """Free bytes; None if the memory has no limit."""
        with self.lock:
            return None if self.capacity is None else self.capacity - self._counts["held_bytes"]

    def connect(self, record: GroupRecord, size: int) -> None:
        """Take ``size`` bytes of real memory."""
        with self.lock:
            self._take(size)
        record.memory = _resident(size)
        with self.lock:
            record.change(state=SimState.CONNECTED)
            self._counts["connected"] += 1

    def _take(self, size: int) -> None:
        free = self.free_bytes
        if free is not None and size > free:
            raise DistBackendError(
                f"out of memory: the simulated device has {free} bytes left, and {size} are wanted"
            )
        self._counts["held_bytes"] += size
        self._counts["peak_bytes"] = max(self._counts["peak_bytes"], self._counts["held_bytes"])

    def used(self, record: GroupRecord) -> None:
        with self.lock:
            record.change(collectives=record.info.collectives + 1)
            self._counts["collectives"] += 1

    def close(self, record: GroupRecord, state: SimState) -> None:
        """Return the memory to the operating system. Idempotent: the first state counts."""
        with self.lock:
            if not record.is_open:
                return
            self._counts["held_bytes"] -= record.info.held_bytes
            self._counts["live"] -= 1
            self._counts[state.value] += 1
            memory, record.memory = record.memory, None
            record.change(state=state)
            if memory is not None:
                memory.close()
            self._ended.append(self._live.pop(record.info.serial))

    def stats(self) -> Stats:
        with self.lock:
            return Stats(**self._counts)

    def groups(self, *, ended: bool) -> tuple[GroupInfo, ...]:
        with self.lock:
            records = [*(self._ended if ended else ()), *self._live.values()]
        return tuple(sorted((one.info for one in records), key=lambda info: info.serial))

    # -- faults ----------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> InjectedFault:
        handle = InjectedFault(fault, self.remove)
        with self.lock:
            self._faults.append(handle)
        return handle

    def remove(self, handle: InjectedFault) -> None:
        with self.lock:
            self._faults = [other for other in self._faults if other is not handle]

    def clear_faults(self) -> None:
        for handle in list(self._faults):
            handle.clear()

    def check(
        self,
        at: FaultPoint,
        operation: str,
        record: GroupRecord | BarrierInfo,
        moment: FaultMoment = "before",
    ) -> None:
        """Run the faults that match this event, in the order of their injection."""
        if not self._faults:
            return
        with self.lock:
            due = [
                handle
                for handle in self._faults
                if handle.fault.matches(at, operation, record, moment) and handle.strikes()
            ]
        if isinstance(record, GroupRecord):
            when = "after" if moment == "after" else "at"
            where = f"{when} {at} of {record}, in {operation}"
        else:
            where = f"{moment} {at} {operation}"
        for handle in due:
            handle.act(where, record.info if isinstance(record, GroupRecord) else record)


def _resident(size: int) -> mmap.mmap | None:
    """Private anonymous memory with every page present, outside malloc."""
    if size == 0:
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, size, flags=flags)
