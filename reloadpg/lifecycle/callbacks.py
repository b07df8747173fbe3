"""User callbacks: before groups are released, before and after a rebuild, and for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InvalidOptionError
from ..groups.registry import Callback, registry
from ..groups.sets import Chosen
from ..reports import Report


def on_offload(
    callback: Callable[[], object], *, name: str = "", sets: Iterable[str] | str | None = None
) -> Callable[[], None]:
    """Register a callback that runs before groups are released, to free other libraries' buffers.

    Local. Callbacks run in the order of registration, in the caller's thread (with ``wait=False``,
    in the operation's), on every offload that releases a group. If one raises, the offload fails on
    all ranks before any group is changed. Groups that a callback creates are not released by this
    offload.

    Args:
        callback: the function to call.
        name: name for messages; by default the callback's name.
        sets: call it only for offloads of this set, or of one of these; None for all.

    Returns:
        A function that removes the callback; idempotent.

    Raises:
        InvalidOptionError: the callback is not callable, or a set is not a name; nothing was
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
    """Register a callback that runs after all groups are live on all ranks, or before a rebuild.

    Local. Callbacks run in the order of registration, in the caller's thread (with ``wait=False``,
    in the operation's), on every reload of offloaded groups. If one raises, the reload fails on all
    ranks; ``reload()`` can be called again.

    Arguments, result and errors are those of :func:`on_offload`, and ``before``: call it before the
    rebuild; if it raises, the groups stay offloaded.
    """
    callbacks = registry.callbacks.before_reload if before else registry.callbacks.reload
    return register(callbacks, _entry(callback, name, "on_reload", sets))


def on_report(callback: Callable[[Report], object]) -> Callable[[], None]:
    """Register a callback for the report of each offload and reload, also of failed ones.

    Local. It runs in the thread of the operation, at its end. Its exceptions are logged.

    Returns:
        A function that removes the callback; idempotent.

    Raises:
        InvalidOptionError: the callback is not callable; nothing was registered.
    """
    _check(callback, "on_report")
    return register(registry.callbacks.report, callback)


def _check(callback: object, where: str) -> None:
    if not callable(callback):
        raise InvalidOptionError(
            f"{where}({callback!r}): not callable; nothing was registered. Pass a function."
        )


def _entry(
    callback: Callable[[], object], name: str, where: str, sets: Iterable[str] | str | None
) -> Callback:
    _check(callback, where)
    chosen = Chosen.of(() if sets is None else sets, where)
    return Callback(name or getattr(callback, "__qualname__", repr(callback)), callback, chosen)


def register(callbacks: list[Any], entry: Any) -> Callable[[], None]:
    """Add an entry to a list of callbacks, and return a function that removes it. Local."""
    callbacks.append(entry)

    def remove() -> None:
        callbacks[:] = [other for other in callbacks if other is not entry]

    return remove
