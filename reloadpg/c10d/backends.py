"""The backend objects inside a group, with their timeouts, options and memory."""

from __future__ import annotations

import ctypes
import os
import re
import select
import socket
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C._distributed_c10d import Backend as CppBackend
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    Store,
    _create_work_from_future,
)
from torch.distributed import DistBackendError, DistError, ProcessGroup, Work
from torch.distributed import distributed_c10d as _c10d
from torch.futures import Future

from ..errors import GroupDestroyedError, GroupOffloadedError
from .tables import device_backends, known_groups, label_of

_GLOO = getattr(_c10d, "ProcessGroupGloo", None)


def completed_work() -> Work:
    """A completed Work, for a call that must not return None."""
    future: Future[Any] = Future()
    future.set_result([])
    return cast(Work, _create_work_from_future(future))


def live_backends(group: ProcessGroup, devices: Sequence[str]) -> dict[str, CppBackend]:
    """The backend objects of a group by device type; devices without a backend are omitted."""
    found: dict[str, CppBackend] = {}
    for device in devices:
        with suppress(RuntimeError, AttributeError):
            found[device] = group._get_backend(torch.device(device))
    return found


def options_of(group: ProcessGroup, devices: Sequence[str]) -> object:
    """The options object of the first backend that has one, as NCCL does, or None."""
    for backend in live_backends(group, devices).values():
        options = getattr(backend, "options", None)
        if options is not None and not isinstance(options, getattr(_GLOO, "_Options", ())):
            return cast(object, options)
    return None


def get_timeouts(group: ProcessGroup, devices: Sequence[str]) -> dict[str, timedelta]:
    """Timeouts by device type; devices whose timeout cannot be read are omitted."""
    found: dict[str, timedelta] = {}
    for device, backend in live_backends(group, devices).items():
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            found[device] = timeout
    return found


def set_timeouts(group: ProcessGroup, timeouts: Mapping[str, timedelta]) -> None:
    """Set the timeouts of a group's backends, as read by :func:`get_timeouts`. Idempotent."""
    now = get_timeouts(group, tuple(timeouts))
    backends = live_backends(group, tuple(timeouts))
    for device, timeout in timeouts.items():
        if device in backends and now.get(device) != timeout:
            backend = cast(Any, backends[device])
            # ProcessGroupNCCL2 (2.15) only has the base class's method, which older versions lack.
            setter = getattr(backend, "_set_default_timeout", None) or backend.set_timeout
            setter(timeout)


def is_connected(backend: CppBackend) -> bool:
    """Whether a backend has a communicator for the current device; False if that is unknown.

    Each call of ``ProcessGroupNCCL.eager_connect_single_device`` creates a communicator and leaks
    the previous one (torch 2.13.0 and 2.14.1, over stand-ins for CUDA and NCCL).
    """
    pointer = getattr(backend, "_comm_ptr", None)
    try:
        return pointer is not None and pointer() != 0
    except RuntimeError:  # raised if there is no communicator
        return False


def connects_without_timeout(backend: CppBackend) -> bool:
    """Whether a backend will connect in its first collective, by a call that nothing can end.

    ``ProcessGroupNCCL`` waits for missing members in ``ncclCommInitRankConfig``. It has no handle
    of the communicator yet, so no timeout and no ``abort`` ends the wait (2.8.0, and 2.15.0 with
    ``TORCH_DIST_USE_NCCL2=0``, over stand-ins for NCCL). ``ProcessGroupNCCL2`` can be aborted.
    """
    return type(backend).__name__ == "ProcessGroupNCCL" and not is_connected(backend)


def suspend_obstacle(backend: CppBackend) -> str:
    """Say why the communicators of a backend cannot be suspended; empty if they can.

    ``Backend.suspend`` is in torch 2.12 and later; NCCL has it from 2.29.7 on. With
    ``NCCL_CUMEM_ENABLE=0`` NCCL reports success and releases nothing. Torch expects
    ``ncclCommSuspend`` to block, which it does not on a communicator that is created with
    ``TORCH_NCCL_USE_COMM_NONBLOCKING=1``.
    """
    suspend = getattr(type(backend), "suspend", None)
    name = backend.name()
    if suspend is None:
        return f"torch {torch.__version__} cannot suspend {name} communicators (2.12 and later)"
    if suspend is not getattr(CppBackend, "suspend", None):
        return _cumem_obstacle()  # a backend in Python that implements suspend
    if not name.startswith("nccl"):
        return f"backend {name} cannot suspend its communicators"
    version = nccl_version()
    if version is not None and version < (2, 29, 7):
        shown = ".".join(map(str, version))
        return f"NCCL {shown} cannot suspend communicators (2.29.7 and later)"
    if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") not in ("", "0"):
        return "TORCH_NCCL_USE_COMM_NONBLOCKING is set: such communicators cannot be suspended"
    if _nccl() is None:
        return "the NCCL library that torch uses is not found in this process"
    return _cumem_obstacle()


