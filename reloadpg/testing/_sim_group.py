"""Process groups of the simulated accelerator, each with memory and a gloo transport.

A group connects in its first operation: it then allocates its memory and builds its gloo transport.
Gloo connects pairs of ranks on demand, so the first operation may be a send between two of many
members, or a ring of sends.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from reloadpg.c10d import backends, stores, tables
from reloadpg.groups import dispatch
from reloadpg.rendezvous.worker_thread import LibraryThread

from ._sim_state import DEVICES, NAME, Device, GroupInfo, Settings, SimState

OPERATIONS = dispatch.COLLECTIVES | {"monitored_barrier", "_start_coalescing"}
"""Methods that need a communicator, and connect it."""


class Communicator:
    """The memory and the transport that a group owns from its first use to its end.

    It is also the group's backend. To ``isinstance`` it is a ``ProcessGroupGloo``, since torch sets
    the timeouts of the backends that it knows. The transport has the timeout set by the first use.
    """

    def __init__(
        self, info: GroupInfo, store: Store, settings: Settings, accelerator: Device
    ) -> None:
        self.info = info
        self._store = store
        self._settings = settings
        self._accelerator = accelerator
        self._early = backends.gloo_options(info.timeout)
        self._gloo: Any = None
        self._group: ProcessGroup | None = None
        self._connecting = threading.Lock()
        self._changing = threading.RLock()  # a collection may release it while we hold this
        accelerator.open(info)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return ProcessGroupGloo

    def __getattr__(self, name: str) -> Any:
        """The transport's; calling a method connects it."""
        if not callable(_gloo(name)):
            return getattr(self._gloo, name, None)

        def method(*args: Any, **kwargs: Any) -> Any:
            _preparation(name)(self, name)
            return getattr(self._gloo, name)(*args, **kwargs)

        return method

    def use(self, operation: str) -> ProcessGroup:
        """The transport for one operation; connects at the first."""
        group = self.transport(operation)
        self._accelerator.check("collective", operation, self.info)
        self._accelerator.used(self.info)
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
        self._accelerator.check("connect", operation, info)
        options = backends.gloo_options(backends.timeout_of(self._early), _device(lazy=not eager))
        # A separate connection: gloo waits in it for its peers, and a wait locks the store client.
        store = stores.clone_store(self._store)
        rank, size = info.rank, info.size
        gloo = ProcessGroupGloo(store, rank, size, options)
        given = dict.fromkeys(DEVICES, ("gloo", gloo))
        group = backends.group_of_backends(rank, size, self._store, given)
        backends.set_name(group, info.name)
        with self._changing:
            self.check_alive(operation)  # it may have been aborted while this thread waited
            self._accelerator.connect(info, self._settings.bytes_per_communicator)
            self._gloo, self._group = gloo, group
        self._accelerator.check("connect", operation, info, "after")
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
        if self._begin_release("shutdown"):
            self._take(SimState.RELEASED)
            self._accelerator.check("release", "shutdown", self.info, "after")

    def abort(self) -> None:
        """Like :meth:`shutdown`, but waits for nothing. Idempotent."""
        if self._begin_release("abort"):
            _drop_later(self._take(SimState.RELEASED))
            self._accelerator.check("release", "abort", self.info, "after")

    def collected(self) -> None:
        """The group object was collected: a leak, unless a release was attempted."""
        if self.info.is_open:
            state = SimState.RELEASED if self.info.releasing else SimState.LEAKED
            _drop_later(self._take(state))

    def _begin_release(self, operation: str) -> bool:
        if not self.info.is_open:
            return False
        self.info.releasing = True
        self._accelerator.check("release", operation, self.info)
        time.sleep(self._settings.release_seconds)
        return True

    def _take(self, state: SimState) -> list[Any]:
        with self._changing:
            parts: list[Any] = [self._gloo, self._group]
            self._gloo = self._group = None
            self._accelerator.close(self.info, state)
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


def _gloo(name: str) -> Any:
    return getattr(ProcessGroupGloo, name)


def _preparation(name: str) -> Callable[[Communicator, str], ProcessGroup]:
    return Communicator.use if name in OPERATIONS else Communicator.transport


def _device(*, lazy: bool) -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _gloo("create_device")(interface=interface, lazy_init=lazy)
    return _gloo("create_default_device")(lazy_init=lazy)


# ---------------------------------------------------------------------------------------------
# the group


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
        finalizer = weakref.finalize(self, self._communicator.collected)
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
        where = f"rank {info.rank} of {info.size}"
        return f"<SimulatedProcessGroup {info.name!r} ({info.desc}) {where} {info.state}>"


for _name in dispatch.DISPATCHED - {*vars(SimulatedProcessGroup)}:
    setattr(SimulatedProcessGroup, _name, _forwarding(_name))
for _name in vars(dispatch.Dispatch):
    if _name.startswith("supports_"):  # C++ looks for a C++ backend and raises
        setattr(SimulatedProcessGroup, _name, False)
