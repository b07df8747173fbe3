"""Simulated accelerator: backend ``sim``, for jobs and tests on machines without a GPU.

::

    from reloadpg.testing import simulated

    simulated.register()
    torch.distributed.init_process_group("sim")

Its groups behave like an accelerator's: creating one is local, a communicator is created at the
first use and holds memory until it is released, and a group cannot be used after its ``shutdown``
or ``abort``. The memory is real, so it can be measured from outside the process; the results are
gloo's, so they can be compared bit for bit. Everything here is per process. NCCL's own rules, such
as for a suspend, are in the stand-ins for NCCL (:mod:`reloadpg.testing.standins`).

A test can inject faults (:mod:`reloadpg.testing.faults`)::

    with faults.inject(faults.Fault("create", rank=1, nth=3, message="no memory")):
        reloadpg.reload()  # fails in the third creation of rank 1

Limits: it has no streams, and operations overlap only as in gloo. It cannot be part of a mixed
group (``cpu:gloo,privateuseone:sim``), since torch uses a group from a Python creating function for
all devices. It cannot be split.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import (
    Backend,
    DistBackendError,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
)

from reloadpg.c10d import backends, memory, stores, tables
from reloadpg.groups import dispatch
from reloadpg.testing.faults import FaultMoment, FaultPoint, check
from reloadpg.threads import LibraryThread

__all__ = [
    "NAME",
    "GroupInfo",
    "Stats",
    "configure",
    "groups",
    "register",
    "stats",
]

NAME = "sim"
DEVICES = ("cpu", "privateuseone")
"""It serves a device other than the CPU, like an accelerator's backend, and also the CPU, so that
all of torch.distributed can run on it without an accelerator."""


@dataclass(frozen=True)
class Settings:
    bytes_per_communicator: int = 32 << 20
    eager: bool = False


@dataclass(frozen=True)
class Stats:
    """Counters of one process since it registered the backend, or was forked.

    Attributes:
        created: number of created groups.
        released: number of groups that were shut down, aborted or collected.
        live: number of existing groups.
        held_bytes: memory that communicators hold.
    """

    created: int
    released: int
    live: int
    held_bytes: int


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
        state: ``created``, ``connected`` or ``released``.
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
    state: Literal["created", "connected", "released"] = "created"
    held_bytes: int = 0
    collectives: int = 0
    serial: int = 0
    memory: mmap.mmap | None = None

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job; torch passes no ranks for the default group."""
        return self.ranks[self.rank] if self.ranks else self.rank

    @property
    def is_open(self) -> bool:
        return self.state != "released"

    def check(self, at: FaultPoint, operation: str, moment: FaultMoment = "before") -> None:
        """Run the faults that a test has injected at this step."""
        check(at, operation, self.global_rank, self, moment, (self.name, self.desc))

    def __str__(self) -> str:
        return f"group {self.name!r} ({self.desc})"


# -- the device -----------------------------------------------------------------------------------


class Device:
    """The simulated device of this process: settings, memory, groups. Thread-safe."""

    def __init__(self) -> None:
        # A collection may end a group while this is held.
        self.lock = threading.RLock()
        self.settings = Settings()
        self.live: dict[int, GroupInfo] = {}
        self.created = 0

    def open(self, info: GroupInfo) -> None:
        with self.lock:
            self.created += 1
            info.serial = self.created
            self.live[info.serial] = info

    def connect(self, info: GroupInfo, size: int) -> None:
        """Take ``size`` bytes of real memory."""
        info.memory = _resident(size)
        with self.lock:
            info.held_bytes, info.state = size, "connected"

    def close(self, info: GroupInfo) -> None:
        """Return the memory to the operating system. Idempotent."""
        with self.lock:
            if not info.is_open:
                return
            memory, info.memory = info.memory, None
            info.held_bytes, info.state = 0, "released"
            if memory is not None:
                memory.close()
            del self.live[info.serial]


