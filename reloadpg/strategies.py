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
from .group import GroupState, ReloadableProcessGroup
from .supervised import Attempt

__all__ = [
    "KEEPING",
    "RECREATE",
    "Recreate",
    "Skip",
    "Strategy",
    "Suspend",
    "abandon",
    "communicators",
    "discard",
]


class Strategy(ABC):
    """One way to release communicators."""

    name: str

    @abstractmethod
    def release(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        """Give the communicator's memory back. Blocking; only for a live group.

        Args:
            group: the group.
            attempt: says whether the result is still wanted once it is there.
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
        """Make the group live again. Blocking; collective over the group's members.

        Args:
            group: a group without a communicator.
            name: name of the new generation, equal on all members and never used before.
            generation: number of the new generation.
            attempt: says whether the result is still wanted once it is there.
        """
        if attempt.abandoned:
            # The next attempt may be on its way: a creation now would take its store client.
            return
        is_world = group is c10d.world()
        group.store_paths.append(c10d.store_path(name, is_world=is_world))
        # Torch asks the default group that stands there for a communicator to split from (when it
        # is bound to a device) or for its options (fake, 2.15). The new WORLD must ask nobody; nor
        # must a split whose parent is gone, since only the members would take part.
        world = c10d.world()
        alone = is_world or group.construction.is_orphan
        with (
            world.solitary()
            if alone and isinstance(world, ReloadableProcessGroup)
            else nullcontext()
        ):
            inner = group.construction.replay(name)
        if inner is None:
            raise RuntimeError("torch says that this rank is no member of its own group")
        with attempt.commit() as wanted:
            if wanted:
                group._attach(inner, generation)
                group.history.strategy = self.name
            else:
                discard(inner)

    def spent_keys(self, group: ReloadableProcessGroup) -> list[str]:
        """The keys in the job's store that nobody reads any more; each is named once. Local.

        Asked before a rebuild, when all members have left the generations before.
        """
        paths, group.store_paths = group.store_paths, []
        made, rank = group.construction, group.rank()
        return [
            key
            for path in paths
            for key in c10d.rendezvous_keys(path, made.selected, rank, split=made.is_split)
        ]


class Suspend(Strategy):
    """Keep the communicator, and let the backend give back its memory.

    Collective over the members, without a bound inside the backend. What it leaves: NVLS and NET
    buffers, and the accelerator's context.
    """

    name = "suspend"

    def release(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        with attempt.commit() as wanted:
            if not wanted:
                return
            inner = group._park()
        for backend in communicators(inner, group.construction):
            backend.suspend()

    def resume(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        """Make a suspended group live again. Blocking; collective over the group's members."""
        if attempt.abandoned:
            return
        for backend in communicators(group.communicator, group.construction):
            backend.resume()
        with attempt.commit() as wanted:
            if wanted:
                group._unpark()


class Skip(Suspend):
    """Only refuse the use of a communicator that has nothing to suspend. Local."""

    name = "skip"

    def release(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        with attempt.commit() as wanted:
            if wanted:
                group._park()

    def resume(self, group: ReloadableProcessGroup, attempt: Attempt) -> None:
        with attempt.commit() as wanted:
            if wanted:
                group._unpark()


RECREATE = Recreate()
KEEPING: dict[str, Suspend] = {one.name: one for one in (Suspend(), Skip())}
"""The strategies that keep the communicator, by name."""


def abandon(groups: Sequence[ReloadableProcessGroup], state: GroupState, reason: str = "") -> None:
    """Leave groups without communicators, waiting for no other rank. Local.

    All groups are marked first; the communicators are aborted afterwards, together. Groups that
    the user has destroyed stay so.
    """
    ended: list[Any] = []
    for group in groups:
        if group.state is GroupState.DESTROYED:
            continue
        if group.communicator is not None:
            inner = group._detach(state, reason)
            ended += _released_parts(inner, group.construction)
        elif state is GroupState.FAILED:
            group._fail(reason)
    with c10d.together(ended):
        for part in ended:
            with suppress(RuntimeError):
                part.abort()


def communicators(inner: ProcessGroup, construction: Construction) -> list[Any]:
    """The backend objects of a group that are released, each once."""
    backends = c10d.live_backends(inner, construction.selected)
    return list({id(backend): backend for backend in backends.values()}.values())


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
