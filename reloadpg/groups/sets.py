"""Sets of groups, which are offloaded and reloaded separately: a trainer's, a rollout engine's.

Every reloadable group belongs to one set. The default is :data:`TRAINER`, and the default group is
always in it. A group is in another set if it is created within a :class:`region`, or by a package
that ``install(sets=...)`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FrameType

from ..errors import InvalidOptionError
from ..settings import as_names
from .decorating import Decorator

TRAINER = "trainer"
"""The default set."""

_INSIDE = frozenset({"reloadpg", "torch", "wrapt"})
"""Packages whose functions create groups on behalf of their callers."""

open_regions: ContextVar[tuple[str | None, ...]] = ContextVar("reloadpg_region", default=())
"""The open regions of this thread, the innermost one last."""


class region(Decorator):  # noqa: N801 - used like a function
    """Put the groups that are created within this block into a set.

    ::

        with reloadpg.region("engine"):
            llm = vllm.LLM(model, tensor_parallel_size=2, distributed_executor_backend=...)

    Local, not blocking; before or after ``install``. All members of a group must create it in the
    same region. A region applies to the calling thread (or asyncio task) and overrides the rules of
    ``install(sets=...)``. Regions nest; the innermost one counts. It can be used as a decorator, as
    :class:`offloaded` can.
    The default group is always in the set ``"trainer"``. Existing groups stay in their sets.

    Args:
        name: the set. None makes the groups bypass, without a warning.

    Raises:
        InvalidOptionError: ``name`` is not the name of a set.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None:
            check_name(name, f"region({name!r})")
        self._name = name

    def __enter__(self) -> None:
        open_regions.set((*open_regions.get(), self._name))

    def __exit__(self, *_: object) -> None:
        open_regions.set(open_regions.get()[:-1])


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


@dataclass
class SetState:
    """The state of one set in a job.

    Attributes:
        offloaded: whether the last operation left its groups without communicators.
        generation: the job's number of reloads when the set was last reloaded.
        cycles: number of completed offloads.
        blocks: open blocks that have offloaded it, with their levels: a block that is opened
            within others has their level, or a higher one if the set was live again.
        users: open blocks in which it is live.
    """

    offloaded: bool = False
    generation: int = 0
    cycles: int = 0
    blocks: dict[object, int] = field(default_factory=dict)
    users: set[object] = field(default_factory=set)

    def level(self) -> int:
        """The highest level of an open block; 0 without one."""
        return max(self.blocks.values(), default=0)

    def ends_with(self, block: object) -> bool:
        """Whether the end of a block reloads it: no other block of that level is open."""
        mine = self.blocks.get(block, 0)
        return all(level < mine for other, level in self.blocks.items() if other is not block)

    def in_block(self) -> bool:
        """Whether an open block will reload it at its end."""
        return self.offloaded and bool(self.blocks)

    def __str__(self) -> str:
        return f"{'offloaded' if self.offloaded else 'live'}, generation {self.generation}"


class SetStates:
    """The states of a job's sets, equal on all ranks.

    A rank does not know every set, since it may have no group in it. So all sets share one state,
    and a set gets a separate state with the first operation that names it.
    """

    def __init__(self) -> None:
        self._rest = SetState()
        self._named: dict[str, SetState] = {}

    def __getitem__(self, name: str) -> SetState:
        return self._named.get(name, self._rest)

    def separate(self, chosen: Chosen) -> list[SetState]:
        """Return the states of these sets, separate from all other sets. Local, idempotent."""
        for name in chosen.names - self._named.keys():
            self._named[name] = replace(
                self._rest, blocks=dict(self._rest.blocks), users=set(self._rest.users)
            )
        return [
            *(state for name, state in self._named.items() if name in chosen),
            *([self._rest] if chosen.others else []),
        ]

    def forget(self, names: Iterable[str]) -> None:
        """Give these sets the shared state again. Local, idempotent."""
        for name in names:
            self._named.pop(name, None)

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def all(self) -> list[SetState]:
        return [*self._named.values(), self._rest]

    def where(self, chosen: Chosen, holds: Callable[[SetState], bool]) -> Chosen:
        """Return the chosen sets whose state satisfies ``holds``. Local."""
        rest = holds(self._rest)
        apart = frozenset(name for name, state in self._named.items() if holds(state) != rest)
        return chosen.without(Chosen(apart, others=not rest))

    def plan(self) -> str:
        """Return the states as text, equal on all ranks that have run the same operations."""
        rest = str(self._rest)
        named = [f"{n}: {state}" for n, state in sorted(self._named.items()) if str(state) != rest]
        return "; ".join([*named, f"others: {rest}" if named else rest])
