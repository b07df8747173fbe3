"""NCCL and torch's engines for it: locks, variables of the environment, and NCCL's own functions.

The common order of all ranks prevents a deadlock between threads that wait for peers, provided a
waiting thread holds nothing that another thread of its process needs. Otherwise, two ranks whose
threads acquire a lock in different orders wait for each other. Two facts decide whether it holds:

============ ===================================== =========================================
NCCL's call  waits for                             source
============ ===================================== =========================================
init         all members                           NCCL's user guide
split        all ranks of the parent               NCCL's user guide
first use    all members: NCCL connects them       NVIDIA's host code 2.30.7, without a GPU
finalize     no rank                               NVIDIA's host code 2.30.7, without a GPU
destroy      the members on this node, if the      the same; user guide ("intra-node collective")
             communicator is connected
abort        no rank                               the same
suspend      all members                           user guide
resume       all members                           user guide
register     no rank                               NCCL's source (``ncclCommRegister`` is local)
deregister   no rank                               the same
============ ===================================== =========================================

The second fact is the lock that the backend holds in these calls: :data:`SHARES_LOCK`. It decides
how the calls that wait are made:

* The lock of one communicator: in parallel threads.
* A lock that other communicators share: not while it is held. ``ProcessGroupNCCL2`` (the default
  of torch 2.15) has one mutex for a communicator and all that were split from it, and torch splits
  every group from WORLD there. Such communicators are destroyed each in an NCCL group call, whose
  end needs no mutex: so in parallel threads. (An abort would wait for no rank. After it, torch's
  ``shutdown`` prints a warning with a C++ stack, and the destructor one without: 2.15.0.) A replay
  never splits, so each communicator that it creates has a separate mutex.
* An unknown lock: one group at a time, in the shared order, unless ``install(parallelism=...)``
  says otherwise.

``ProcessGroupNCCL2`` holds its lock in the first use too. Its abort waits for the lock, and all
other aborts and creations of the process wait for this abort. So the first use in a reload is a
:class:`Call`, which :func:`end_calls` ends without torch. A first use by the program is not.

``suspend`` and ``resume`` are called without torch's lock, and as a :class:`Call`. A call that
waits for no rank may be made under any lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as _cpp
from torch.distributed import distributed_c10d as _c10d
from torch.torch_version import TorchVersion

from . import devices
from .backends import CppBackend, pointer_of

# -- locks --------------------------------------------------------------------------------------


SHARES_LOCK = frozenset({"ProcessGroupNCCL2", "ProcessGroupNCCLLazy"})
"""The classes of backends whose communicators share a lock with all that were split from them.

It is ``NcclApi::api_mutex_`` there; a split takes its parent's. In ``ProcessGroupNCCL``
(``NCCLComm::mutex_``) and in gloo each communicator has a separate one. That of any other class is
unknown.

Observed with a call that hangs in one group (an injected fault) and calls of other groups, on
torch 2.8.0 and on both engines of 2.15.0, over stand-ins for CUDA and NCCL.
"""

_KNOWN_NAMES = frozenset({"gloo", "nccl", "nccl-legacy", "nccl2", "nccl-lazy"})
"""The names under which torch creates backends whose locks are known."""


def needs_one_thread(names: Iterable[str]) -> bool:
    """Whether groups of these backends are best created and released one at a time."""
    return not _KNOWN_NAMES.issuperset(names)


def shares_lock(backends: Iterable[Any]) -> bool:
    """Whether a split of one of these backends uses the lock of its parent."""
    return any(type(backend).__name__ in SHARES_LOCK for backend in backends)


# -- variables of the environment on which recovery and releases depend -------------------------

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

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
    "TORCH_NCCL_ENABLE_MONITORING": (
        "0",
        "the process is ended if the watchdog hangs for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    ),
    # How long the watchdog waits, four times, for a dump before it aborts; 15 s by default.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": ("200", ""),
}
"""The value of each variable, and why another is refused; empty if it is not."""

if hasattr(_c10d, "ProcessGroupNCCL2"):
    # A dump with stack traces continues in a thread that is never joined. That thread acquires the
    # GIL while the interpreter exits, which ends the process with SIGABRT (seen on 2.15.0).
    _RECOVERY_SETTINGS["TORCH_INCLUDE_STACK_TRACE"] = ("0", "")


def recovery_settings(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the settings that make torch's NCCL engines raise faults in the program.

    By default the watchdog ends the process after a timeout or an error. With these settings it
    aborts the communicator instead: the device continues *with wrong values*, and only the next
    collective raises, so call :func:`raise_for_aborted` before results are used.

    Seen on ``ProcessGroupNCCL`` (torch 2.13.0) and ``ProcessGroupNCCL2`` (2.15.0) over stand-ins
    for CUDA and NCCL. With ``TORCH_NCCL_BLOCKING_WAIT=1`` the former has no watchdog, and a
    collective hangs indefinitely unless the program calls ``wait()`` on it.

    Returns:
        Settings that are missing or are torchrun's defaults, and messages about conflicting
        settings.
    """
    missing, obstacles = {}, []
    for name, (value, why) in _RECOVERY_SETTINGS.items():
        given = environ.get(name) or environ.get(name.removeprefix("TORCH_"))
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


# -- NCCL's own functions: suspend and resume, and group calls around torch's calls -------------


