"""The placeholder of a group without a live communicator: it raises and names the remedy."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from ..c10d import compiling, tables
from ..errors import GroupDestroyedError, GroupOffloadedError
from .creation import Construction
from .dispatch import DISPATCHED, REMOVALS
from .sets import TRAINER


class GroupState(str, Enum):
    """The states of a reloadable group. ``ManagedGroup`` has the methods that move between them.

    ============  ======================================  ==========================================
    state         its communicator                        left by
    ============  ======================================  ==========================================
    LIVE          in use                                  ``suspend``, ``detach``, ``destroy``
    SUSPENDED     kept, without its memory                ``resume``, ``detach``, ``destroy``
    OFFLOADED     none                                    ``attach``, ``fail``, ``destroy``
    FAILED        none; or, after a fork, the parent's    ``attach``, ``clear_failure``, ``destroy``
    DESTROYED     none, for good
    RESERVED      an operation's, in any of these states  ``reserve(None)``
    ============  ======================================  ==========================================

    Only other threads find a group RESERVED; the operation's threads find the state beneath.
    """

    LIVE = "live"
    SUSPENDED = "suspended"
    OFFLOADED = "offloaded"
    FAILED = "failed"
    DESTROYED = "destroyed"
    RESERVED = "reserved"

    def __str__(self) -> str:
        return self.value

    @property
    def shown(self) -> GroupState:
        """The state for users, to whom a suspended group is offloaded."""
        return GroupState.OFFLOADED if self is GroupState.SUSPENDED else self


NEXT_CALL = {
    GroupState.OFFLOADED: (
        "Call {reload} on all ranks, or leave the offloaded() block; then use the group again."
    ),
    GroupState.FAILED: (
        "Its last offload or reload did not finish. Call {reload} on all ranks again, or "
        "reloadpg.recovery.recover() after a fault of its communicator."
    ),
    GroupState.DESTROYED: "It was destroyed and is not rebuilt; create a new group.",
}

NEXT_CALL_LATER = {
    "offload": "Call result() on its handle, then {reload} on all ranks.",
    "reload": "Call result() on its handle, then use the group.",
}

_operation: ContextVar[UnderWay | None] = ContextVar("reloadpg_operation", default=None)


class UnderWay:
    """An operation in a separate thread. Until it ends, only its threads can use the groups."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self._ended = threading.Event()
        self._pid = os.getpid()

    def enter(self) -> None:
        """Add this thread, and all tasks that it starts, to the operation's threads. Local."""
        _operation.set(self)

    @property
    def is_mine(self) -> bool:
        return _operation.get() is self

    def end(self) -> None:
        self._ended.set()

    def wait(self) -> None:
        """Wait until it has ended. Blocking, except in its threads and in a forked child."""
        if not self.is_mine and os.getpid() == self._pid:
            self._ended.wait()


class Owner(Protocol):
    """What a placeholder and the record of loans use of their group's record."""

    set_name: str
    generation: int
    construction: Construction
    current: Any

    @property
    def name(self) -> str: ...

    def set_timeout(self, timeout: timedelta, *, kept: bool = True) -> None: ...


class Offloaded:
    """The placeholder that a group in any state but LIVE dispatches to.

    Args:
        owner: the group's record.
        state: the group's state.
        kept: the backends of a mixed group that stay alive and still serve their devices.
        reason: why the group failed, for messages.
        remedy: the call to make, if it differs from the one for the state.
        suspended: the group that torch created, if its communicator is suspended.
        under_way: the operation whose threads have exclusive use of a reserved group.
    """

    def __init__(
        self,
        owner: Owner,
        state: GroupState,
        kept: ProcessGroup | None = None,
        *,
        reason: str = "",
        remedy: str = "",
        suspended: ProcessGroup | None = None,
        under_way: UnderWay | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self.state = state
        self.kept = kept
        self.reason = reason
        self.suspended = suspended
        self.under_way = under_way
        self._remedy = remedy

    def refusal(self, operation: str) -> GroupOffloadedError | GroupDestroyedError:
        """Build the error for an operation that needs a communicator."""
        owner = self._owner()
        state = GroupState.DESTROYED if owner is None else self.state.shown
        reload = "reloadpg.reload()"
        if owner is not None and owner.set_name != TRAINER:
            reload = f'reloadpg.reload("{owner.set_name}")'
        if self.under_way is not None and owner is not None:
            what = self.under_way.operation
            return GroupOffloadedError(
                f"{operation} on {owner!r}: {'an' if what == 'offload' else 'a'} {what} is "
                f"running, started by {what}(wait=False). "
                f"{NEXT_CALL_LATER[what].format(reload=reload)}",
                group=owner.name,
                operation=operation,
            )
        lacks = "its communicator is suspended" if self.suspended else "has no communicator"
        text = f"{operation} on {owner!r}: the group is {state} and {lacks}."
        if self.reason:
            text += f" {self.reason}"
        text = f"{text} {self._remedy or NEXT_CALL[state].format(reload=reload)}"
        if owner is None or state is GroupState.DESTROYED:
            return GroupDestroyedError(text)
        return GroupOffloadedError(text, group=owner.name, operation=operation)

    def without_backend(
        self, name: str, args: tuple[Any, ...], cause: BaseException | None = None
    ) -> OffloadedBackend:
        """Refuse an operation; only a query of the backend succeeds."""
        owner = self._owner()
        if name != "_get_backend" or owner is None:
            raise self.refusal(name) from cause
        device = args[0] if args else "cpu"
        return OffloadedBackend(self, owner, torch.device(device).type)


class OffloadedBackend:
    """The backend object that a group without a communicator returns.

    Torch gets the backend of every group of the process to extend a timeout when a compiled graph
    is read from a cache, to set a timeout, and to destroy another group. Only the methods that
    these need work; all others raise :class:`~reloadpg.errors.GroupOffloadedError`. ``isinstance``
    is true for the backend's class, which torch checks before it sets a timeout (before 2.15).
    """

    uid = -1
    supports_coalescing = False
    supports_splitting = False

    def __init__(self, placeholder: Offloaded, owner: Owner, device: str) -> None:
        self._placeholder = placeholder
        self._owner = owner
        self._device = device

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return tables.backend_class(self._owner.construction.devices.get(self._device, ""))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next generation. Local."""
        self._owner.set_timeout(timeout, kept=False)

    set_timeout = _set_default_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Do nothing: it extends the timeout of collectives, of which there are none now."""

    def _group_start(self) -> None:
        """Do nothing: there is no communicator to abort."""

    _group_end = _group_start

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._placeholder.refusal(name)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Offloaded, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if self.under_way is not None and self.under_way.is_mine and owner is not None:
            return getattr(owner.current, name)(*args, **kwargs)
        if self.kept is None:
            return None if name in REMOVALS else self.without_backend(name, args)
        try:
            return getattr(self.kept, name)(*args, **kwargs)
        except RuntimeError as error:
            if "No backend type associated with device" in str(error) or "backend" in name:
                return self.without_backend(name, args, error)
            raise

    refuse.__name__ = name
    return refuse


for _name in DISPATCHED | REMOVALS:
    setattr(Offloaded, _name, _refusing(_name))
compiling.skip_methods_in_compiled_code(Offloaded)
