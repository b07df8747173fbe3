"""The store with which torch creates groups, before, within and after an operation that failed."""

from __future__ import annotations

from typing import cast

from torch.distributed import ProcessGroup

from . import c10d
from .construction import WorldConstruction
from .group import ReloadableProcessGroup
from .supervised import Attempt

__all__ = ["CreationStore"]


class CreationStore:
    """What torch's creating functions find as the default group's store, over one operation.

    Made before anything is touched: alike on all ranks then, who agree on the generation.

    Args:
        world: the default group.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._store = c10d.store_of(world)
        self._path = c10d.top_path()

    def restore(self) -> None:
        """Let groups be created as before the operation. Local, idempotent.

        Some ranks had rebuilt WORLD and others had not: the groups that they make until the next
        reload would look for each other under different names in the store.
        """
        world = self._world
        if not c10d.is_known(world):  # a callback may have destroyed it
            return
        c10d.replace_store(world, self._store)
        if isinstance(world, ReloadableProcessGroup) and world.store_paths[-1:] != [self._path]:
            world.store_paths.append(self._path)

    def renew(self, attempt: Attempt) -> bool:
        """Connect anew, after work was given up. Local; blocking until connected.

        A creation that was given up may hold the store client of the default group, with which
        all groups are created.

        Returns:
            Whether it was done: the attempt may have been abandoned meanwhile.
        """
        world = self._world
        store = c10d.clone_store(c10d.store_of(world))
        with attempt.commit() as wanted:
            if not wanted or not c10d.is_known(world):
                return False
            self._store = store
            c10d.replace_store(world, store)
            if isinstance(world, ReloadableProcessGroup):
                construction = cast(WorldConstruction, world.construction)
                world.construction = construction.with_store(c10d.root_store(world))
            return True
