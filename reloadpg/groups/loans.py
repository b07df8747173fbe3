"""Who has taken an object out of a group, and of which of its generations it is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakSet

OURS = ("torch.", f"{__name__.partition('.')[0]}.")
_OURS_ALONE = frozenset(name[:-1] for name in OURS)
THROUGH = frozenset({"get_backend_impl", "_new_window"})
"""Functions of torch that return to their caller what they take out of a group."""


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


@dataclass
class Loan:
    """One line of a program that has taken something of one generation.

    Attributes:
        what: ``backend``, ``communicator pointer``, and so on.
        by: the module.
        where: file and line.
        raw: whether a use after the end of the generation is a use after free.
        generation: the generation of the group.
        life: how many generations of the group had ended.
        things: what was taken, while it is referenced; None if that cannot be known.
    """

    what: str
    by: str
    where: str
    raw: bool
    generation: int
    life: int
    things: WeakSet[Any] | None

    @property
    def is_held(self) -> bool:
        return self.things is None or len(self.things) > 0


@dataclass
class Loans:
    """What has been taken out of one group, by kind and line. Later generations replace earlier.

    Attributes:
        life: how many generations have ended.
    """

    life: int = 0
    _taken: dict[tuple[str, str, int], Loan] = field(default_factory=dict)

    def record(
        self, what: str, frame: FrameType, generation: int, *, raw: bool, thing: Any = None
    ) -> None:
        """Record that the line of a frame has taken something. Local."""
        path, line = frame.f_code.co_filename, frame.f_lineno
        loan = self._taken.get((what, path, line))
        if loan is None or loan.life != self.life:
            by = str(frame.f_globals.get("__name__", "?"))
            where = f"{os.path.basename(path)}:{line}"
            things = None if thing is None else WeakSet[Any]()
            loan = Loan(what, by, where, raw, generation, self.life, things)
            self._taken[what, path, line] = loan
        if loan.things is not None:
            loan.things.add(thing)

    def held(self) -> list[Loan]:
        """List what is still held; forget the rest."""
        for key in [key for key, loan in list(self._taken.items()) if not loan.is_held]:
            self._taken.pop(key, None)
        return list(self._taken.values())

    def end(self) -> None:
        """End the current generation. Local."""
        self.life += 1

    def forget(self, package: str) -> None:
        """Forget what a package or module has taken: a callback of it has dropped that."""
        for key, loan in list(self._taken.items()):
            if is_part(loan.by, package):
                self._taken.pop(key, None)
