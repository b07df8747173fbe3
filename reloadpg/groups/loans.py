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
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from weakref import WeakSet

from ..c10d import compiling
from ..reports import Borrowed
from .offloaded import OffloadedBackend, Owner

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

OURS = ("torch.", f"{__name__.partition('.')[0]}.")
_OURS_ALONE = frozenset(name[:-1] for name in OURS)
THROUGH = frozenset({"get_backend_impl", "_new_window", "rendezvous"})
"""Functions of torch that return to their caller what they take out of a group."""


@dataclass
class _Loan:
    """What one line of a program has taken out of a group, of the newest generation.

    Attributes:
        known: what was taken, and the module that took it.
        things: the objects, while they are referenced; None if that cannot be known.
    """

    known: Borrowed
    things: WeakSet[Any] | None


class Loans:
    """What other code has taken out of one group, by kind, file and line. Local, thread-safe."""

    _recorded = True

    def __init__(self) -> None:
        self._loans: dict[tuple[str, str, int], _Loan] = {}

    @classmethod
    def record(cls, wanted: bool) -> None:
        """Record from now on what is taken out of the groups of this process, or do not."""
        cls._recorded = wanted

    def take(self, group: Owner, name: str, value: Any) -> Any:
        """Record the caller of a method of the group, and return what it gets."""
        frame = borrower(2)
        if frame is None or not self._recorded or type(value) is OffloadedBackend:
            return value
        what, path, line = _KINDS[name], frame.f_code.co_filename, frame.f_lineno
        loan = self._loans.get((what, path, line))
        if loan is None or loan.known.ended:
            by, where = (
                str(frame.f_globals.get("__name__", "?")),
                f"{os.path.basename(path)}:{line}",
            )
            known = Borrowed(group.name, what, by, where, group.generation, raw=name in _RAW)
            loan = _Loan(known, WeakSet() if name in _REFERENCED else None)
            self._loans[what, path, line] = loan
        if loan.things is not None:
            loan.things.add(value)
        return value

    def held(self) -> list[Borrowed]:
        """List what other code still holds."""
        loans = list(self._loans.values())  # threads may take others
        return [one.known for one in loans if one.things is None or len(one.things)]

    def end(self) -> None:
        """The generation has ended. Idempotent."""
        for loan in list(self._loans.values()):
            loan.known = replace(loan.known, ended=True)

    def forget(self, package: str) -> None:
        """Forget what a package or module has taken: a callback of it has dropped that."""
        for key, loan in list(self._loans.items()):
            if is_of(loan.known, package):
                self._loans.pop(key, None)

    def clear(self) -> None:
        self._loans = {}


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


def is_of(known: Borrowed, package: str) -> bool:
    """Whether a module that is this package, or is in it, has taken this."""
    return f"{known.by}.".startswith(f"{package}.")


compiling.skip_in_compiled_code([borrower])
compiling.skip_methods_in_compiled_code(Loans)