def _resident(size: int) -> mmap.mmap | None:
    """Private anonymous memory with every page present, outside malloc."""
    if size == 0:
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, size, flags=flags)


_device = Device()


# -- the communicator -----------------------------------------------------------------------------


OPERATIONS = dispatch.COLLECTIVES | {"monitored_barrier", "_start_coalescing"}
"""Methods that need a communicator, and connect it."""


class Communicator:
    """The memory and the transport that a group owns from its first use to its end.

    A group connects in its first operation: it then allocates its memory and builds its gloo
    transport. Gloo connects pairs of ranks on demand, so the first operation may be a send between
    two of many members, or a ring of sends.

    It is also the group's backend. To ``isinstance`` it is a ``ProcessGroupGloo``, since torch sets
    the timeouts of the backends that it knows. The transport has the timeout set by the first use.
    """

    supports_splitting = False
    """Not as the transport: with a bound default group, torch 2.15 would split that."""

    def __init__(self, info: GroupInfo, store: Store, settings: Settings) -> None:
        self.info = info
        self._store = store
        self._settings = settings
        self._early = backends.gloo_options(info.timeout)
        self._gloo: Any = None
        self._group: ProcessGroup | None = None
        self._connecting = threading.Lock()
        self._changing = threading.RLock()  # a collection may release it while we hold this
        _device.open(info)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return ProcessGroupGloo

    def __getattr__(self, name: str) -> Any:
        """The transport's; calling a method connects it."""
        if not callable(getattr(ProcessGroupGloo, name)):
            return getattr(self._gloo, name, None)

        def method(*args: Any, **kwargs: Any) -> Any:
            _preparation(name)(self, name)
            return getattr(self._gloo, name)(*args, **kwargs)

        return method

    def use(self, operation: str) -> ProcessGroup:
        """The transport for one operation; connects at the first."""
        group = self.transport(operation)
        self.info.check("collective", operation)
        with _device.lock:
            self.info.collectives += 1
        return group

    def transport(self, operation: str) -> ProcessGroup:
        group = self._group
        if group is not None:
            return group
        with self._connecting:
            return self._group or self._connect(operation, eager=False)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Connect all members now. Collective over the group, blocking, idempotent."""
        self.check_alive("eager_connect")
        with self._connecting:
            if self._group is None:
                self._connect("eager_connect", eager=True)

    def check_alive(self, operation: str) -> None:
        """Raise if the group was shut down or aborted."""
        info = self.info
        if not info.is_open:
            raise DistBackendError(
                f"{operation} on {info} of the simulated accelerator: its communicator was "
                f"{info.state}. Create a new group."
            )

    def _connect(self, operation: str, *, eager: bool) -> ProcessGroup:
        self.check_alive(operation)
        info = self.info
        info.check("connect", operation)
        options = backends.gloo_options(
            backends.timeout_of(self._early), _gloo_device(lazy=not eager)
        )
        # A separate connection: gloo waits in it for its peers, and a wait locks the store client.
        store = stores.clone_store(self._store)
        rank, size = info.rank, info.size
        gloo = ProcessGroupGloo(store, rank, size, options)
        given = dict.fromkeys(DEVICES, ("gloo", gloo))
        group = backends.group_of_backends(rank, size, self._store, given)
        backends.set_name(group, info.name)
        with self._changing:
            self.check_alive(operation)  # it may have been aborted while this thread waited
            _device.connect(info, self._settings.bytes_per_communicator)
            self._gloo, self._group = gloo, group
        info.check("connect", operation, "after")
        return group

    # -- the backend's methods ------------------------------------------------------------------

    def rank(self) -> int:
        return self.info.rank

    def size(self) -> int:
        return self.info.size

    def name(self) -> str:
        return NAME

    _get_backend_name = name

    @property
    def options(self) -> Any:
        return self._early if self._gloo is None else self._gloo.options

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._early = backends.gloo_options(timeout)
        if self._gloo is not None:
            backends.set_timeout(self._gloo, timeout)

    set_timeout = _set_default_timeout

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self._gloo is None else backends.sequence_number(self._gloo)

    def get_error(self) -> Any:
        """Return that no watchdog has found an error. Local; connects nothing."""
        return backends.NO_ERROR

    def memory_stats(self) -> dict[str, int]:
        """Bytes that it holds, by NCCL's name. Local. Raises if the communicator was never used."""
        self.check_alive("memory_stats")
        if self._group is None:
            raise DistBackendError(f"memory_stats on {self.info}: it is not initialized")
        return {"total": self.info.held_bytes}

    def shutdown(self) -> None:
        """Free the memory and drop the transport; waits for operations in flight. Idempotent."""
        self._release("shutdown", list.clear)

    def abort(self) -> None:
        """Like :meth:`shutdown`, but waits for nothing. Idempotent."""
        self._release("abort", _drop_later)

    def _release(self, operation: str, drop: Callable[[list[Any]], object]) -> None:
        if self.info.is_open:
            self.info.check("release", operation)
            drop(self._take())
            self.info.check("release", operation, "after")

    def _take(self) -> list[Any]:
        with self._changing:
            parts: list[Any] = [self._gloo, self._group]
            self._gloo = self._group = None
            _device.close(self.info)
        return parts


