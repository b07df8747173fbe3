"""Memory in use, by source.

The device's own report comes first. The values of communicators (``memory_stats``, NCCL 2.29.7 and
later) include only part of their memory. Sources, in this order:

* ``device``: used memory of the current accelerator device, from its runtime, over all processes.
* sources of :func:`add_source`: ``simulated``, the memory of the simulated accelerator.
* ``rss``: resident memory of this process, from the Linux kernel.

Nothing here initializes an accelerator: its context would take some hundred MB.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..c10d import devices

__all__ = ["Source", "add_check", "add_source", "exact_sources", "free_bytes", "in_use", "warnings"]

logger = logging.getLogger("reloadpg")

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CACHE_WORTH_SAYING = 256 << 20


@dataclass(frozen=True)
class Source:
    """A source of memory figures.

    Attributes:
        used: returns the bytes in use, or None if unknown. Local, fast.
        free: returns the free bytes, or None if unknown. Local, fast.
    """

    used: Callable[[], int | None]
    free: Callable[[], int | None] = lambda: None


class _Sources:
    """The registered sources and checks.

    Replaced as a whole, so that signal handlers can read them without a lock.
    """

    def __init__(self) -> None:
        self.added: Mapping[str, Source] = {}
        self.checks: tuple[Callable[[], str | None], ...] = ()


_sources = _Sources()


def add_source(name: str, source: Source) -> None:
    """Register a source for an accelerator without a runtime in torch. Local, idempotent."""
    _sources.added = {**_sources.added, name: source}


def add_check(check: Callable[[], str | None]) -> Callable[[], None]:
    """Register a check that runs at the end of each offload and reload. Local.

    It returns a warning for the report, or None.

    Returns:
        A function that removes the check; idempotent.
    """
    _sources.checks = (*_sources.checks, check)

    def remove() -> None:
        _sources.checks = tuple(other for other in _sources.checks if other is not check)

    return remove


def in_use() -> dict[str, int]:
    """Bytes in use, by source, the most reliable first. Local, about 20 microseconds."""
    readings = {
        "device": _device_used,
        **{name: source.used for name, source in _sources.added.items()},
        "rss": _resident,
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
    """The sources that measure the accelerator's own memory. Local."""
    return frozenset({"device", *_sources.added})


def free_bytes() -> tuple[int, str] | None:
    """Bytes available to communicators, and their source; None if unknown. Local."""
    runtime = devices.runtime()
    if runtime is not None and hasattr(runtime, "mem_get_info"):
        return int(runtime.mem_get_info()[0]), "device"
    for name, source in _sources.added.items():
        free = source.free()
        if free is not None:
            return free, name
    return None


def warnings(released: bool) -> list[str]:
    """Return warnings of memory that is in use unnecessarily. Local.

    Args:
        released: whether the communicators are released, so that their memory should be free.
    """
    found: list[str] = []
    runtime = devices.runtime()
    if released and runtime is not None and hasattr(runtime, "memory_reserved"):
        cached = runtime.memory_reserved() - runtime.memory_allocated()
        if cached >= _CACHE_WORTH_SAYING:
            found.append(
                f"torch's caching allocator holds {cached / 2**20:.0f} MiB of unused memory; "
                "torch.cuda.empty_cache() returns it to the device"
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
    except OSError:  # not Linux
        return None
