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

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from ..c10d import backends, inspection, tables
from ..reports import Borrowed
from .loans import borrower
from .managed import ManagedGroup
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


def take(group: ManagedGroup, name: str, value: Any) -> Any:
    """Record the caller of a method of a group, and return what it gets. Local."""
    frame = borrower(2)
    if frame is not None and group.records and type(value) is not OffloadedBackend:
        thing = value if name in _REFERENCED else None
        group.loans.record(_KINDS[name], frame, group.generation, raw=name in _RAW, thing=thing)
    return value


def recorders() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield the methods of torch's backends that give something away, with recording wrappers."""
    for cls in backends.backend_classes():
        for name in _OF_BACKENDS:
            if callable(vars(cls).get(name)):
                yield cls, name, _recording(name, vars(cls)[name])


def _recording(name: str, original: Any) -> Callable[..., Any]:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = original.__get__(self, type(self))(*args, **kwargs)
        if borrower(1) is not None and (group := _owner(self)) is not None:
            return take(group, name, value)
        return value

    inspection.skip_in_compiled_code([method])
    return method


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


def borrowed(groups: Iterable[ManagedGroup]) -> tuple[Borrowed, ...]:
    """List what other code holds of these groups. Local, from any thread."""
    rows = []
    shared = inspection.symmetric_memory_groups()
    for group in groups:
        loans = group.known_loans
        for loan in [] if loans is None else loans.held():
            ended = loans is None or loan.life != loans.life
            of = loan.generation
            rows.append(Borrowed(group.name, loan.what, loan.by, loan.where, of, ended, loan.raw))
        if group.name in shared and group.records:
            by, where, raw = shared[group.name]
            here = group.generation
            rows.append(Borrowed(group.name, "symmetric memory", by, where, here, raw=raw))
    return tuple(rows)


inspection.skip_in_compiled_code([take, borrower])
