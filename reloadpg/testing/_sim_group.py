"""The process group of the simulated accelerator, as torch and its users see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, ProcessGroupGloo

from reloadpg import c10d
from reloadpg.groups import dispatch as surface

from ._sim_ledger import GroupInfo, Record
from ._sim_transport import DEVICES, NAME, OPERATIONS, Communicator, Process, SimBackend

__all__ = ["SimulatedProcessGroup"]


class _Forwarding(ProcessGroup):
    """A ``ProcessGroup`` whose operations find the transport of ``self._communicator``."""


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: SimulatedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._communicator.use(name), name)(*args, **kwargs)
        return surface.COMPLETED_WORK if result is None and name in surface.COLLECTIVES else result

    operate.__name__ = name
    return operate


def _control(name: str) -> Callable[..., Any]:
    def forward(self: SimulatedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._communicator.transport(name), name)(*args, **kwargs)

    forward.__name__ = name
    return forward


for _name in surface.dispatched():
    setattr(_Forwarding, _name, _operation(_name) if _name in OPERATIONS else _control(_name))
for _name in vars(surface.Dispatch):
    if _name.startswith("supports_"):  # C++ looks for a backend of its own, and raises
        setattr(_Forwarding, _name, False)


class SimulatedProcessGroup(_Forwarding):
    """A process group of the simulated accelerator.

    Made by ``torch.distributed`` through the registered creating function, never by hand. Torch
    uses it as the group itself, not as a backend within one.
    """

    def __init__(self, process: Process, record: Record, store: Store) -> None:
        # The (store, rank, size) form, the only one in torch's stubs, fails for subclasses.
        super().__init__(record.rank, record.size)  # type: ignore[call-arg, arg-type]
        self._communicator = Communicator(process, record, store)
        self._store = store.underlying_store if isinstance(store, PrefixStore) else store
        self._listed = False
        self._symm_mem = False
        finalizer = weakref.finalize(self, self._communicator.collected)
        finalizer.atexit = False

    @property
    def info(self) -> GroupInfo:
        return self._communicator.record.info()

    def memory_stats(self) -> dict[str, int]:
        """Bytes that the communicator holds now, by NCCL's names. Local."""
        return self._communicator.memory_stats()

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._communicator.record.name

    @property
    def group_desc(self) -> str:
        return self._communicator.record.desc

    def getGroupName(self) -> str:  # noqa: N802 - looked up by C++
        return self._communicator.record.name

    def getGroupDesc(self) -> str:  # noqa: N802 - looked up by C++
        return self._communicator.record.desc

    def getBackendName(self) -> str:  # noqa: N802 - looked up by C++
        return NAME  # not "gloo": DDP's logger would look for a gloo backend in the C++ object

    def _get_backend_name(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._communicator.record.name = name

    def _set_group_desc(self, desc: str) -> None:
        self._communicator.record.desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch still sets the group up: torch 2.15 attaches its flight recorder to a
        # group that has devices, and fails ("Could not find the default backend type 0").
        self._listed = self._listed or c10d.is_known(self)
        return [torch.device(device) for device in DEVICES] if self._listed else []

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        return self._symm_mem

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: bool) -> None:
        self._symm_mem = value

    def get_group_store(self) -> Store:
        return self._store

    def _get_backend(self, device: torch.device) -> SimBackend:
        if torch.device(device).type not in DEVICES:
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}"
            )
        return self._communicator.alive("_get_backend")

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta, *args: Any) -> None:
        self._communicator.alive("set_timeout").set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        backend = self._communicator.alive("_get_sequence_number_for_group")
        if not backend.is_ready:
            return 0
        return cast(int, cast(Any, ProcessGroupGloo)._get_sequence_number_for_group(backend))

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: the transport counts from 0 on all ranks."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing to wait for: gloo runs no completion hooks."""

    def shutdown(self) -> None:
        """Release the communicator; waits for operations in flight. Local, idempotent."""
        self._communicator.end("shutdown")

    def abort(self) -> None:
        """Release the communicator; waits for nothing. Local, idempotent."""
        self._communicator.abort("abort")

    def __repr__(self) -> str:
        record = self._communicator.record
        return (
            f"<SimulatedProcessGroup {record.name!r} ({record.desc}) rank {record.rank} of "
            f"{record.size} {record.state}>"
        )
