"""Callbacks of users: before groups are released, around their rebuild, and for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InvalidOptionError
from ..groups.registry import Callback, registry
from ..groups.sets import Chosen
from .report import Report

__all__ = ["on_offload", "on_reload", "on_report", "register"]


def on_offload(
    callback: Callable[[], object], *, name: str = "", sets: Iterable[str] | str | None = None
) -> Callable[[], None]:
    """Call something before groups are released: where other libraries' buffers go first.

    Local; callbacks run in the order of registration, in the caller's thread (with ``wait=False``
    in the operation's), on every offload that has something to release. One that raises makes the
    offload fail on all ranks before any group is touched. A group that a callback creates is not
    released by this offload.

    Args:
        callback: what to call.
        name: for messages; by default the callback's own.
        sets: call it only for offloads of this set, or of one of these; None for all.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called, or a set is no name; nothing was
            registered.
    """
    return register(registry.callbacks.offload, _entry(callback, name, "on_offload", sets))


def on_reload(
    callback: Callable[[], object],
    *,
    name: str = "",
    before: bool = False,
    sets: Iterable[str] | str | None = None,
) -> Callable[[], None]:
    """Call something after all groups are live again on all ranks, or before any is rebuilt.

    Local; callbacks run in the order of registration, in the caller's thread (with ``wait=False``
    in the operation's), on every reload of offloaded groups. One that raises makes the reload fail
    on all ranks; ``reload()`` can be called again.

    Args:
        callback: what to call.
        name: for messages; by default the callback's own.
        before: call it before anything is rebuilt: if it raises, the groups stay offloaded.
        sets: call it only for reloads of this set, or of one of these; None for all.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called, or a set is no name; nothing was
            registered.
    """
    callbacks = registry.callbacks.before_reload if before else registry.callbacks.reload
    return register(callbacks, _entry(callback, name, "on_reload", sets))


def on_report(callback: Callable[[Report], object]) -> Callable[[], None]:
    """Call something with the report of each offload and reload, also of one that failed.

    Local; in the thread of the operation, at its end. What it raises is logged.

    Returns:
        A function that takes the callback off again; idempotent.

    Raises:
        InvalidOptionError: the callback cannot be called; nothing was registered.
    """
    _check(callback, "on_report")
    return register(registry.callbacks.report, callback)


def _check(callback: object, where: str) -> None:
    if not callable(callback):
        raise InvalidOptionError(
            f"{where}({callback!r}): it cannot be called; nothing was registered. Pass a function."
        )


def _entry(
    callback: Callable[[], object], name: str, where: str, sets: Iterable[str] | str | None
) -> Callback:
    _check(callback, where)
    chosen = Chosen.of([sets] if isinstance(sets, str) else sets or (), where)
    return Callback(name or getattr(callback, "__qualname__", repr(callback)), callback, chosen)


def register(callbacks: list[Any], entry: Any) -> Callable[[], None]:
    """Add an entry to a list of callbacks, and return what takes it off again. Local."""
    callbacks.append(entry)

    def remove() -> None:
        callbacks[:] = [other for other in callbacks if other is not entry]

    return remove
