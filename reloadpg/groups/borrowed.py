"""Objects that other code takes out of a reloadable group, and holds when a generation ends.

Plain torch creates a new object when a group is recreated, so a library that caches a communicator
by the group misses its cache. A reloadable group keeps its identity, so the cache hits. DeepEP V2
(``get_nccl_comm_handle``), TransformerEngine and nccl4py keep an ``ncclComm_t`` in this way.

* A backend object is lent: the caller gets a :class:`Lent`, which passes every call to torch's
  object while its generation is live, and raises afterwards. ``isinstance`` is true for torch's
  class. Functions in C++ do not take it.
* A pointer to a communicator, and a window, can be used without this library. They are recorded as
  *raw*, with the caller, so that an offload can keep their communicator or refuse.

Torch's modules and this library's get torch's object, and nothing is recorded. The calling frame
decides. Nothing here runs in a collective on a group.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from .. import c10d
from ..errors import BorrowedError
from ..reports import Borrowed
from .offloaded import Offloaded, OffloadedBackend

_Group = Any
"""A ``ManagedGroup``, whose module imports this one."""

POLICIES = ("suspend", "refuse", "warn", "ignore")
"""Values of ``install(borrowed=...)``."""

OURS = ("torch.", f"{__name__.partition('.')[0]}.")
_OURS_ALONE = frozenset(name[:-1] for name in OURS)
THROUGH = frozenset({"get_backend_impl", "_new_window"})
"""Functions of torch that return to their caller what they take out of a group."""

_RAW = {
    **dict.fromkeys(("_comm_ptr", "comm_ptr"), "communicator pointer"),
    "rendezvous": "symmetric memory",
}
_HOOKS = {"register_abort_hook": "abort hook", "register_mem_pool": "memory pool"}


def borrower(depth: int) -> FrameType | None:
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


def is_part(module: str, package: str) -> bool:
    """Whether a module is this one, or is in this package."""
    return f"{module}.".startswith(f"{package}.")


class Lease:
    """One generation of a group, for the objects that were lent of it.

    Attributes:
        group: the group.
        generation: its generation.
        lent: the lent objects by the identity of torch's object.
    """

    def __init__(self, group: _Group) -> None:
        self.group = weakref.ref(group)
        self.name = group.name
        self.generation = group.generation
        self.lent: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()

    def lend(self, thing: Any, device: str) -> Lent:
        """Return the object that stands for one of torch's; the same one while it is referenced."""
        lent = self.lent.get(id(thing))
        if lent is None:
            kind: Any = type(thing)
            lent = self.lent[id(thing)] = _stand_in_for(kind)(self, thing, device)
        return lent

    def end(self) -> None:
        """Drop torch's objects: every later use raises. Local."""
        for lent in list(self.lent.values()):
            object.__setattr__(lent, "_lent", None)


@dataclass
class _Loan:
    """One call site that has taken something of one generation."""

    lease: Lease
    by: str
    where: str
    raw: bool
    things: weakref.WeakSet[Any] | None = None  # None: it cannot be known whether it is held

    @property
    def is_held(self) -> bool:
        return self.things is None or len(self.things) > 0


