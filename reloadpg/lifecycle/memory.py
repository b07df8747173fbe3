"""Memory in use, by the sources that can say it.

Device truth comes first: what the device itself reports free. What communicators say of
themselves (``memory_stats``, NCCL 2.29.7 and later) counts only part of what they hold. Sources,
in this order:

* ``device``: used memory of the current accelerator device, by its own runtime. It counts every
  process on that device.
* what :func:`add_source` added: ``simulated``, the memory that the simulated accelerator holds.
* ``nvml``: this process's memory on that device, by NVML (extra ``gpu``). It needs a container
  that shows the host's process ids.
* ``rss``: resident memory of this process, by the kernel.
* ``pinned``: page-locked host memory of torch's allocator.

Nothing here starts an accelerator: asking its runtime would create a context of some hundred MB.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..c10d import devices

__all__ = ["Source", "add_check", "add_source", "exact_sources", "free_bytes", "in_use", "warnings"]

logger = logging.getLogger("reloadpg")

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CACHE_WORTH_SAYING = 256 << 20


@dataclass(frozen=True)
class Source:
    """Somebody who knows how much memory is in use.

    Attributes:
        used: bytes in use now, or None while there is nothing to say. Local, short.
        free: bytes that are left, or None if that is not known. Local, short.
    """

    used: Callable[[], int | None]
    free: Callable[[], int | None] = lambda: None


class _Sources:
    """Sources and checks that were added.

    Replaced as a whole and read without a lock: also by signal handlers.
    """

    def __init__(self) -> None:
        self.added: Mapping[str, Source] = {}
        self.checks: tuple[Callable[[], str | None], ...] = ()


_sources = _Sources()


def add_source(name: str, source: Source) -> None:
    """Let an accelerator that torch has no runtime for say what it holds. Local, idempotent."""
    _sources.added = {**_sources.added, name: source}


def add_check(check: Callable[[], str | None]) -> Callable[[], None]:
    """Ask this at the end of each offload and reload for a warning to put into its report.

    Local. It returns a sentence, or None if all is well.

    Returns:
        A function that takes the check off again; idempotent.
    """
    _sources.checks = (*_sources.checks, check)

    def remove() -> None:
        _sources.checks = tuple(other for other in _sources.checks if other is not check)

    return remove


def in_use() -> dict[str, int]:
    """Bytes in use now, by source, the most trustworthy first. Local, some 20 microseconds."""
    readings = {
        "device": _device_used,
        **{name: source.used for name, source in _sources.added.items()},
        "nvml": _nvml_used,
        "rss": _resident,
        "pinned": _pinned,
    }
    found: dict[str, int] = {}
    for name, ask in readings.items():
        try:
            used = ask()
        except Exception as error:  # a device in an error state must not end an operation here
            logger.debug("memory in use by %s is unknown: %s", name, error)
            continue
        if used is not None:
            found[name] = used
    return found


def exact_sources() -> frozenset[str]:
    """The sources that see what an accelerator itself has in use. Local."""
    return frozenset({"device", *_sources.added})


def free_bytes() -> tuple[int, str] | None:
    """Bytes that communicators could take now, and who says so; None if nobody knows. Local."""
    runtime = devices.runtime()
    if runtime is not None and hasattr(runtime, "mem_get_info"):
        return int(runtime.mem_get_info()[0]), "device"
    for name, source in _sources.added.items():
        free = source.free()
        if free is not None:
            return free, name
    return None


def warnings(released: bool) -> list[str]:
    """Say what keeps memory from being free just now. Local.

    Args:
        released: whether the communicators are released, so that others want the memory.
    """
    found: list[str] = []
    runtime = devices.runtime()
    if released and runtime is not None and hasattr(runtime, "memory_reserved"):
        cached = runtime.memory_reserved() - runtime.memory_allocated()
        if cached >= _CACHE_WORTH_SAYING:
            found.append(
                f"torch's caching allocator holds {cached / 2**20:.0f} MiB that it does not use; "
                "torch.cuda.empty_cache() gives them to the device"
            )
    for check in _sources.checks:
        try:
            text = check()
        except Exception:
            logger.exception("a check added with reloadpg.lifecycle.memory.add_check failed")
            continue
        if text:
            found.append(text)
    return found


def _device_used() -> int | None:
    runtime = devices.runtime()
    if runtime is None or not hasattr(runtime, "mem_get_info"):
        return None
    free, total = runtime.mem_get_info()
    return int(total - free)


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:  # no such file beside Linux
        return _psutil_resident()


def _psutil_resident() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.Process().memory_info().rss)


def _pinned() -> int | None:
    runtime = devices.runtime()
    if runtime is None or not hasattr(runtime, "host_memory_stats"):
        return None
    with suppress(Exception):  # torch before 2.9 raises until something was pinned
        stats = runtime.host_memory_stats()
        return int(stats.get("allocated_bytes.current", stats.get("active_bytes.current", 0)))
    return None


def _nvml_used() -> int | None:
    runtime = devices.runtime()
    if runtime is None or runtime.__name__ != "torch.cuda":
        return None
    nvml = _nvml()
    if nvml is None:
        return None
    with suppress(Exception):  # no driver library, a MIG slice, or a container with its own pids
        properties = runtime.get_device_properties(runtime.current_device())
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None


def _nvml() -> ModuleType | Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()  # counts its callers, and is cheap once started
    except pynvml.NVMLError:
        return None
    return pynvml