def suspend(backend: CppBackend) -> None:
    """Suspend the communicator of a backend. Collective over its members, blocking.

    While torch's own ``suspend`` and ``resume`` wait for the other members, they hold the GIL and a
    lock that ``abort`` needs (2.13.0 to 2.15.0), so no timeout could end the wait. This function
    calls NCCL as torch does, but without these locks: another thread can abort the communicator,
    which ends the call (seen over stand-ins for NCCL, not on a GPU).
    """
    if _is_nccl(backend):
        _call_nccl("ncclCommSuspend", backend, ctypes.c_int(_SUSPEND_MEM))
    else:
        cast(Any, backend).suspend()


def resume(backend: CppBackend) -> None:
    """Resume the communicator of a backend; see :func:`suspend`."""
    if _is_nccl(backend):
        _call_nccl("ncclCommResume", backend)
    else:
        cast(Any, backend).resume()


_SUSPEND_MEM = 1
"""``NCCL_SUSPEND_MEM`` of ``nccl.h``."""


def _is_nccl(backend: CppBackend) -> bool:
    return type(backend).__name__.startswith("ProcessGroupNCCL")


def _call_nccl(name: str, backend: CppBackend, *arguments: Any) -> None:
    library = cast(Any, _nccl())
    result = getattr(library, name)(ctypes.c_void_p(cast(Any, backend)._comm_ptr()), *arguments)
    if result != 0:
        library.ncclGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {library.ncclGetErrorString(result).decode()}")


def _nccl() -> ctypes.CDLL | None:
    """The NCCL library that torch has loaded; None if it is linked statically, or missing."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10000)
    return library if (major, rest // 100, rest % 100) == nccl_version() else None


def nccl_version() -> tuple[int, ...] | None:
    """The version of the loaded NCCL (before torch 2.13: of the build); None without NCCL."""
    engine = getattr(_c10d, "ProcessGroupNCCL", None)
    if engine is None:
        return None
    known = getattr(engine, "get_runtime_nccl_version", None) or cast(Any, torch.cuda.nccl).version
    return tuple(known())


def _cumem_obstacle() -> str:
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 makes a suspend release nothing"
    return ""


def is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from a failed collective rather than from the program. Pure.

    Torch has error classes for this, but gloo and ``ProcessGroupNCCL2`` raise RuntimeError.
    """
    if isinstance(error, DistError):
        return True
    text = str(error)
    # NCCL2 raises the second one if another thread has just aborted the communicator.
    return type(error) is RuntimeError and (
        text.startswith(("NCCL ", "failed to get async error"))
        or any(part in text for part in _GLOO_SAYS)
    )


def recovery_settings(
    environ: Mapping[str, str], seconds: float
) -> tuple[dict[str, str], list[str]]:
    """Return the settings that make torch's NCCL engines raise faults in the program.

    By default the watchdog ends the process after a timeout or an error. With these settings it
    aborts the communicator instead: the device continues *with wrong values*, and only the next
    collective raises, so call :func:`raise_for_aborted` before results are used.

    Seen on ``ProcessGroupNCCL`` (torch 2.13.0) and ``ProcessGroupNCCL2`` (2.15.0) over stand-ins
    for CUDA and NCCL. With ``TORCH_NCCL_BLOCKING_WAIT=1`` the former has no watchdog, and a
    collective hangs indefinitely unless the program calls ``wait()`` on it.

    Returns:
        Settings that are missing or were set by torchrun by default, and messages about settings
        that conflict. ``seconds`` is how long an operation of this library may wait.
    """
    missing, obstacles = {}, []
    for name, (value, why) in _RECOVERY_SETTINGS.items():
        given = environ.get(name) or environ.get(name.removeprefix("TORCH_"))
        if name == _MONITORING and given == "1":
            with suppress(ValueError):
                if float(environ.get(_HEARTBEAT, "480")) > seconds:
                    continue
        if not given or (name == _HANDLING and given == "1" and "TORCHELASTIC_RUN_ID" in environ):
            missing[name] = value
        elif given != value and why:
            obstacles.append(f"{name}={given}: {why}; set it to {value}")
    return missing, obstacles


