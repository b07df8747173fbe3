"""Callbacks: before groups are released, before and after a rebuild, and for reports."""

from __future__ import annotations

import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from ..errors import InvalidOptionError
from ..groups.managed import ManagedGroup
from ..groups.proxy import managed
from ..groups.registry import registry
from ..groups.sets import concerns, named_sets
from ..reports import Report

logger = logging.getLogger("reloadpg")


Remove = Callable[[], None]
"""Removes what was registered; idempotent."""


class Callback(NamedTuple):
    """A user's callback: its name, and the operations for which it is called.

    Attributes:
        name: name for messages.
        function: the function to call.
        sets: the sets for whose operations it is called; empty for all.
        group: the group for whose communicator it is called; None for every operation of the sets.
        package: whose handles of the group it drops; see :func:`on_offload`.
    """

    name: str
    function: Callable[[], object]
    sets: frozenset[str] = frozenset()
    group: weakref.ref[ProcessGroup] | None = None
    package: str = ""

    def is_for(self, sets: Collection[str]) -> bool:
        """Whether it is for operations of one of these sets. Local."""
        if self.group is None:
            return concerns(self.sets, sets)
        record = managed(self.group())
        return record is not None and record.set_name in sets


@dataclass
class Callbacks:
    """The callbacks that users registered. Those in ``uninstall`` are called once."""

    offload: list[Callback] = field(default_factory=list)
    before_reload: list[Callback] = field(default_factory=list)
    reload: list[Callback] = field(default_factory=list)
    report: list[Callable[[Any], object]] = field(default_factory=list)
    uninstall: list[Callable[[], object]] = field(default_factory=list)

    def after_fork(self) -> None:
        """In a forked child: keep the callbacks of installations, whose patches the child keeps."""
        registered: list[Any]
        for registered in (self.report, self.offload, self.before_reload, self.reload):
            registered.clear()

    def packages_of(self, group: ProcessGroup) -> set[str]:
        """The packages whose handles the callbacks of a group drop. Local."""
        entries = [*self.offload, *self.reload]
        return {entry.package for entry in entries if entry.group and entry.group() is group}


def for_sets(registered: Iterable[Callback], sets: Collection[str]) -> list[Callback]:
    """Return the callbacks of these sets that are of no group. Local."""
    return [entry for entry in registered if not entry.group and entry.is_for(sets)]


def for_groups(registered: Sequence[Callback], groups: Iterable[ManagedGroup]) -> list[Callback]:
    """Return the callbacks of these groups, in the order of the groups. Local."""
    return [
        entry
        for group in groups
        for entry in registered
        if entry.group and entry.group() is group.proxy
    ]


class Owed:
    """The callbacks after a reload that are due on this rank: each until it has returned.

    A reload of offloaded groups owes its callbacks when it is complete on all ranks. An offload
    owes them while it has called callbacks and is not complete.
    """

    def __init__(self) -> None:
        self._due: list[Callback] = []

    def add(self, due: Iterable[Callback]) -> None:
        """Owe callbacks. Local, idempotent."""
        for entry in due:
            self.strike(entry)
            self._due.append(entry)

    def of(self, sets: Collection[str]) -> list[Callback]:
        """The callbacks of these sets that are due, and still registered. Local."""
        kept = {id(entry) for entry in callbacks.reload}
        return [entry for entry in self._due if id(entry) in kept and entry.is_for(sets)]

    def strike(self, callback: Callback) -> None:
        """Strike off a callback that has returned. Local, idempotent."""
        self._due = [entry for entry in self._due if entry is not callback]

    def drop(self, sets: Collection[str]) -> None:
        """Owe the callbacks of these sets no longer. Local."""
        self._due = [entry for entry in self._due if not entry.is_for(sets)]


callbacks = Callbacks()
os.register_at_fork(after_in_child=callbacks.after_fork)


def on_offload(
    callback: Callable[..., object],
    *,
    sets: Iterable[str] | str | None = None,
    group: ProcessGroup | None = None,
    package: str = "",
) -> Callable[[], None]:
    """Register a callback that runs before groups are released, to free other libraries' buffers.

    Local. Callbacks run in the order of registration, in the caller's thread (with ``wait=False``,
    in the operation's), on every offload that releases a group: before this rank waits for other
    ranks, so that no rank releases a group before the callbacks of all ranks have returned. If one
    raises, the offload fails on all ranks before any group is changed. After such a failure, or if
    ranks were missing or differed, ``reload()`` on all ranks calls the :func:`on_reload` callbacks
    on each rank whose :func:`on_offload` callbacks have been called. An offload does not release
    groups that its callbacks create.

    With ``group``, the callback frees what belongs to the communicator of that group, such as a
    pointer. It is called as ``callback(group, backend)`` while the group is live. These callbacks
    run after the others, group by group in an order that all members share, so they can run
    collectives on their group. The callbacks of one group run in the order of registration, which
    must be the same on its members. A suspended group keeps its communicator: nothing is called.

    Args:
        callback: the function to call.
        sets: call it only for offloads of this set, or of one of these; None for all.
        group: call it only when the communicator of this group ends, on each member. A group that
            is not reloadable keeps its communicator.
        package: with ``group``, the package or module whose handles the callback drops, such as
            ``deep_ep``: what it has taken out of the group no longer counts as borrowed. By default
            the caller's package.

    Returns:
        A function that removes the callback; idempotent.

    Raises:
        InvalidOptionError: an argument cannot be used; nothing was registered.
    """
    return _register(callbacks.offload, callback, "on_offload", sets, group, package)


