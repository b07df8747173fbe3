"""The backend objects inside a group, with their timeouts, options and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C._distributed_c10d import Backend as CppBackend
from torch._C._distributed_c10d import (
    Store,
)
from torch.distributed import DistError, ProcessGroup
from torch.distributed import distributed_c10d as _c10d

__all__ = [
    "abort_all",
    "abort_groups",
    "add_backends",
    "get_timeouts",
    "group_of_backends",
    "is_communication_error",
    "live_backends",
    "memory_stats",
    "options_of",
    "recovery_settings",
    "release_cautions",
    "set_timeouts",
    "suspend_obstacle",
]


_GLOO = getattr(_c10d, "ProcessGroupGloo", None)


def live_backends(group: ProcessGroup, devices: Sequence[str]) -> dict[str, CppBackend]:
    """The backend objects of a group by device type; devices without one are left out."""
    found: dict[str, CppBackend] = {}
    for device in devices:
        with suppress(RuntimeError, AttributeError):
            found[device] = group._get_backend(torch.device(device))
    return found


def options_of(group: ProcessGroup, devices: Sequence[str]) -> object:
    """The options object of the first of the given backends that has one (NCCL does), or None."""
    for backend in live_backends(group, devices).values():
        options = getattr(backend, "options", None)
        if options is not None and not isinstance(options, getattr(_GLOO, "_Options", ())):
            return cast(object, options)
    return None


def get_timeouts(group: ProcessGroup, devices: Sequence[str]) -> dict[str, timedelta]:
    """Current timeouts by device type, as changed by ``_set_pg_timeout`` or ``set_timeout``."""
    found: dict[str, timedelta] = {}
    for device, backend in live_backends(group, devices).items():
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            found[device] = timeout
    return found


def set_timeouts(group: ProcessGroup, timeouts: Mapping[str, timedelta]) -> None:
    """Give a group's backends the timeouts read by :func:`get_timeouts`. Local, idempotent."""
    now = get_timeouts(group, tuple(timeouts))
    backends = live_backends(group, tuple(timeouts))
    for device, timeout in timeouts.items():
        if device in backends and now.get(device) != timeout:
            cast(Any, backends[device])._set_default_timeout(timeout)


def suspend_obstacle(backend: CppBackend) -> str:
    """Why the communicators of a backend cannot be suspended, in words; empty if they can. Local.

    ``Backend.suspend`` is in torch 2.12 and later; NCCL has it from 2.29.7 on. With
    ``NCCL_CUMEM_ENABLE=0`` NCCL says that it worked and gives nothing back.
    """
    suspend = getattr(type(backend), "suspend", None)
    name = backend.name()
    if suspend is None:
        return f"torch {torch.__version__} cannot suspend {name} communicators (2.12 and later)"
    if suspend is not getattr(CppBackend, "suspend", None):
        return _cumem_obstacle()  # a backend written in Python that has its own
    if not name.startswith("nccl"):
        return f"backend {name} cannot suspend its communicators"
    version = cast(Any, torch.cuda.nccl).version()
    if version < (2, 29, 7):
        shown = ".".join(map(str, version))
        return f"NCCL {shown} cannot suspend communicators (2.29.7 and later)"
    return _cumem_obstacle()


def _cumem_obstacle() -> str:
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 makes a suspend give nothing back"
    return ""


def is_communication_error(error: BaseException) -> bool:
    """Whether an error says that a collective failed, and not the program. Pure.

    Torch's own classes say it. Gloo's errors are plain RuntimeErrors, as seen on torch 2.8 to 2.15.
    """
    if isinstance(error, DistError):
        return True
    return type(error) is RuntimeError and any(part in str(error) for part in _GLOO_SAYS)


