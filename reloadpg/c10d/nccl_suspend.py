"""Calls of NCCL's own functions: suspend and resume, and group calls around torch's calls."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch.distributed import distributed_c10d as _c10d

from . import devices
from .backends import CppBackend, pointer_of
from .engine_variables import nccl_settings
from .needs import describe_needs, missing


def suspend_obstacle(backend: CppBackend) -> str:
    """Say why the communicators of a backend cannot be suspended; empty if they can.

    ``Backend.suspend`` is in torch 2.12 and later; NCCL has it from 2.29.7 on. With
    ``NCCL_CUMEM_ENABLE=0`` NCCL reports success and releases nothing. Torch expects
    ``ncclCommSuspend`` to block, which it does not on a communicator that is created with
    ``TORCH_NCCL_USE_COMM_NONBLOCKING=1``.
    """
    if lacking := missing("suspend"):
        return f"torch {torch.__version__} lacks {describe_needs(lacking)}"
    suspend = getattr(type(backend), "suspend", None)
    name = backend.name()
    if suspend is None:
        return f"torch {torch.__version__} cannot suspend {name} communicators (2.12 and later)"
    if not name.startswith("nccl"):
        return f"backend {name} cannot suspend its communicators"
    if not hasattr(backend, "_comm_ptr"):  # ProcessGroupNCCL2 of 2.14, which has ``suspend``
        engine = type(backend).__name__
        return f"torch {torch.__version__} does not give the communicators of {engine}"
    library = _nccl()
    version = nccl_version()
    if version is not None and version < (2, 29, 7) and not _can_suspend(library):
        shown = ".".join(map(str, version))
        return f"NCCL {shown} cannot suspend communicators (2.29.7 and later)"
    if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") not in ("", "0"):
        return "TORCH_NCCL_USE_COMM_NONBLOCKING is set: such communicators cannot be suspended"
    if library is None:
        return "the NCCL library that torch uses is not found in this process"
    if not _can_suspend(library):
        return f"{library._name} has no ncclCommSuspend"
    return _cumem_obstacle()


def suspend_backend(backend: CppBackend) -> None:
    """Suspend the communicator of a backend. Collective over its members, blocking.

    While torch's own ``suspend`` and ``resume`` wait for the other members, they hold the GIL and a
    lock that ``abort`` needs (2.13.0 to 2.15.0), so no timeout could end the wait. This function
    calls NCCL as torch does, but without these locks: another thread can abort the communicator,
    which ends the call (seen over stand-ins for NCCL, not on a GPU).
    """
    _call_nccl("ncclCommSuspend", backend, ctypes.c_int(_SUSPEND_MEM))


def resume_backend(backend: CppBackend) -> None:
    """Resume the communicator of a backend; see :func:`suspend_backend`."""
    _call_nccl("ncclCommResume", backend)


@contextmanager
def group_call() -> Iterator[bool]:
    """Execute the destroys and aborts that this thread calls in this block at the block's end.

    NCCL only records them in the block, where torch holds a lock. The end is called without it, so
    that other threads can end communicators that share the lock. A destroy waits for its peers
    there. An abort of a connected communicator takes up to half a second, since NCCL's proxy
    threads look for it at this interval.

    Yields whether it is so: False if NCCL's library is not found.

    Raises:
        RuntimeError: a destroy or an abort failed.
    """
    library = cast(Any, _nccl())
    if library is None:
        yield False
        return
    _check(library, "ncclGroupStart", library.ncclGroupStart())
    try:
        yield True
    except BaseException:
        library.ncclGroupEnd()
        raise
    _check(library, "ncclGroupEnd", library.ncclGroupEnd())


def devices_of(backend: CppBackend) -> tuple[int, ...]:
    """Indices of the devices on which an NCCL backend has communicators. Local.

    Empty if that is unknown. Call it while no other thread connects or ends the backend, since
    torch holds a lock and the GIL.
    """
    pointers = {}
    for index in devices.with_context():
        with devices.current(index):
            if pointer := pointer_of(backend):
                pointers[index] = pointer
    if len(pointers) > 1 and len(set(pointers.values())) == 1:
        library, device = cast(Any, _nccl()), ctypes.c_int()
        if library is None:
            return ()
        communicator = ctypes.c_void_p(next(iter(pointers.values())))
        result = library.ncclCommCuDevice(communicator, ctypes.byref(device))
        _check(library, "ncclCommCuDevice", result)
        return (device.value,)
    return tuple(pointers)


_IN_PROGRESS = 7
"""``ncclInProgress``: the call of a communicator that does not block continues."""

_SUSPEND_MEM = 1
"""``NCCL_SUSPEND_MEM`` of ``nccl.h``."""


def _call_nccl(name: str, backend: CppBackend, *arguments: Any) -> None:
    library = cast(Any, _nccl())
    pointer = ctypes.c_void_p(cast(Any, backend)._comm_ptr())
    _check(library, name, getattr(library, name)(pointer, *arguments))


def _check(library: Any, name: str, result: int) -> None:
    if result not in (0, _IN_PROGRESS):
        library.ncclGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {library.ncclGetErrorString(result).decode()}")


def _nccl() -> ctypes.CDLL | None:
    """The NCCL library that torch has loaded; None if it is linked statically, or missing."""
    for name in _LIBRARIES:
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            number = ctypes.c_int()
            library.ncclGetVersion(ctypes.byref(number))
            major, rest = divmod(number.value, 10000)
            if (major, rest // 100, rest % 100) == nccl_version():
                return library
    return None


_LIBRARIES = ("libnccl.so.2", "librccl.so.1")
"""NCCL, and AMD's RCCL, which has the same functions (rocm-systems#5582; not run)."""


def _can_suspend(library: ctypes.CDLL | None) -> bool:
    return library is not None and hasattr(library, "ncclCommSuspend")


def nccl_version() -> tuple[int, ...] | None:
    """The version of the loaded NCCL (before torch 2.13: of the build); None without NCCL."""
    engine = getattr(_c10d, "ProcessGroupNCCL", None)
    if engine is None:
        return None
    known = getattr(engine, "get_runtime_nccl_version", None) or cast(Any, torch.cuda.nccl).version
    return tuple(known())


def _cumem_obstacle() -> str:
    value, where = nccl_settings(os.environ).get("NCCL_CUMEM_ENABLE", ("", ""))
    return f"NCCL_CUMEM_ENABLE=0 in {where} makes a suspend release nothing" * (value == "0")
