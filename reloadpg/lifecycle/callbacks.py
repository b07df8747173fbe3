"""Callbacks of users: before groups are released, around their rebuild, and for reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import InvalidOptionError
from ..groups.registry import registry
from .report import Report

__all__ = ["on_offload", "on_reload", "on_report"]

Callback = TypeVar("Callback", bound=Callable[..., object])


def on_offload(callback: Callable[[], object], *, name: str = "") -> Callable[[], None]:
    """Call something before groups are released: where other libraries' buffers go first.

    Local; callbacks run in the order of registration, in the caller's thread (with ``wait=False``
    in the operation's), on every offload that has something to release. One that raises makes the
    offload fail on all ranks before any group is touched. A group that a callback creates is not
    released by this offload.

    Args:
        callback: what to call.
        name: for messages; by default the callback's own.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    return _register(registry.callbacks.offload, _named(callback, name, "on_offload"))


def on_reload(
    callback: Callable[[], object], *, name: str = "", before: bool = False
) -> Callable[[], None]:
    """Call something after all groups are live again on all ranks, or before any is rebuilt.

    Local; callbacks run in the order of registration, in the caller's thread (with ``wait=False``
    in the operation's), on every reload of offloaded groups. One that raises makes the reload fail
    on all ranks; ``reload()`` can be called again.

    Args:
        callback: what to call.
        name: for messages; by default the callback's own.
        before: call it before anything is rebuilt: if it raises, the groups stay offloaded.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    callbacks = registry.callbacks.before_reload if before else registry.callbacks.reload
    return _register(callbacks, _named(callback, name, "on_reload"))


def on_report(callback: Callable[[Report], object]) -> Callable[[], None]:
    """Call something with the report of each offload and reload, also of one that failed.

    Local; in the thread of the operation, at its end. What it raises is logged.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    _named(callback, "", "on_report")
    return _register(registry.callbacks.report, callback)


def _named(callback: Callback, name: str, where: str) -> tuple[str, Callback]:
    if not callable(callback):
        raise InvalidOptionError(
            f"{where}({callback!r}): it cannot be called; nothing was registered. Pass a function."
        )
    return name or getattr(callback, "__qualname__", repr(callback)), callback


def _register(callbacks: list[Any], entry: Any) -> Callable[[], None]:
    callbacks.append(entry)

    def remove() -> None:
        callbacks[:] = [other for other in callbacks if other is not entry]

    return remove
