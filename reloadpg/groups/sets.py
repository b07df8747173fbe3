"""Sets of groups, which are offloaded and reloaded separately: a trainer's, a rollout engine's.

Every reloadable group belongs to one set. The default is :data:`TRAINER`, and the default group is
always in it. ``install(sets=...)`` declares the others. A group is in one of them if it is created
within a :class:`~.region.region` of that name, or by a package that ``install`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
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
    """Raise InvalidOptionError, naming the call, for what cannot be the name of a set. Local."""
    if not isinstance(name, str) or not name:
        raise _no_set(call)


def _no_set(call: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{call}: not the name of a set; nothing was changed. Pass a name such as "
        f'"engine"; the set of all other groups is "{TRAINER}".'
    )


def named_sets(names: Iterable[str] | str, where: str) -> frozenset[str]:
    """Return the sets that a user named; empty if none, for all. Raises InvalidOptionError."""
    given = as_names(names)
    if given is None or "" in given:
        shown = names[0] if isinstance(names, tuple) and len(names) == 1 else names
        raise _no_set(f"{where}({shown!r})")
    return frozenset(given)


def concerns(named: Collection[str], sets: Collection[str]) -> bool:
    """Whether what a user has registered for the named sets, or for all, is for one of these."""
    return any(not named or name in named for name in sets)
