"""The backend objects inside a group: lookup, options, state, errors and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from glob import glob
from pathlib import Path
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as _cpp
from torch.distributed import DistBackendError, ProcessGroup, Store, Work
from torch.distributed import distributed_c10d as _c10d
from torch.futures import Future

from ..errors import GroupDestroyedError, GroupOffloadedError
from . import devices
from .tables import close_coalescing, device_backends, known_groups, label_of, world

GLOO = getattr(_c10d, "ProcessGroupGloo", None)
_NCCL = getattr(_c10d, "ProcessGroupNCCL", ())
_MONITORS_START_S = 1.0

CppBackend = _cpp.Backend
"""The class of backend objects; ``torch.distributed.Backend`` is the class of their names."""


def backend_classes() -> list[type]:
    """The classes of torch's own backend objects. Local."""
    found = {id(one): one for one in (*vars(_cpp).values(), *vars(_c10d).values())}
    kinds = [one for one in found.values() if issubclass(type(one), type)]
    return [one for one in kinds if issubclass(one, CppBackend)]


SymmetricMemory: Any = _cpp._SymmetricMemory
"""Memory that the members of a group share. All of torch's Python code calls its ``rendezvous``."""


def symmetric_memory_keeps_communicators() -> bool:
    """Whether symmetric memory uses its NCCL backend. Local.

    C++ then keeps communicators and windows by the group's name, and no function drops them (read
    in sources of 2026). With the backends CUDA and NVSHMEM the memory belongs to the tensors.
    """
    # Torch 2.8 has neither this function nor an NCCL backend.
    backend = getattr(SymmetricMemory, "get_backend", None)
    return backend is not None and backend(torch.device("cuda")) == "NCCL"


NO_ERROR = _cpp.ErrorType.SUCCESS
"""What a backend's ``get_error()`` returns without an error."""


def completed_work() -> Work:
    """A completed Work, for a call that must not return None."""
    future: Future[Any] = Future()
    future.set_result([])
    return cast(Work, cast(Any, _cpp)._create_work_from_future(future))


def live_backends(group: ProcessGroup, devices: Sequence[str]) -> dict[str, CppBackend]:
    """The backend objects of a group by device type; devices without a backend are omitted."""
    backends: dict[str, CppBackend] = {}
    for device in devices:
        with suppress(RuntimeError, AttributeError):
            backends[device] = backend_for(group, torch.device(device))
    return backends


def backend_for(group: ProcessGroup, device: torch.device) -> Any:
    """The backend object of a group for a device. Raises RuntimeError without one.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, torch wraps each backend in one that only implements
    the collectives, and raises RuntimeError or does nothing in all other methods (2.8 to 2.15).
    """
    backend = group._get_backend(device)
    return backend.wrapped_pg if isinstance(backend, _WRAPPERS) else backend


def monitored_backends(part: ProcessGroup | CppBackend) -> list[CppBackend]:
    """The backends of a group, or this backend, whose destructor waits for a thread of torch.

    ``ProcessGroupNCCL`` has a thread that monitors its watchdog. When it starts, it looks at a flag
    and then waits for ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`` (480 s). A shutdown or an abort sets the
    flag and wakes it, but takes no lock: if the thread is between the two, it ends minutes later
    (torch 2.8.0, and the older engine of 2.15.0, over stand-ins for CUDA and NCCL).
    """
    backends: list[Any] = [part]
    if isinstance(part, ProcessGroup):
        devices = [device.type for device in device_types(part)]
        backends = list(live_backends(part, devices).values())
    return [backend for backend in backends if isinstance(backend, _NCCL)]


def await_monitors(*parts: ProcessGroup | CppBackend) -> None:
    """Wait until all monitoring threads of this process wait. Local, blocking for up to a second.

    Returns at once if none of these groups or backends has such a thread.
    """
    if not any(map(monitored_backends, parts)):
        return
    end = time.monotonic() + _MONITORS_START_S
    while any(map(_starts, glob("/proc/self/task/*/stat"))) and time.monotonic() < end:
        time.sleep(0.001)


def _starts(path: str) -> bool:
    try:
        name, _, state = Path(path).read_text().partition(") ")
    except OSError:  # the thread has ended
        return False
    return name.endswith("(pt_nccl_heartbt") and not state.startswith("S")  # S: it waits


_WRAPPERS = (_cpp._ProcessGroupWrapper,) if hasattr(_cpp, "_ProcessGroupWrapper") else ()


def connects_eagerly(backend: CppBackend) -> bool:
    """Whether a backend connects without a collective, by ``eager_connect_single_device``.

    Torch's base class has the method and does nothing; gloo connects at its creation.
    """
    own = getattr(type(backend), "eager_connect_single_device", None)
    known = backend.name().startswith(("gloo", "nccl"))
    return own is not None and (known or own is not CppBackend.eager_connect_single_device)


def connects_in_first_use(backend: CppBackend) -> bool:
    """Whether a backend that has its communicator connects it further in its first collective.

    NCCL then connects the members' buffers within the call, which returns when all members have
    made it. Two groups used in opposite orders by two ranks hang there. So does a rank whose peer
    has failed: ``ProcessGroupNCCL2`` holds the lock that its abort needs (torch 2.15.0 over
    NVIDIA's host code of NCCL 2.30.7, without a GPU).
    """
    return type(backend).__name__.startswith("ProcessGroupNCCL")


COMPLETION_HOOK = "_register_on_completion_hook"
"""The method of a group that registers a completion hook."""


def await_hooks(group: ProcessGroup) -> None:
    """Wait until the completion hooks of a group have been called. Local, blocking."""
    group._wait_for_pending_works()


def device_types(group: ProcessGroup) -> list[torch.device]:
    """The devices for which a group has a backend."""
    return list(group._device_types)


