"""The device of a process, and the backend that serves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from ..c10d import tables
from ..errors import InvalidOptionError

_CPU_ONLY = frozenset({"gloo", "mpi", "fake"})


@dataclass(frozen=True)
class Placement:
    """Device and backend of a rank."""

    device: torch.device
    """With an index for accelerators."""
    backend: str

    def use(self) -> None:
        """Make the device current. Local."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).set_device(self.device.index)


def backends_by_device(backend: str) -> dict[str, str]:
    """The backend of each type of device that this one serves, as torch reads it. Local."""
    try:
        found = BackendConfig(Backend(backend)).get_device_backend_map()
    except ValueError as error:
        raise _error(f"backend={backend!r} is neither one name nor device:name pairs") from error
    by_device = {kind: str(name) for kind, name in found.items()}
    for name in by_device.values():
        if name not in {known.lower() for known in tables.known_backends()}:
            known = ", ".join(sorted(tables.known_backends() - {"undefined"}))
            raise _error(f"backend={backend!r}: {name!r} is unknown; known are {known}")
        available = getattr(dist, f"is_{name}_available", None)
        if available is not None and not available():
            raise _error(f"backend={backend!r}: this torch was built without {name}")
    return by_device


def parse_device(device: torch.device | str | None) -> torch.device | None:
    """The device that a program names, as torch reads it. Local."""
    try:
        return torch.device(device) if device is not None else None
    except (RuntimeError, TypeError) as error:
        raise _error(f"device={device!r} is not a device") from error


def accelerator() -> torch.device | None:
    """The accelerator of this process, in use or not; None without one. Local."""
    # Unlike torch.cuda.is_available(), this calls no device runtime in a CPU build.
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def choose_placement(
    backend: str | None, wanted: torch.device | None, local_rank: int | None
) -> Placement:
    """Choose device and backend of the process with this local rank. Local.

    Without a device: the accelerator, if there is one and the given backend serves it; otherwise
    the CPU. Without a backend: the one that torch has registered for the device's type.
    """
    named = backends_by_device(backend) if backend is not None else {}
    if wanted is None:
        wanted = accelerator()
        for_cpu = backend is not None and backend.lower() in _CPU_ONLY
        if wanted is None or for_cpu or (named and wanted.type not in named):
            wanted = torch.device("cpu")
    chosen = wanted if wanted.type == "cpu" else _visible(wanted, local_rank)
    if backend is None:
        served = dist.Backend.default_device_backend_map
        if chosen.type not in served:
            raise _error(f"No backend is registered for device type {chosen.type!r}")
        backend = str(served[chosen.type])
        backends_by_device(backend)
    elif chosen.type not in named:
        raise _error(f"backend={backend!r} does not serve device {chosen}")
    return Placement(chosen, backend.lower())


def _visible(wanted: torch.device, local_rank: int | None) -> torch.device:
    try:
        count = int(torch.get_device_module(wanted.type).device_count())
    except (RuntimeError, AttributeError) as error:
        raise _error(f"device={str(wanted)!r} has a type that this torch cannot use") from error
    visible = f"{count} {wanted.type} devices are visible"
    if wanted.index is not None:
        if wanted.index >= count:
            raise _error(f"device={str(wanted)!r}, but {visible}")
        return wanted
    if count == 1:
        return torch.device(wanted.type, 0)  # the launcher makes one device visible per task
    if local_rank is None:
        raise _error(
            f"LOCAL_RANK is not set, so this process's device is unknown: {visible}. Set "
            f"LOCAL_RANK, or pass device="
        )
    if local_rank >= count:
        raise _error(f"local_rank={local_rank} has no {wanted.type} device: {count} are visible")
    return torch.device(wanted.type, local_rank)


def _error(what: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{what}. Nothing was started. Correct the argument, or the devices that the launcher "
        f"makes visible."
    )
