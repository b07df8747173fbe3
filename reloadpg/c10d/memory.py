"""Memory in use, by source.

The device's own report comes first. The values of communicators (``memory_stats``, NCCL 2.29.7 and
later) include only part of their memory. Sources, in this order:

* ``device``: used memory of this rank's accelerator device, from its runtime, over all processes;
  the sum, if it has several.
* sources of :func:`add_source`: ``simulated``, the memory of the simulated accelerator.
* ``rss``: resident memory of this process, from the Linux kernel.

Nothing here initializes an accelerator: its context would take some hundred MB.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from . import devices

logger = logging.getLogger("reloadpg")

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Source:
    """Functions that return the bytes in use and the free bytes, or None if unknown. Fast."""

    used: Callable[[], int | None]
    free: Callable[[], int | None] = lambda: None


_sources: dict[str, Source] = {}
# Only copies are iterated over: a signal handler may read it while it is changed.


def add_source(name: str, source: Source) -> None:
    """Register a source for an accelerator without a runtime in torch. Local, idempotent."""
    _sources[name] = source


def in_use() -> dict[str, int]:
    """Bytes in use, by source, the most reliable first. Local, about 20 microseconds."""
    readings = {
        "device": _device_used,
        **{name: source.used for name, source in list(_sources.items())},
        "rss": _resident,
    }
    amounts: dict[str, int] = {}
    for name, ask in readings.items():
        try:
            used = ask()
        except Exception as error:  # a device in an error state must not end an operation here
            logger.debug("memory in use by %s is unknown: %s", name, error)
            continue
        if used is not None:
            amounts[name] = used
    return amounts


def free_bytes() -> tuple[int, str] | None:
    """Bytes available to communicators, and their source; None if unknown. Local."""
    amounts = _of_devices()
    if amounts:
        return sum(free for free, _ in amounts), "device"
    for name, source in list(_sources.items()):
        free = source.free()
        if free is not None:
            return free, name
    return None


def _device_used() -> int | None:
    amounts = _of_devices()
    return sum(total - free for free, total in amounts) if amounts else None


def _of_devices() -> list[tuple[int, int]]:
    """Free and total bytes of each device of this rank; empty if unknown."""
    amounts = []
    ask = getattr(devices.runtime(), "mem_get_info", None)
    for index in () if ask is None else devices.of_rank():
        with devices.current(index) as usable:
            if usable:
                amounts.append(cast(Any, ask)())
    return amounts


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:  # not Linux
        return None
