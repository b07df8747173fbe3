"""State of the simulated accelerator in one process: settings, memory and counters, faults.

A signal handler may call everything here: locks are reentrant.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch.distributed import DistBackendError

NAME = "sim"
DEVICES = ("cpu", "privateuseone")
"""It serves a device other than the CPU, like an accelerator's backend, and also the CPU, so that
all of torch.distributed can run on it without an accelerator."""


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
        collectives: number of collective and point-to-point operations that were started.
    """

    created: int
    connected: int
    released: int
    leaked: int
    live: int
    held_bytes: int
    collectives: int


@dataclass(eq=False)
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
    releasing: bool = False
    """Whether a release was begun."""
    memory: mmap.mmap | None = None

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job; torch passes no ranks for the default group."""
        return self.ranks[self.rank] if self.ranks else self.rank

    @property
    def is_open(self) -> bool:
        return self.state not in (SimState.RELEASED, SimState.LEAKED)

    def __str__(self) -> str:
        return f"group {self.name!r} ({self.desc})"


@dataclass(frozen=True)
class BarrierInfo:
    """A barrier, or the next one of a rank that has failed.

    Attributes:
        name: the operation and the phase: ``reload.enter``.
        global_rank: rank of this process.
    """

    name: str
    global_rank: int


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
        self, at: FaultPoint, operation: str, info: GroupInfo | BarrierInfo, moment: FaultMoment
    ) -> bool:
        if (at, moment) != (self.at, self.moment) or self.operation not in (None, operation):
            return False
        if self.rank not in (None, info.global_rank):
            return False
        if self.group is None or not isinstance(info, GroupInfo):
            return True
        return fnmatchcase(info.name, self.group) or fnmatchcase(info.desc, self.group)


class InjectedFault:
    """Handle of one injected fault; as a context manager it removes it at the end.

    Attributes:
        fault: the injected fault.
        fired: number of failed events so far.
    """

    def __init__(self, fault: Fault, remove: Callable[[InjectedFault], None]) -> None:
        self.fault = fault
        self._seen = 0
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
        self._seen += 1
        last = None if self.fault.times is None else self.fault.nth + self.fault.times - 1
        if self._seen < self.fault.nth or (last is not None and self._seen > last):
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
    """The simulated device of this process: settings, memory, groups, faults.

    Thread-safe. No lock is held while a fault acts.
    """

    def __init__(self) -> None:
        # A collection may end a group while this is held.
        self.lock = threading.RLock()
        self.settings = Settings()
        self.capacity: int | None = None
        self.live: dict[int, GroupInfo] = {}
        self.counts = dict.fromkeys((one.name for one in fields(Stats)), 0)
        self.faults: list[InjectedFault] = []

    def open(self, info: GroupInfo) -> None:
        with self.lock:
            self.counts["live"] += 1
            self.counts["created"] += 1
            info.serial = self.counts["created"]
            self.live[info.serial] = info

    @property
    def free_bytes(self) -> int | None:
        """Free bytes; None if the memory has no limit."""
        with self.lock:
            return None if self.capacity is None else self.capacity - self.counts["held_bytes"]

    def connect(self, info: GroupInfo, size: int) -> None:
        """Take ``size`` bytes of real memory."""
        with self.lock:
            self._take(size)
        info.memory = _resident(size)
        with self.lock:
            info.held_bytes, info.state = size, SimState.CONNECTED
            self.counts["connected"] += 1

    def _take(self, size: int) -> None:
        free = self.free_bytes
        if free is not None and size > free:
            raise DistBackendError(
                f"out of memory: the simulated device has {free} bytes left, and {size} are wanted"
            )
        self.counts["held_bytes"] += size

    def used(self, info: GroupInfo) -> None:
        with self.lock:
            info.collectives += 1
            self.counts["collectives"] += 1

    def close(self, info: GroupInfo, state: SimState) -> None:
        """Return the memory to the operating system. Idempotent: the first state counts."""
        with self.lock:
            if not info.is_open:
                return
            self.counts["held_bytes"] -= info.held_bytes
            self.counts["live"] -= 1
            self.counts[state.value] += 1
            memory, info.memory = info.memory, None
            info.held_bytes, info.state = 0, state
            if memory is not None:
                memory.close()
            del self.live[info.serial]

    def remove(self, handle: InjectedFault) -> None:
        with self.lock:
            self.faults = [other for other in self.faults if other is not handle]

    def check(
        self,
        at: FaultPoint,
        operation: str,
        info: GroupInfo | BarrierInfo,
        moment: FaultMoment = "before",
    ) -> None:
        """Run the faults that match this event, in the order of their injection."""
        if not self.faults:
            return
        with self.lock:
            due = [
                handle
                for handle in self.faults
                if handle.fault.matches(at, operation, info, moment) and handle.strikes()
            ]
        where = f"{moment} {at} {operation}"
        if isinstance(info, GroupInfo):
            when = "after" if moment == "after" else "at"
            where = f"{when} {at} of {info}, in {operation}"
        for handle in due:
            handle.act(where, info)


def _resident(size: int) -> mmap.mmap | None:
    """Private anonymous memory with every page present, outside malloc."""
    if size == 0:
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, size, flags=flags)