@dataclass
class Loans:
    """What has been taken out of one group, by kind and line. Later generations replace earlier."""

    lease: Lease | None = None
    taken: dict[tuple[str, str, int], _Loan] = field(default_factory=dict)

    def open(self, group: _Group) -> Lease:
        """The lease of the group's current generation."""
        if self.lease is None:
            self.lease = Lease(group)
        return self.lease

    def end(self) -> None:
        """End the current generation: every later use of what was lent of it raises. Local."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.end()

    def record(self, what: str, frame: FrameType, *, raw: bool, thing: Any = None) -> None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        loan = self.taken.get((what, path, line))
        lease = self.lease
        if lease is None:  # the generation has just ended in another thread
            return
        if loan is None or loan.lease is not lease:
            by = str(frame.f_globals.get("__name__", "?"))
            things = None if thing is None else weakref.WeakSet[Any]()
            loan = _Loan(lease, by, f"{os.path.basename(path)}:{line}", raw, things)
            self.taken[what, path, line] = loan
        if loan.things is not None and thing is not None:
            loan.things.add(thing)

    def held(self) -> list[tuple[str, _Loan]]:
        for key in [key for key, loan in list(self.taken.items()) if not loan.is_held]:
            self.taken.pop(key, None)
        return [(what, loan) for (what, *_), loan in list(self.taken.items())]

    def forget(self, package: str) -> None:
        """Forget what a package or module has taken: a callback of it has dropped that."""
        for key, loan in list(self.taken.items()):
            if is_part(loan.by, package):
                self.taken.pop(key, None)


def lent_by(group: _Group, backend: Any, arguments: tuple[Any, ...]) -> Any:
    """Return what a caller of ``group._get_backend`` gets; called by that method. Local."""
    frame = borrower(2)
    if frame is None or not group.lends or type(backend) is OffloadedBackend:
        return backend
    device = torch.device(arguments[0] if arguments else group.construction.selected[0]).type
    if device in group.construction.kept:  # it is not released
        return backend
    return _lend(group, backend, device, "backend", frame)


def lend(group: _Group) -> Any:
    """Return the backend that an offload releases, for a callback. Local; records nothing."""
    device = group.construction.selected[0]
    backend = group.target._get_backend(torch.device(device))
    if type(backend) is OffloadedBackend or not group.lends:
        return backend
    return group.loans.open(group).lend(backend, device)


def take(group: _Group, name: str, value: Any) -> Any:
    """Return what a caller of another method of a group gets; called by that method. Local."""
    frame = borrower(2)
    return value if frame is None or not group.lends else _take(group, name, value, frame)


def _take(group: _Group, name: str, value: Any, frame: FrameType, device: str = "") -> Any:
    """Record what a group, or a backend of it, has returned, and return it to the caller."""
    if name == "new_window":
        return _lend(group, value, device or group.construction.selected[0], "window", frame)
    group.loans.open(group)
    group.loans.record(_RAW.get(name) or _HOOKS[name], frame, raw=name in _RAW)
    return value


def _lend(group: _Group, thing: Any, device: str, what: str, frame: FrameType) -> Any:
    lent = group.loans.open(group).lend(thing, device)
    group.loans.record(what, frame, raw=what == "window", thing=lent)
    return lent


def borrowed(groups: Iterable[_Group]) -> tuple[Borrowed, ...]:
    """List what other code holds of these groups. Local, from any thread."""
    rows = []
    shared = c10d.symmetric_memory_groups()
    for group in groups:
        name = group.name
        loans = group.known_loans
        for what, loan in [] if loans is None else loans.held():
            ended = loans is None or loan.lease is not loans.lease
            number = loan.lease.generation
            rows.append(Borrowed(name, what, loan.by, loan.where, number, ended, loan.raw))
        if name in shared and group.lends:
            by, where, raw = shared[name]
            here = group.generation
            rows.append(Borrowed(name, "symmetric memory", by, where, here, ended=False, raw=raw))
    return tuple(rows)


# -- lent objects -------------------------------------------------------------------------------


class Lent:
    """Stands for an object of torch that belongs to one generation of a group."""

    __slots__ = ("__weakref__", "_lease", "_lent", "_of")

    _lease: Lease
    _of: str
    _torchs: type = object

    def __init__(self, lease: Lease, thing: Any, device: str) -> None:
        for name, value in (("_lease", lease), ("_lent", thing), ("_of", device)):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return self._torchs

    def __repr__(self) -> str:
        lease = self._lease
        state = "" if self._lent is not None else ", which has ended"  # type: ignore[attr-defined]
        what = self._torchs.__name__
        return f"<{what} of group {lease.name!r}, generation {lease.generation}{state}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_pybind11_conduit_v1_":  # it crashes in torch 2.8
            raise AttributeError(name)
        return getattr(_live(self, name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_live(self, name), name, value)


def _live(lent: Any, operation: str) -> Any:
    """Return torch's object, or raise. Of an offloaded group, the backend that raises."""
    lease, thing = lent._lease, lent._lent
    group = lease.group()
    inner = None if group is None else group.target
    if isinstance(inner, Offloaded):
        mine = inner.under_way is not None and inner.under_way.is_mine
        if not mine or isinstance(inner.current, Offloaded):
            return OffloadedBackend(inner, group, lent._of)
    if group is not None and group.loans.lease is lease and thing is not None:
        return thing
    now = "was deleted" if group is None else f"is in generation {group.generation}"
    raise BorrowedError(
        f"{operation} on {lent!r}: it belongs to generation {lease.generation} of the group, which "
        f"has ended; group {lease.name!r} {now}. Take the object from the group again, after each "
        "reload: reloadpg.on_generation(group, after=...) is called then."
    )


def _taken(lent: Any, name: str, value: Any, frame: FrameType | None) -> Any:
    group = lent._lease.group()
    return value if frame is None else _take(group, name, value, frame, lent._of)


_RECORDED = frozenset({*_RAW, *_HOOKS, "new_window"})


def _method(name: str) -> Callable[..., Any]:
    if name in _RECORDED:

        def method(self: Lent, *args: Any, **kwargs: Any) -> Any:
            value = getattr(_live(self, name), name)(*args, **kwargs)
            return _taken(self, name, value, borrower(1))
    else:

        def method(self: Lent, *args: Any, **kwargs: Any) -> Any:
            return getattr(_live(self, name), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _property(name: str) -> property:
    def read(self: Lent) -> Any:
        value = getattr(_live(self, name), name)
        return _taken(self, name, value, borrower(1)) if name in _RECORDED else value

    return property(read, lambda self, value: setattr(_live(self, name), name, value))


@lru_cache(maxsize=64)
def _stand_in_for(torchs: type) -> type[Lent]:
    """The class of the lent objects of one class of torch, with the same methods and name."""
    members: dict[str, Any] = {"__slots__": (), "_torchs": torchs, "__doc__": torchs.__doc__}
    for name in dir(torchs):
        value = inspect.getattr_static(torchs, name)
        if name.startswith("__") or name == "_pybind11_conduit_v1_" or name in Lent.__slots__:
            continue
        if isinstance(value, type):  # such as its options
            members[name] = value
        elif isinstance(value, (staticmethod, classmethod)):
            members[name] = staticmethod(getattr(torchs, name))
        else:
            members[name] = _method(name) if callable(value) else _property(name)
    methods = [f for value in members.values() for f in (value, getattr(value, "fget", None))]
    c10d.skip_in_compiled_code(f for f in methods if getattr(f, "__module__", "") == __name__)
    return type(torchs.__name__, (Lent,), members)


for _scope in (globals(), *map(vars, (Lease, _Loan, Loans, Lent))):
    c10d.skip_in_compiled_code(
        function
        for value in _scope.values()
        for function in (value, getattr(value, "fget", None))
        if getattr(function, "__module__", None) == __name__ and hasattr(function, "__code__")
    )