def torchcomms_obstacle() -> str:
    """Say why groups cannot be reloadable if torch creates them with TorchComms; empty if not.

    Its NCCL backend has not run with this library. On plain torch 2.13 groups hang with it.
    """
    enabled = getattr(_c10d, "_use_torchcomms_enabled", None)
    if enabled is None or not enabled():
        return ""
    return (
        "torch creates its groups with TorchComms (TORCH_DISTRIBUTED_USE_TORCHCOMMS=1), with which "
        "this library was not tested. Unset the variable"
    )


def nccl_is_concerned(backends: Collection[str] | None) -> bool:
    """Whether groups of these backends (None: of any backend) may use NCCL in this torch."""
    if backends is None:
        return torch.distributed.is_nccl_available()
    return any(name.startswith("nccl") for name in backends)


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def drop_inherited_connections() -> None:
    """Close the parent's gloo connections in a forked child. Local, idempotent.

    A connection ends when all processes have closed it. If a child, such as a worker of a
    DataLoader, holds it, the peers of an abort wait until their timeouts. The descriptors are
    replaced by the null device, because gloo would close their numbers again.
    """
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in [one for sockets in _gloo_sockets() for one in sockets]:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)


def shut_connections(groups: Sequence[ProcessGroup], others: int = 0) -> list[socket.socket]:
    """Make the pending collectives of gloo groups fail, here and on their peers. Local.

    Gloo cannot abort, and a connection stays open while any object refers to work that was started
    on it: a variable, a graph of autograd, the reducer of ``DistributedDataParallel``.

    If a connection breaks while a send is being written, gloo loses the send: the collective then
    waits until its timeout, and the group's destructor waits for the collective (torch 2.13 and
    2.15). So this function first ends the collectives of a connection, and then shuts only its
    sending side. The peers can still write to it until they have read its end.

    If gloo has closed a connection of which a duplicate is still open, the thread of a device that
    is being destroyed may handle its events, which ends the process with SIGABRT. So only the
    connections of live groups are duplicated, and no lazy ones: gloo destroys their device first.

    ``others`` is the number of other groups that are aborted, whose objects are unknown. Their
    connections are shut if no further group has connections. Returns the connections for
    :func:`await_peers`.
    """
    backends = {group: found for group in groups if (found := _connected_gloo(group))}
    devices = _gloo_sockets()
    own = [one for sockets in devices for one in _connections(sockets)] if backends else []
    for backend in [one for found in backends.values() for one in found]:
        _fail_pending(backend)
    shut = []
    for one, descriptor in own:
        if _is_open(descriptor, one):
            one.close()
        else:
            shut.append(one)
            with suppress(OSError):
                one.shutdown(socket.SHUT_WR)
    rest = [found for sockets in devices if (found := _connections(sockets))]
    shuts = len(rest) <= len(groups) - len(backends) + others
    for one, _ in [one for found in rest for one in found]:
        with one, suppress(OSError):
            if shuts:
                one.shutdown(socket.SHUT_WR)
    return shut


def _connections(sockets: Mapping[int, int]) -> list[tuple[socket.socket, int]]:
    """Duplicates of the connected sockets, with the descriptors of the originals."""
    found = []
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(descriptor))
            with suppress(OSError):
                one.getpeername()  # a socket that listens has none
                if os.fstat(one.fileno()).st_ino == inode:
                    found.append((one, descriptor))
                    continue
            one.close()
    return found


def await_peers(connections: Sequence[socket.socket], seconds: float) -> None:
    """Close shut connections when the peers have closed them, or after a timeout. Blocking."""
    waiting = select.poll()
    for one in connections:
        waiting.register(one, select.POLLRDHUP)
    left, end = len(connections), time.monotonic() + seconds
    while left and (pause := end - time.monotonic()) > 0:
        for descriptor, _ in waiting.poll(1e3 * pause):
            waiting.unregister(descriptor)
            left -= 1
    for one in connections:
        one.close()


def _connected_gloo(group: ProcessGroup) -> list[Any]:
    """The gloo backends of a group that connected all members when they were created. Local."""
    devices = [one.type for one in getattr(group, "_device_types", ())]
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() not in ("", "0", "false", "off", "n")
    found = live_backends(group, devices).values()
    return [] if lazy else [one for one in found if type(one) is _GLOO]


def _fail_pending(backend: Any) -> None:
    """End the pending collectives of a gloo backend by a receive that times out."""
    for peer in range(backend.size()):
        with suppress(RuntimeError):
            if peer != backend.rank():
                work = backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG)
                work.wait(timedelta(milliseconds=1))