def on_reload(
    callback: Callable[..., object],
    *,
    before: bool = False,
    sets: Iterable[str] | str | None = None,
    group: ProcessGroup | None = None,
    package: str = "",
) -> Callable[[], None]:
    """Register a callback that runs after all groups are live on all ranks, or before a rebuild.

    Local. Callbacks run in the order of registration, in the caller's thread (with ``wait=False``,
    in the operation's), on every reload of offloaded groups, as its last step. If one raises, the
    others are called, and the reload raises on this rank alone: the groups are live on all ranks.
    ``reload()`` on all ranks then calls the callbacks of this rank that have not returned.

    With ``group``, it is called as ``callback(group, backend)`` when the group has its next
    communicator: before the others, and in the order of :func:`on_offload`. It is also called by
    :func:`reloadpg.recovery.recover`, which calls no callback of an offload.

    Arguments, result and errors are as for :func:`on_offload`. With ``before`` it is called before
    the rebuild; if it then raises, the groups stay offloaded.
    """
    if before and group is not None:
        raise InvalidOptionError(
            f"on_reload({callback!r}): a group has no communicator before the rebuild; nothing was "
            "registered. Leave out before or group."
        )
    due = callbacks.before_reload if before else callbacks.reload
    return _register(due, callback, "on_reload", sets, group, package)


def check_before(name: str, check: Callable[[str], object], sets: frozenset[str]) -> Remove:
    """Call a check before groups of these sets (empty: of all) are released, or rebuilt. Local.

    It is called with ``offload`` or ``reload``, in order with the callbacks of users; if it raises,
    no group is changed. Returns a function that removes it; idempotent.
    """
    registered = {"offload": callbacks.offload, "reload": callbacks.before_reload}
    removals = [
        register(entries, Callback(name, partial(check, operation), sets))
        for operation, entries in registered.items()
    ]

    def remove() -> None:
        for each in removals:
            each()

    return remove


def on_uninstall(callback: Callable[[], object]) -> None:
    """Call a function once, at the end of the next ``uninstall``. Local, idempotent."""
    if callback not in callbacks.uninstall:
        callbacks.uninstall.append(callback)


def on_report(callback: Callable[[Report], object]) -> Callable[[], None]:
    """Register a callback for the report of each offload and reload, also of failed ones.

    Local. It runs in the thread of the operation, at its end. Its exceptions are logged.

    Returns:
        A function that removes the callback; idempotent.

    Raises:
        InvalidOptionError: the callback is not callable; nothing was registered.
    """
    _check(callback, "on_report")
    return register(callbacks.report, callback)


def _check(callback: object, where: str) -> None:
    if not callable(callback):
        raise InvalidOptionError(
            f"{where}({callback!r}): not callable; nothing was registered. Pass a function."
        )


def _register(
    registered: list[Callback],
    callback: Callable[..., object],
    where: str,
    sets: Iterable[str] | str | None,
    group: ProcessGroup | None,
    package: str,
) -> Callable[[], None]:
    _check(callback, where)
    name = getattr(callback, "__qualname__", repr(callback))
    named = named_sets(() if sets is None else sets, where)
    if group is None:
        return register(registered, Callback(name, callback, named))
    if not isinstance(group, ProcessGroup) or named:
        raise InvalidOptionError(
            f"{where}(group={group!r}, sets={sets!r}): nothing was registered. Pass a process "
            "group, or sets."
        )
    if (record := managed(group)) is None:
        return lambda: None
    name, of = f"{name} for group {record.name!r}", weakref.ref(group)

    def call() -> None:
        record = managed(of())
        if record is not None and record.is_live:  # an earlier callback may have destroyed it
            callback(record.proxy, record.backend)

    package = package or str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
    registered[:] = [entry for entry in registered if not entry.group or entry.group() is not None]
    return register(registered, Callback(name, call, named, of, package))


def register(registered: list[Any], entry: Any) -> Callable[[], None]:
    """Add an entry to a list of callbacks, and return a function that removes it. Local."""
    registered.append(entry)

    def remove() -> None:
        registered[:] = [other for other in registered if other is not entry]

    return remove


def publish(report: Report) -> None:
    """Log a report and pass it to the registered callbacks; their errors are logged. Local.

    Each kind of warning is given once. The exception of a failed operation has the text of its
    error.
    """
    logger.info("%s", report)
    for warning in report.warnings:
        level = logging.WARNING if is_new(warning) else logging.DEBUG
        logger.log(level, "%s: %s", report.operation, warning)
    for callback in list(callbacks.report):
        try:
            callback(report)
        except Exception:
            logger.exception("a callback registered with reloadpg.on_report failed")


def is_new(warning: str) -> bool:
    """Whether no warning of this kind was given yet; from now on one was. Local."""
    kind = re.sub(r"\d[\d.]*", "#", warning)
    first = kind not in registry.warned
    registry.warned.add(kind)
    return first
