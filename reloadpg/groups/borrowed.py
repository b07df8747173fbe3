"""Methods of torch's backends and symmetric memory that record what they give to other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from ..c10d import backends, compiling
from .loans import borrower
from .managed import ManagedGroup
from .registry import registry

_OF_BACKENDS = ("_comm_ptr", "comm_ptr", "new_window", "register_abort_hook", "register_mem_pool")


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
        if borrower(1) is not None and (group := _owner(self)) is not None:
            return group.loans.take(group, name, value)
        return value

    compiling.skip_in_compiled_code([method])
    return method


def _recording_rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def rendezvous(tensor: Any, group_name: str | None = None) -> Any:
        handle = original(tensor, group_name)
        if borrower(1) is not None and backends.symmetric_memory_keeps_communicators():
            for group in registry.managed():
                if group.name == group_name:
                    return group.loans.take(group, "rendezvous", handle)
        return handle

    return rendezvous


def _owner(backend: Any) -> ManagedGroup | None:
    """The reloadable group that a backend object belongs to now. Local."""
    for group in registry.managed():
        if (inner := group.communicator) is not None:
            live = backends.live_backends(inner, group.construction.selected)
            if any(one is backend for one in live.values()):
                return group
    return None