_UNUSED_TAG = 2**31 - 1


def _is_open(descriptor: int, one: socket.socket) -> bool:
    try:
        return os.fstat(descriptor).st_ino == os.fstat(one.fileno()).st_ino
    except OSError:
        return False


def _gloo_sockets() -> list[dict[int, int]]:
    """The sockets of each gloo device of this process: descriptors and inodes; Linux only.

    A device has an epoll instance that is inherited over ``exec``, with pointers as data, one pipe,
    and its sockets (seen on torch 2.13).
    """
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if "eventpoll" not in os.readlink(f"/proc/self/fd/{name}"):
                continue
            with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as file:
                text = file.read()
            served = [(int(fd), int(data, 16), int(inode, 16)) for fd, data, inode in _SERVED(text)]
            if re.search(r"flags:\s*0*2\b", text) and all(fd != data for fd, data, _ in served):
                sockets: dict[int, int] = {}
                others = 0
                for fd, _, inode in served:
                    with suppress(OSError):  # gloo's thread closes those that fail, as now
                        is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
                        sockets |= {fd: inode} if is_socket else {}
                        others += not is_socket
                if others == 1:
                    found.append(sockets)
    return found


_SERVED = re.compile(r"tfd:\s*(\d+).*?data:\s*([0-9a-f]+).*?ino:([0-9a-f]+)").findall

_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_RECOVERY_SETTINGS = {
    _HANDLING: (
        "2",
        "after an error the watchdog ends the process, or aborts no communicator",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        "0",
        "no watchdog runs, so that a collective without a wait() hangs indefinitely",
    ),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": (
        "0",
        "the watchdog raises errors of the device, which ends the process",
    ),
    _MONITORING: (
        "0",
        f"the process is ended if the watchdog hangs for {_HEARTBEAT}, which is no longer than "
        "the timeout given to install",
    ),
    # How long the watchdog waits, four times, for a dump before it aborts; 15 s by default.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": ("200", ""),
}
"""The value of each variable, and why another is refused; empty if it is not."""

if hasattr(_c10d, "ProcessGroupNCCL2"):
    # A dump with stack traces continues in a thread that is never joined. That thread acquires the
    # GIL while the interpreter exits, which ends the process with SIGABRT (seen on 2.15.0).
    _RECOVERY_SETTINGS["TORCH_INCLUDE_STACK_TRACE"] = ("0", "")


def aborted_groups() -> list[str]:
    """Name the groups of this process whose communicator the watchdog has found broken.

    The engines record an error before they free the device (seen as for :func:`recovery_settings`).
    So if there is none, the results of an idle device are correct.
    """
    found = []
    for group in known_groups():
        for device, backend in live_backends(group, tuple(device_backends(group))).items():
            with suppress(AttributeError, GroupOffloadedError, GroupDestroyedError):
                error = cast(Any, backend).get_error().name
                if error != "SUCCESS":
                    found.append(f"group {label_of(group)}, {device}: {error}")
    return found


def raise_for_aborted() -> None:
    """Raise torch's DistBackendError if results on this rank's idle device are wrong."""
    if found := aborted_groups():
        raise DistBackendError(
            f"a collective was aborted on this rank, and its results are wrong: {'; '.join(found)}."
            " Call reloadpg.recovery.recover() on all ranks and repeat the step."
        )


_GLOO_SAYS = ("/gloo/", "Application timeout caused pair closure", "Connection closed by peer")


def release_cautions(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Say which settings make the release of an NCCL communicator unsafe, and what to do. Pure.

    By ``ProcessGroupNCCL.cpp`` of torch 2.8 to 2.15: with the allocator's hook, each new segment of
    memory is registered with every communicator in a table that ``shutdown()`` does not clear. The
    first default group of the process writes all dumps that a pipe or a timeout requests.
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
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set: only the first default group serves the "
            "flight recorder's pipe, so nothing serves it after a reload; call "
            "torch._C._distributed_c10d._dump_nccl_trace() instead"
        )
    return found


def memory_stats(backend: CppBackend) -> dict[str, int] | None:
    """Return the bytes that a backend's communicators report, by NCCL's names.

    Empty if the backend was never used; None if it does not report memory.
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


def abort_groups(groups: Sequence[ProcessGroup]) -> None:
    """Abort some groups, not WORLD, in the given order. Does not wait for peers."""
    for group in groups:
        _c10d._abort_process_group(group)


def abort_all() -> None:
    """Abort all groups in one call: separate aborts have hung (pytorch#119797). Blocking."""
    _c10d._abort_process_group()
