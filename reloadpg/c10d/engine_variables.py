"""The environment variables of torch's engines on which recovery and releases depend."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache

import torch
from torch.distributed import distributed_c10d as _c10d

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

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


def nccl_settings(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Settings of NCCL with their origin; environment variables take precedence over files. Local.

    NCCL reads the file named by ``NCCL_CONF_FILE``, or else ``~/.nccl.conf``, and then
    ``/etc/nccl.conf``; the first value of a name counts. It reads them once per process, and so
    does this function.
    """
    prefixes = ("NCCL_", "TORCH_NCCL_")
    given = {n: (v, "the environment") for n, v in environ.items() if n.startswith(prefixes)}
    return {**_settings_of_files(environ.get("HOME"), environ.get("NCCL_CONF_FILE")), **given}


@lru_cache
def _settings_of_files(home: str | None, named: str | None) -> dict[str, tuple[str, str]]:
    settings: dict[str, tuple[str, str]] = {}
    own = named or (os.path.join(home, ".nccl.conf") if home else "")
    for path in filter(None, (own, "/etc/nccl.conf")):
        with suppress(OSError), open(path, errors="replace") as file:
            for line in file:
                name, equals, value = line.partition("=")
                if equals and not name.lstrip().startswith("#"):
                    settings.setdefault(name.strip(), (value.strip(), path))
    return settings


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


def release_cautions(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Say which settings make the release of an NCCL communicator unsafe, and what to do.

    By ``ProcessGroupNCCL.cpp`` of torch 2.8 to 2.15: with the allocator's hook, each new segment of
    memory is registered with every communicator in a table that ``shutdown()`` does not clear. The
    first group of the process writes all dumps that a pipe requests.
    """
    cautions = []
    if environ.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0") not in ("", "0"):
        cautions.append(
            "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is set: torch keeps registering memory "
            "with communicators that were released, and freeing memory can then raise an error; "
            "unset it, or deregister memory pools in on_offload() and register them in on_reload()"
        )
    if environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        cautions.append(
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set: only the first default group serves the "
            "flight recorder's pipe, so nothing serves it after a reload; call "
            "torch._C._distributed_c10d._dump_nccl_trace() instead"
        )
    return cautions
