"""Sets of groups, which are offloaded and reloaded separately: a trainer's, a rollout engine's.

Every reloadable group belongs to one set. The default is :data:`TRAINER`, and the default group is
always in it. ``install(sets=...)`` declares the others. A group is in one of them if it is created
within a :class:`~.region.region` of that name, or by a package that ``install`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

from ..errors import InvalidOptionError
from ..settings import as_names

TRAINER = "trainer"
"""The default set."""

_INSIDE = frozenset({"reloadpg", "torch", "wrapt"})
"""Packages whose functions create groups on behalf of their callers."""

open_regions: ContextVar[tuple[str | None, ...]] = ContextVar("reloadpg_region", default=())
"""The open regions of this thread, the innermost one last."""


def creators() -> Iterator[str]:
    """Yield the modules of the functions on the call stack, innermost first, that create groups.

    Functions of torch and of this library are skipped: they create groups for their callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.partition(".")[0] not in _INSIDE:
            yield name
        frame = frame.f_back


def check_name(name: object, call: str) -> None:
    if not isinstance(name, str) or not name:
        raise _no_set(call)


def _no_set(call: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{call}: not the name of a set; nothing was changed. Pass a name such as "
        f'"engine"; the set of all other groups is "{TRAINER}".'
    )


@dataclass(frozen=True)
class Chosen:
    """The sets that an operation is for: ``names``, or all ``others``."""

    names: frozenset[str] = frozenset()
    others: bool = True

    @classmethod
    def of(cls, names: Iterable[str] | str, where: str) -> Chosen:
        """Return the sets that a user named; all sets if none. Raises InvalidOptionError."""
        given = as_names(names)
        if given is None or "" in given:
            shown = names[0] if isinstance(names, tuple) and len(names) == 1 else names
            raise _no_set(f"{where}({shown!r})")
        return cls(frozenset(given), others=not given)

    def __contains__(self, name: str) -> bool:
        return (name in self.names) != self.others

    def without(self, other: Chosen) -> Chosen:
        if not other.others:
            if self.others:
                return Chosen(self.names | other.names)
            return Chosen(self.names - other.names, others=False)
        names = other.names - self.names if self.others else self.names & other.names
        return Chosen(names, others=False)

    def overlaps(self, other: Chosen) -> bool:
        return bool(self.without(Chosen(other.names, others=not other.others)))

    def joined(self, names: Iterable[str]) -> Chosen:
        given = frozenset(names)
        return Chosen(self.names - given if self.others else self.names | given, self.others)

    def __bool__(self) -> bool:
        return self.others or bool(self.names)

    def __str__(self) -> str:
        names = ", ".join(sorted(self.names))
        return (f"all but {names}" if names else "all") if self.others else names


ALL = Chosen()


@dataclass(eq=False)
class SetState:
    """The state of one set in a job.

    Attributes:
        offloaded: whether the last operation left its groups without communicators.
        generation: the job's number of reloads when the set was last reloaded.
        cycles: number of completed offloads.
        depth: number of open blocks that keep it offloaded.
        users: number of open blocks in which it is live.
        owes_callbacks: whether callbacks of a reload are due on this rank though no group is
            offloaded: an offload has failed after its callbacks, or a callback after a reload has.
    """

    offloaded: bool = False
    generation: int = 0
    cycles: int = 0
    depth: int = 0
    users: int = 0
    owes_callbacks: bool = False

    def in_block(self) -> bool:
        """Whether an open block will reload it at its end."""
        return self.offloaded and self.depth > 0

    def __str__(self) -> str:
        return f"{'offloaded' if self.offloaded else 'live'}, generation {self.generation}"


class SetStates:
    """The states of a job's sets, which are those that ``install`` declares: equal on all ranks."""

    def __init__(self) -> None:
        self._states = {TRAINER: SetState()}

    def declare(self, names: Iterable[str]) -> None:
        """Add sets, and forget those of an earlier installation. Local, idempotent."""
        self._states = {name: self._states.get(name, SetState()) for name in (TRAINER, *names)}

    def __getitem__(self, name: str) -> SetState:
        return self._states.get(name, self._states[TRAINER])

    @property
    def names(self) -> list[str]:
        return list(self._states)

    def all(self) -> list[SetState]:
        return list(self._states.values())

    def of(self, chosen: Chosen) -> list[SetState]:
        """The states of the chosen sets. Local."""
        return [state for name, state in self._states.items() if name in chosen]

    def where(self, chosen: Chosen, holds: Callable[[SetState], bool]) -> Chosen:
        """Return the chosen sets whose state satisfies ``holds``; all sets if each does. Local."""
        found = [n for n, state in self._states.items() if n in chosen and holds(state)]
        return ALL if len(found) == len(self._states) else Chosen(frozenset(found), others=False)

    def plan(self) -> str:
        """Return the states as text, equal on all ranks that have run the same operations."""
        return "; ".join(f"{name}: {state}" for name, state in sorted(self._states.items()))
