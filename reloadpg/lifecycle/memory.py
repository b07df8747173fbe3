"""Memory in use, by source.

The device's own report comes first. The values of communicators (``memory_stats``, NCCL 2.29.7 and
later) include only part of their memory. Sources, in this order:

* ``device``: used memory of this rank's accelerator device, from its runtime, over all processes;
  the sum, if it has several.
* sources of :func:`add_source`: ``simulated``, the memory of the simulated accelerator.

Nothing here initializes an accelerator: its context would take some hundred MB.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..c10d import devices

logger = logging.getLogger("reloadpg")

_LARGE_CACHE = 256 << 20

_sources: dict[str, Callable[[], int | None]] = {}
# Only copies are iterated over: a signal handler may read it while it is changed.


def add_source(name: str, used: Callable[[], int | None]) -> None:
    """Register a source for an accelerator without a runtime in torch. Local, idempotent.

    ``used`` returns the bytes in use, or None if they are unknown. It must be fast.
    """
    _sources[name] = used


def in_use() -> dict[str, int]:
    """Bytes in use, by source, the most reliable first. Local, about 20 microseconds."""
    amounts: dict[str, int] = {}
    for name, ask in {"device": _of_devices, **_sources}.items():
        try:
            used = ask()
        except Exception as error:  # a device in an error state must not end an operation here
            logger.debug("memory in use by %s is unknown: %s", name, error)
            continue
        if used is not None:
            amounts[name] = used
    return amounts


def warnings(released: bool) -> list[str]:
    """Warn of memory that is in use unnecessarily, if the communicators are ``released``."""
    runtime: Any = devices.runtime()
    if not released or not hasattr(runtime, "memory_reserved"):
        return []
    cached = sum(
        runtime.memory_reserved(index) - runtime.memory_allocated(index)
        for index in devices.of_rank()
    )
    if cached < _LARGE_CACHE:
        return []
    return [
        f"torch's caching allocator holds {cached / 2**20:.0f} MiB of unused memory; "
        "torch.cuda.empty_cache() returns it to the device"
    ]


def _of_devices() -> int | None:
    """Bytes in use on the devices of this rank; None if unknown."""
    amounts = []
    ask: Any = getattr(devices.runtime(), "mem_get_info", None)
    for index in () if ask is None else devices.of_rank():
        with devices.current(index) as usable:
            if usable:
                free, total = ask()
                amounts.append(total - free)
    return sum(amounts) if amounts else None