def set_name(group: ProcessGroup, name: str) -> None:
    """Set the name of a group that is in no table."""
    group._set_group_name(cast(Any, name))


def set_desc(group: ProcessGroup, desc: str) -> None:
    """Set the description of a group that torch created."""
    group._set_group_desc(desc)


def sequence_number(group: ProcessGroup | CppBackend) -> int:
    """The number of collectives that were started on a group, or on one of its backends.

    Raises RuntimeError if they are not counted.
    """
    return int(cast(Any, group)._get_sequence_number_for_group())


def options_of(group: ProcessGroup, devices: Sequence[str]) -> object:
    """The options object of the first backend that has one, as NCCL does, or None."""
    for backend in live_backends(group, devices).values():
        options = getattr(backend, "options", None)
        if options is not None and not isinstance(options, getattr(GLOO, "_Options", ())):
            return cast(object, options)
    return None


def get_timeouts(group: ProcessGroup, devices: Sequence[str]) -> dict[str, timedelta]:
    """Timeouts by device type; devices whose timeout cannot be read are omitted."""
    timeouts: dict[str, timedelta] = {}
    for device, backend in live_backends(group, devices).items():
        timeout = timeout_of(getattr(backend, "options", None))
        if timeout is not None:
            timeouts[device] = timeout
    return timeouts


def set_timeouts(group: ProcessGroup, timeouts: Mapping[str, timedelta]) -> None:
    """Set the timeouts of a group's backends, as read by :func:`get_timeouts`. Idempotent."""
    now = get_timeouts(group, tuple(timeouts))
    backends = live_backends(group, tuple(timeouts))
    for device, timeout in timeouts.items():
        if device in backends and now.get(device) != timeout:
            set_timeout(backends[device], timeout)


def timeout_of(options: object) -> timedelta | None:
    """The timeout in a backend's options, if they have one."""
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the timeout of one backend. Idempotent."""
    # ProcessGroupNCCL2 (2.15) only has the base class's method, which older versions lack.
    setter = getattr(backend, "_set_default_timeout", None) or backend.set_timeout
    setter(timeout)


def gloo_options(timeout: timedelta | None, device: object = None) -> Any:
    """Options of a gloo backend; ``device`` is of gloo: by default one for torch's interface."""
    options = cast(Any, GLOO)._Options()
    if timeout is not None:
        options._timeout = timeout
    if device is not None:
        options._devices = [device]
    return options


def pointer_of(backend: CppBackend) -> int:
    """The pointer of a backend's communicator for the current device; 0 if none is known.

    ``ProcessGroupNCCL2`` has one communicator, and gives it for each device. Each call of
    ``ProcessGroupNCCL.eager_connect_single_device`` creates one and leaks the previous one (torch
    2.13.0 and 2.14.1, over stand-ins for CUDA and NCCL), so look for it first.
    """
    pointer = getattr(backend, "_comm_ptr", None)
    try:
        return 0 if pointer is None else int(pointer())
    except RuntimeError:  # raised if there is no communicator
        return 0


def aborted_groups() -> list[str]:
    """Name the groups of this process whose communicator the watchdog has found broken.

    The engines record an error before they free the device (seen as for :func:`recovery_settings`).
    So without an error, the results of an idle device are correct.
    """
    texts = []
    for group in known_groups():
        for device, backend in live_backends(group, tuple(device_backends(group))).items():
            with suppress(AttributeError, GroupOffloadedError, GroupDestroyedError):
                error = cast(Any, backend).get_error().name
                if error != "SUCCESS":
                    texts.append(f"group {label_of(group)}, {device}: {error}")
    return texts


def raise_for_aborted() -> None:
    """Raise torch's DistBackendError if results on this rank's idle device are wrong."""
    if texts := aborted_groups():
        raise DistBackendError(
            f"a collective was aborted on this rank, and its results are wrong: {'; '.join(texts)}."
            " Call reloadpg.recovery.recover() on all ranks and repeat the step."
        )


def memory_stats(backend: CppBackend) -> dict[str, int] | None:
    """Return the bytes that a backend's communicators report, by NCCL's names.

    Empty if the backend was never used; None if it does not report memory.
    """
    stats = getattr(backend, "memory_stats", None)
    if stats is None:
        return None
    try:
        with devices.current(devices.index_of_rank()):
            return dict(stats())
    except RuntimeError as error:
        return {} if "initialized" in str(error) else None


def group_of_backends(
    rank: int, size: int, store: Store, backends: Mapping[str, tuple[str, CppBackend]]
) -> ProcessGroup:
    """A plain group that uses existing backends for the given devices, and is in no table."""
    group = ProcessGroup(store, rank, size)
    add_backends(group, backends)
    name, _ = next(iter(backends.values()))
    group._set_default_backend(_backend_type(name))
    return group


def add_backends(group: ProcessGroup, backends: Mapping[str, tuple[str, CppBackend]]) -> None:
    for device, (name, backend) in backends.items():
        group._register_backend(torch.device(device), _backend_type(name), backend)


def _backend_type(name: str) -> Any:
    return _c10d.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)


def abort_each(groups: Sequence[ProcessGroup]) -> None:
    """Abort some groups, not WORLD, in the given order. Does not wait for peers."""
    for group in groups:
        _c10d._abort_process_group(group)


def abort_all() -> None:
    """Abort all groups in one call: separate aborts have hung (pytorch#119797). Blocking.

    If an abort raises, torch's function ends, and all groups stay in its tables. So it is called
    again before the error is raised.
    """
    if world() is None:
        return  # another thread has aborted them
    try:
        _c10d._abort_process_group()
    except Exception:
        if (default := world()) is not None:
            close_coalescing(default)  # in which torch 2.15 aborts them
            _c10d._abort_process_group()
        raise