def suspend_obstacle(backend: CppBackend) -> str:
    """Say why the communicators of a backend cannot be suspended; empty if they can.

    ``Backend.suspend`` is in torch 2.12 and later; NCCL has it from 2.29.7 on. With
    ``NCCL_CUMEM_ENABLE=0`` NCCL reports success and releases nothing. Torch expects
    ``ncclCommSuspend`` to block. With ``TORCH_NCCL_USE_COMM_NONBLOCKING=1`` it does not.
    """
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
    if version is not None and version < (2, 29, 7):
        shown = ".".join(map(str, version))
        return f"NCCL {shown} cannot suspend communicators (2.29.7 and later)"
    if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") not in ("", "0"):
        return "TORCH_NCCL_USE_COMM_NONBLOCKING is set: such communicators cannot be suspended"
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 makes a suspend release nothing"
    if library is None:
        return "the NCCL library that torch uses is not found in this process"
    return "" if hasattr(library, "ncclCommSuspend") else f"{library._name} has no ncclCommSuspend"


def suspend_backend(backend: CppBackend) -> None:
    """Suspend the communicator of a backend. Collective over its members, blocking.

    While torch's own ``suspend`` and ``resume`` wait for the other members, they hold the GIL and a
    lock that ``abort`` needs (2.13.0 to 2.15.0), so no timeout could end the wait. This function
    calls NCCL as torch does, but without these locks. Make it within a :class:`Call`: without that,
    an abort frees memory that this call moves (SIGSEGV in NVIDIA's host code of NCCL 2.30.7).
    """
    _call_nccl("ncclCommSuspend", backend, ctypes.c_int(_SUSPEND_MEM))


def resume_backend(backend: CppBackend) -> None:
    """Resume the communicator of a backend; see :func:`suspend_backend`."""
    _call_nccl("ncclCommResume", backend)


class Call:
    """A call in which NCCL waits for the other members: :func:`end_calls` can end it.

    It counts from its creation to the end of the ``with`` block. Create it before an abort of the
    communicator can begin.

    Args:
        part: what is aborted if the operation fails: a group, or one of its backends.
        backend: the backend that has the communicator, for the current device. Without a
            communicator of NCCL, nothing can end the call.
    """

    def __init__(self, part: object, backend: CppBackend) -> None:
        self.parts = (part, backend)  # the objects themselves, so that no other has their identity
        self.pointer = pointer_of(backend)
        if self.pointer:
            with _running.changed:
                _running.calls.append(self)

    def concerns(self, part: object) -> bool:
        return any(one is part for one in self.parts)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if self.pointer:
            with _running.changed:
                _running.calls.remove(self)
                _running.changed.notify_all()


class _Running:
    """The calls of this process."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget them: in a forked child they are the parent's, and the lock may be held."""
        self.calls: list[Call] = []
        self.changed = threading.Condition()


_running = _Running()
os.register_at_fork(after_in_child=_running.renew)

_LEAVE_S = 30.0
"""Seconds until a call has left its communicator; longer than a suspend copies memory to the host.
A wait for a peer ends in milliseconds."""


def end_calls(part: object) -> None:
    """End the calls in which a group or backend waits for peers. Blocking, with a timeout.

    Call it before the abort. NCCL's abort sets a flag, which ends a wait for a peer and not the
    copies of a suspend or resume. Then it frees the communicator, also if another thread is in it.
    So the flag is set here, and the abort follows when the calls have returned. Where NCCL is
    linked statically nothing can set the flag, and nothing is waited for.
    """
    library = cast(Any, _nccl())
    if library is None:
        return
    with _running.changed:
        concerned = [call for call in _running.calls if call.concerns(part)]
        for call in concerned:  # none of them can return here, so the communicators exist
            _set_abort_flag(library, call.pointer)
        _running.changed.wait_for(lambda: not set(concerned) & set(_running.calls), _LEAVE_S)


def _set_abort_flag(library: Any, pointer: int) -> None:
    """Set NCCL's abort flag, and do not free the communicator. Local.

    In a group call, ``ncclCommAbort`` sets the flag at once and frees the communicator at the end.
    A group call with an error does nothing at its end (NCCL's source, 2.27 to 2.30): here the error
    of a collective without a communicator.
    """
    _check(library, "ncclGroupStart", library.ncclGroupStart())
    library.ncclCommAbort(ctypes.c_void_p(pointer))
    library.ncclAllReduce(None, None, ctypes.c_size_t(0), 0, 0, None, None)
    library.ncclGroupEnd()


@contextmanager
def group_call() -> Iterator[bool]:
    """Execute the destroys and aborts that this thread calls in this block at the block's end.

    NCCL only records them in the block, where torch holds a lock. The end is called without it, so
    other threads can end communicators that share the lock. A destroy waits for its peers there. An
    abort of a connected communicator takes up to half a second, since NCCL's proxy threads look for
    it at this interval.

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
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        major, rest = divmod(number.value, 10000)
        if (major, rest // 100, rest % 100) == nccl_version():
            return library
    return None


def nccl_version() -> tuple[int, ...] | None:
    """The version of the loaded NCCL (before torch 2.13: of the build); None without NCCL."""
    engine = getattr(_c10d, "ProcessGroupNCCL", None)
    if engine is None:
        return None
    known = getattr(engine, "get_runtime_nccl_version", None) or cast(Any, torch.cuda.nccl).version
    return tuple(known())


# -- the flight recorder ------------------------------------------------------------------------


def flight_recorder_dump() -> bytes:
    """Torch's dump. Blocking: torch asks the device whether each recorded operation has ended."""
    dump: bytes = cast(Any, _cpp)._dump_nccl_trace(
        includeCollectives=True, includeStackTraces=True, onlyActive=False
    )
    return dump


def flight_recorder_prefix() -> str:
    """The path to which torch appends the rank, if no variable gives one."""
    home = Path(os.environ.get("HOME", "/tmp"), ".cache")
    if TorchVersion(torch.__version__) < "2.9":
        return str(home / "torch" / "nccl_trace_rank_")
    return str(Path(os.environ.get("XDG_CACHE_HOME") or home) / "torch" / "comm_lib_trace_rank_")