def _drop_later(parts: list[Any]) -> None:
    """Drop a backend and its transport without waiting.

    Destroying a gloo backend waits for its pending operations, until their timeout if a peer has
    ended. So a thread does it and must hold the last reference.
    """
    if parts[0] is None:
        return
    with suppress(RuntimeError):
        parts[0].abort()
    with suppress(RuntimeError):  # the interpreter is ending: no new threads
        LibraryThread(target=parts.clear, name="sim-abort", daemon=True).start()


def _preparation(name: str) -> Callable[[Communicator, str], ProcessGroup]:
    return Communicator.use if name in OPERATIONS else Communicator.transport


def _gloo_device(*, lazy: bool) -> Any:
    gloo: Any = ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return gloo.create_device(interface=interface, lazy_init=lazy)
    return gloo.create_default_device(lazy_init=lazy)


# -- the group ------------------------------------------------------------------------------------


def _forwarding(name: str) -> Callable[..., Any]:
    prepare = _preparation(name)

    def forward(self: SimulatedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        result = getattr(prepare(self._communicator, name), name)(*args, **kwargs)
        completed = result is None and name in dispatch.COLLECTIVES
        return dispatch.COMPLETED_WORK if completed else result

    forward.__name__ = name
    return forward


class SimulatedProcessGroup(ProcessGroup):
    """A process group of the simulated accelerator.

    Made by ``torch.distributed`` through the registered creating function, never by hand. Torch
    uses it as the group itself, not as a backend within one.
    """

    def __init__(self, communicator: Communicator, store: Store) -> None:
        # The (store, rank, size) form, the only one in torch's stubs, fails for subclasses.
        info = communicator.info
        super().__init__(info.rank, info.size)  # type: ignore[call-arg, arg-type]
        self._communicator = communicator
        self._store = store.underlying_store if isinstance(store, PrefixStore) else store
        self._listed = False
        finalizer = weakref.finalize(self, lambda: _drop_later(communicator._take()))
        finalizer.atexit = False

    def _get_backend_name(self) -> str:
        return NAME  # not "gloo": DDP's logger would look for a gloo backend in the C++ object

    def _get_name(self) -> str:
        return self._communicator.info.name

    def _get_desc(self) -> str:
        return self._communicator.info.desc

    name = getBackendName = _get_backend_name  # noqa: N815 - C++ looks this and the next ones up
    getGroupName, getGroupDesc = _get_name, _get_desc  # noqa: N815
    group_name, group_desc = property(_get_name), property(_get_desc)  # type: ignore[assignment]

    def _set_group_name(self, name: str) -> None:
        self._communicator.info.name = name

    def _set_group_desc(self, desc: str) -> None:
        self._communicator.info.desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch still sets the group up: torch 2.15 attaches its flight recorder to a
        # group that has devices, and fails ("Could not find the default backend type 0").
        self._listed = self._listed or tables.is_known(self)
        return [torch.device(device) for device in DEVICES] if self._listed else []

    use_pg_for_symm_mem_rendezvous = False

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in {torch.device(name).type for name in DEVICES}:
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}"
            )
        self._communicator.check_alive("_get_backend")
        return self._communicator

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta, *args: Any) -> None:
        self._communicator.check_alive("set_timeout")
        self._communicator.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        self._communicator.check_alive("_get_sequence_number_for_group")
        return self._communicator._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: the transport counts from 0 on all ranks."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing to wait for: gloo runs no completion hooks."""

    def shutdown(self) -> None:
        """Release the communicator; waits for operations in flight. Local, idempotent."""
        self._communicator.shutdown()

    def abort(self) -> None:
        """Release the communicator; waits for nothing. Local, idempotent."""
        self._communicator.abort()

    def __repr__(self) -> str:
        info = self._communicator.info
        return f"<simulated {info}, rank {info.rank} of {info.size}, {info.state}>"