def recovery_settings(
    environ: Mapping[str, str], seconds: float
) -> tuple[dict[str, str], list[str]]:
    """Say how NCCL's part of torch must be set for a fault to reach the program. Pure.

    By default its watchdog ends the process after a time-out or an error. By the documentation and
    ``ProcessGroupNCCL.hpp`` of torch 2.8 to 2.15; not seen on a GPU.

    Args:
        environ: the variables to look at. They are read when a group is created.
        seconds: how long an operation of this library waits.

    Returns:
        Settings that are missing; and those that are in the way, in words.
    """
    missing, obstacles = {}, []
    for name, (values, why) in _RECOVERY_SETTINGS.items():
        given = environ.get(name) or environ.get(name.removeprefix("TORCH_"))
        if name == _MONITORING and given == "1":
            with suppress(ValueError):
                if float(environ.get(_HEARTBEAT, "480")) > seconds:
                    continue
        if not given:
            missing[name] = values[0]
        elif given not in values:
            obstacles.append(f"{name}={given}: {why}; set it to {' or '.join(values)}")
    return missing, obstacles


_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_RECOVERY_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": (
        ("1",),
        "a collective that failed raises nothing where it is waited for, and the step goes on",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        ("0", "2"),
        "the watchdog ends the process after an error",
    ),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": (
        ("0",),
        "the watchdog raises errors of the device, which ends the process",
    ),
    _MONITORING: (
        ("0",),
        f"the process is ended if the watchdog hangs for {_HEARTBEAT}, which is no longer than "
        "the timeout given to install",
    ),
}

_GLOO_SAYS = ("/gloo/", "Application timeout caused pair closure", "Connection closed by peer")


def release_cautions(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Say which settings make the release of an NCCL communicator unsafe, and what to do. Pure.

    By ``ProcessGroupNCCL.cpp`` of torch 2.8 to 2.15: with the allocator's hook, each new segment of
    memory is registered with every communicator in a table that ``shutdown()`` does not clear, and
    the dumps that a pipe or a time-out asks for are made by the first default group of the process.
    """
    found = []
    if environ.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0") not in ("", "0"):
        found.append(
            "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is set: torch keeps registering memory "
            "with communicators that were released, and freeing memory can then raise an error; "
            "unset it, or deregister memory pools in on_offload() and register them in on_reload()"
        )
    if environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        found.append(
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set: the flight recorder's pipe is served by the "
            "first default group and is silent after a reload; call "
            "torch._C._distributed_c10d._dump_nccl_trace() instead"
        )
    return found


def memory_stats(backend: CppBackend) -> dict[str, int] | None:
    """Return the bytes that a backend's communicators say they hold; empty if never used.

    Local. Keys as NCCL has them: ``total``, ``suspend`` (what a suspend gives back), ``persist``
    (what it leaves), ``suspended`` (1 while suspended). None if the backend gives no account.
    """
    stats = getattr(backend, "memory_stats", None)
    if stats is None:
        return None
    try:
        return dict(stats())
    except RuntimeError as error:
        return {} if "initialized" in str(error) else None


def group_of_backends(
    rank: int, size: int, store: Store, backends: Mapping[str, tuple[str, CppBackend]]
) -> ProcessGroup:
    """A bare group, in no table, that serves the given devices with existing backends.

    Args:
        rank: rank in the group.
        size: number of members.
        store: the store of the group.
        backends: by device type, the backend's name and the object.
    """
    group = ProcessGroup(store, rank, size)
    add_backends(group, backends)
    name, _ = next(iter(backends.values()))
    group._set_default_backend(_backend_type(name))
    return group


def add_backends(group: ProcessGroup, backends: Mapping[str, tuple[str, CppBackend]]) -> None:
    """Mount existing backends on a group, for devices that it does not serve yet. Local."""
    for device, (name, backend) in backends.items():
        group._register_backend(torch.device(device), _backend_type(name), backend)


def _backend_type(name: str) -> Any:
    return _c10d.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)


def abort_groups(groups: Sequence[ProcessGroup]) -> None:
    """Abort some groups, not WORLD, in one order (``_abort_process_group``). Waits for no peer."""
    for group in groups:
        _c10d._abort_process_group(group)


def abort_all() -> None:
    """Abort all groups of this process (``_abort_process_group``). Blocking; waits for no peer.

    All in one call: aborting the communicators of one job one by one hung (pytorch#119797).
    """
    _c10d._abort_process_group()
