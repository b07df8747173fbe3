"""How a group's communicator is released and brought back: one small class a way.

A strategy acts on one group at a time; the order of groups, the agreement between ranks and the
bounds are the lifecycle's. It must leave a group either live or without a communicator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from torch.distributed import ProcessGroup

from . import c10d
from .construction import Construction
from .errors import InvalidOptionError
from .group import GroupState, ReloadableProcessGroup
from .supervised import Attempt

__all__ = ["STRATEGIES", "Recreate", "Strategy", "discard", "strategy_named"]


class Strategy(ABC):
    """One way to release and bring back communicators."""

    name: str

    @abstractmethod
    def release(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        """Give the communicator's memory back. Blocking; only for a live group."""

    @abstractmethod
    def rebuild(
        self, group: ReloadableProcessGroup, name: str, generation: int, attempt: Attempt
    ) -> None:
        """Make the group live again. Blocking; collective over the group's members.

        Args:
            group: a group without a communicator.
            name: name of the new generation, equal on all members and never used before.
            generation: number of the new generation.
            attempt: says whether the result is still wanted once it is there.
        """

    @abstractmethod
    def spent_keys(self, group: ReloadableProcessGroup) -> list[str]:
        """The keys in the job's store that nobody reads any more; each is named once. Local.

        Asked before a rebuild, when all members have left the generations before.
        """

    @abstractmethod
    def abandon(self, groups: Sequence[ReloadableProcessGroup], reason: str) -> None:
        """After a failure: leave the groups without communicators, waiting for no other rank.

        All groups are marked first; the communicators are aborted afterwards, together.
        """


class Recreate(Strategy):
    """Destroy the communicator; replay the group's construction to get a new one."""

    name = "recreate"

    def release(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        with attempt.commit() as wanted:
            if not wanted:
                return
            inner = group._detach()
        if inner._has_hooks():
            inner._wait_for_pending_works()
        for part in _released_parts(inner, group.construction):
            part.shutdown()

    def rebuild(
        self, group: ReloadableProcessGroup, name: str, generation: int, attempt: Attempt
    ) -> None:
        if attempt.abandoned:
            # The next attempt may be on its way: a creation now would take its store client.
            return
        is_world = group is c10d.world()
        group.store_paths.append(c10d.store_path(name, is_world=is_world))
        # Torch asks the default group that stands there for a communicator to split from (when it
        # is bound to a device) or for its options (fake, 2.15): the new WORLD must ask nobody.
        with group.solitary() if is_world else nullcontext():
            inner = group.construction.replay(name)
        if inner is None:
            raise RuntimeError("torch says that this rank is no member of its own group")
        with attempt.commit() as wanted:
            if wanted:
                group._attach(inner, generation)
            else:
                discard(inner)

    def spent_keys(self, group: ReloadableProcessGroup) -> list[str]:
        paths, group.store_paths = group.store_paths, []
        devices, rank = group.construction.selected, group.rank()
        return [key for path in paths for key in c10d.rendezvous_keys(path, devices, rank)]

    def abandon(self, groups: Sequence[ReloadableProcessGroup], reason: str) -> None:
        ended: list[Any] = []
        for group in groups:
            if group.state is GroupState.LIVE:
                inner = group._detach(GroupState.FAILED, reason)
                ended += _released_parts(inner, group.construction)
            elif group.state is not GroupState.DESTROYED:
                group._fail(reason)
        with c10d.together(ended):
            for part in ended:
                with suppress(RuntimeError):
                    part.abort()


def discard(inner: ProcessGroup) -> None:
    """End a group that nobody has seen yet, waiting for nobody. Local."""
    c10d.evict(inner)
    with suppress(RuntimeError):
        inner.abort()


def _released_parts(inner: ProcessGroup, construction: Construction) -> list[Any]:
    """What of a live group is released: the whole, or of a mixed one the selected backends."""
    if not construction.is_mixed:
        return [inner]
    return list(c10d.live_backends(inner, construction.selected).values())


STRATEGIES: dict[str, type[Strategy]] = {Recreate.name: Recreate}


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        InvalidOptionError: there is none.
    """
    try:
        return STRATEGIES[name]()
    except (KeyError, TypeError):
        raise InvalidOptionError(
            f"install(strategy={name!r}): unknown strategy; nothing was installed. "
            f"Use one of: {', '.join(sorted(STRATEGIES))}."
        ) from None
