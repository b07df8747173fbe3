"""Objects that other code takes out of a reloadable group, and may hold when a generation ends.

Plain torch creates a new object when a group is recreated, so a library that caches a communicator
by the group misses its cache. A reloadable group keeps its identity, so the cache hits. DeepEP V2
(``get_nccl_comm_handle``), TransformerEngine and nccl4py keep an ``ncclComm_t`` in this way.

The caller gets torch's own object, and the line that takes it is recorded. A pointer to a
communicator and a window are *raw*: a use after the end of the generation is a use after free, so
an offload refuses by default (``install(borrowed=...)``). What torch's modules and this library
take is not recorded; the calling frame decides. Nothing here runs in a collective on a group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import FrameType
from typing import Any
from weakref import WeakSet

from ..c10d import backends, compiling, tables
from ..reports import Borrowed
from .managed import Loan, ManagedGroup
from .offloaded import OffloadedBackend

POLICIES = ("refuse", "warn", "ignore")
"""Values of ``install(borrowed=...)``."""

_KINDS = {
    "_get_backend": "backend",
    "get_backend": "backend",
    "_comm_ptr": "communicator pointer",
    "comm_ptr": "communicator pointer",
    "new_window": "window",
    "rendezvous": "symmetric memory",
    "register_abort_hook": "abort hook",
    "register_mem_pool": "memory pool",
}
_RAW = frozenset({"_comm_ptr", "comm_ptr", "new_window", "rendezvous"})
_REFERENCED = frozenset({"_get_backend", "get_backend", "new_window"})
"""What is borrowed as long as the object is referenced."""

_OF_BACKENDS = ("_comm_ptr", "comm_ptr", "new_window", "register_abort_hook", "register_mem_pool")

OURS = ("torch.", f"{__name__.partition('.')[0]}.")
_OURS_ALONE = frozenset(name[:-1] for name in OURS)
THROUGH = frozenset({"get_backend_impl", "_new_window", "rendezvous"})
"""Functions of torch that return to their caller what they take out of a group."""


def take(group: ManagedGroup, name: str, value: Any) -> Any:
    """Record the caller of a method of a group, and return what it gets. Local."""
    frame = _borrower(2)
    if frame is None or not group.records or type(value) is OffloadedBackend:
        return value
    what, path, line = _KINDS[name], frame.f_code.co_filename, frame.f_lineno
    loan = group.loans.get((what, path, line))
    if loan is None or loan.known.ended:
        by, where = str(frame.f_globals.get("__name__", "?")), f"{os.path.basename(path)}:{line}"
        known = Borrowed(group.name, what, by, where, group.generation, raw=name in _RAW)
        loan = Loan(known, WeakSet() if name in _REFERENCED else None)
        group.loans[what, path, line] = loan
    if loan.things is not None:
        loan.things.add(value)
    return value


def _borrower(depth: int) -> FrameType | None:
    """Return the calling frame, or None if it is torch's or this library's. Local, 0.2 us."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith(OURS) and name not in _OURS_ALONE:
            return frame
        if frame.f_code.co_name not in THROUGH:
            return None
        frame = frame.f_back
    return None


def recorders() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield the methods of torch's backends that give something away, with recording wrappers."""
    for cls in backends.backend_classes():
        for name in _OF_BACKENDS:
            if callable(vars(cls).get(name)):
                yield cls, name, _recording(name, vars(cls)[name])
    rendezvous = backends.SymmetricMemory.rendezvous
    yield backends.SymmetricMemory, "rendezvous", staticmethod(_recording_rendezvous(rendezvous))


def _recording(name: str, original: Any) -> Callable[..., Any]:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = original.__get__(self, type(self))(*args, **kwargs)
        if _borrower(1) is not None and (group := _owner(self)) is not None:
            return take(group, name, value)
        return value

    compiling.skip_in_compiled_code([method])
    return method


def _recording_rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def rendezvous(tensor: Any, group_name: str | None = None) -> Any:
        handle = original(tensor, group_name)
        if _borrower(1) is not None and backends.symmetric_memory_keeps_communicators():
            for group in tables.known_groups():
                managed: ManagedGroup | None = getattr(group, "_managed", None)
                if managed is not None and managed.name == group_name:
                    return take(managed, "rendezvous", handle)
        return handle

    return rendezvous


def _owner(backend: Any) -> ManagedGroup | None:
    """The reloadable group that a backend object belongs to now. Local."""
    for group in tables.known_groups():
        managed: ManagedGroup | None = getattr(group, "_managed", None)
        inner = None if managed is None else managed.communicator
        if managed is not None and inner is not None:
            live = backends.live_backends(inner, managed.construction.selected)
            if any(one is backend for one in live.values()):
                return managed
    return None


def is_of(known: Borrowed, package: str) -> bool:
    """Whether a module that is this package, or is in it, has taken this."""
    return f"{known.by}.".startswith(f"{package}.")


def forget(group: ManagedGroup, package: str) -> None:
    """Forget what a package or module has taken: a callback of it has dropped that. Local."""
    for key, loan in list(group.loans.items()):
        if is_of(loan.known, package):
            group.loans.pop(key, None)


def borrowed(groups: Iterable[ManagedGroup]) -> tuple[Borrowed, ...]:
    """List what other code holds of these groups. Local, from any thread."""
    rows = []
    for group in groups:
        loans = list(group.loans.values())  # threads may take others
        rows += [loan.known for loan in loans if loan.things is None or len(loan.things)]
    return tuple(rows)


compiling.skip_in_compiled_code([take, _borrower])