for _name in dispatch.DISPATCHED - {*vars(SimulatedProcessGroup)}:
    setattr(SimulatedProcessGroup, _name, _forwarding(_name))
for _name in vars(dispatch.Dispatch):
    if _name.startswith("supports_"):  # C++ looks for a C++ backend and raises
        setattr(SimulatedProcessGroup, _name, False)


# -- the module's functions -----------------------------------------------------------------------


def register() -> None:
    """Make ``sim`` a backend of ``torch.distributed``. Local, idempotent, thread-safe."""
    with _device.lock:
        if NAME not in Backend.backend_list:
            Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
        memory.add_source("simulated", memory.Source(lambda: stats().held_bytes))


def configure(
    *,
    bytes_per_communicator: int | None = None,
    eager: bool | None = None,
) -> None:
    """Set properties of groups that are created later. Local.

    None leaves a setting unchanged.

    Args:
        bytes_per_communicator: bytes that each communicator holds from its first use (default: 32
            MiB).
        eager: whether creation connects all members, like NCCL's with a bound device: collective
            and blocking (default: False).
    """
    given = {"bytes_per_communicator": bytes_per_communicator, "eager": eager}
    changed: Any = {name: value for name, value in given.items() if value is not None}
    _device.settings = replace(_device.settings, **changed)


def stats() -> Stats:
    """Counters and held memory of this process. Local; a signal handler may call it."""
    with _device.lock:
        created, live = _device.created, list(_device.live.values())
        held = sum(info.held_bytes for info in live)
        return Stats(created, created - len(live), len(live), held)


def groups() -> tuple[GroupInfo, ...]:
    """The groups of this process, in order of creation. Local; a signal handler may call it."""
    with _device.lock:
        return tuple(_device.live.values())


def _create(received: Any, options: object) -> SimulatedProcessGroup:
    """The creating function: what torch calls, with what it received from its caller."""
    info = GroupInfo(
        name=str(received.group_id),
        desc="",
        rank=int(received.group_rank),
        size=int(received.group_size),
        ranks=tuple(received.global_ranks_in_group),
        timeout=received.timeout,
        pg_options=options,
    )
    settings = _device.settings
    info.check("create", "create")
    communicator = Communicator(info, received.store, settings)
    group = SimulatedProcessGroup(communicator, received.store)
    try:
        if settings.eager:
            communicator.eager_connect_single_device()
        info.check("create", "create", "after")
    except BaseException:
        group.abort()
        raise
    return group
