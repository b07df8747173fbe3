"""The timeouts of a group's backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup

from .backends import live_backends


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
