"""The device that a process uses, and the backend that serves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

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


def parse_backend(backend: str) -> dict[str, str]:
    """Backend by device type; one backend for all is under ``""``. Local, pure."""
    text = backend.lower() if isinstance(backend, str) else ""
    pairs = [item.split(":") if ":" in item else ["", item] for item in text.split(",")]
    parsed = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1]}
    if len(parsed) != len(pairs) or ("" in parsed and len(parsed) > 1):
        raise _error(f"backend={backend!r} is neither one name nor device:name pairs")
    unknown = sorted(set(parsed.values()) - {name.lower() for name in tables.known_backends()})
    if unknown:
        known = ", ".join(sorted(tables.known_backends() - {"undefined"}))
        raise _error(f"backend={backend!r}: {unknown[0]!r} is unknown; known are {known}")
    for name in parsed.values():
        available = getattr(dist, f"is_{name}_available", None)
        if available is not None and not available():
            raise _error(f"backend={backend!r}: this torch was built without {name}")
    return parsed


def parse_device(device: torch.device | str | None) -> torch.device | None:
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
    backend: str | None,
    device: torch.device | str | None,
    local_rank: int | None,
) -> Placement:
    """Choose device and backend of the process with this local rank. Local.

    Without a device: the accelerator, if there is one and the given backend serves it; otherwise
    the CPU. Without a backend: the one that torch has registered for the device's type.
    """
    named = parse_backend(backend) if backend is not None else {}
    wanted = parse_device(device)
    if wanted is None:
        wanted = accelerator()
        if wanted is None or (named and (_is_cpu_only(named) or not _serves(named, wanted))):
            wanted = torch.device("cpu")
    chosen = wanted if wanted.type == "cpu" else _visible(wanted, local_rank)
    if backend is None:
        served = dist.Backend.default_device_backend_map
        if chosen.type not in served:
            raise _error(f"No backend is registered for device type {chosen.type!r}")
        backend = str(served[chosen.type])
        parse_backend(backend)
    elif "" not in named and chosen.type not in named:
        raise _error(f"backend={backend!r} names no backend for device {chosen}")
    elif not _serves(named, chosen):
        raise _error(f"backend={backend!r} does not serve device {chosen}")
    return Placement(chosen, backend.lower())


def _is_cpu_only(named: dict[str, str]) -> bool:
    return all(kind in ("", "cpu") and name in _CPU_ONLY for kind, name in named.items())


def _serves(named: dict[str, str], device: torch.device) -> bool:
    name = named.get(device.type) or named.get("")
    capability = dist.Backend.backend_capability
    return name is not None and device.type in capability.get(name, [device.type])


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
