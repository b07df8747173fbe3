"""Registry of the reloadable groups of this process, and why others are not reloadable.

It has no list of managed groups: a managed group is a proxy in c10d's tables. So a destroyed group
is no longer managed, and a proxy without other references is not kept alive.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed import ProcessGroup

from ..c10d import tables
from ..settings import is_off
from .managed import ManagedGroup
from .offloaded import GroupState
from .proxy import ReloadableProcessGroup, managed
from .selection import Bypass, Selected, Selection
from .sets import TRAINER


class Registry:
    """The groups of this process. One instance: :data:`registry`."""

    def __init__(self) -> None:
        self.selection: Selection | None = None
        """The installation's rule that selects groups; None without one."""
        self._disowned: list[Any] = []
        """The parent's communicators in a forked child: their destructors would wait."""
        self._begin_process()

    @property
    def off(self) -> bool:
        """Whether nothing is installed, and ``RELOADPG=off`` makes all operations do nothing."""
        return self.selection is None and is_off(os.environ)

    @property
    def sets(self) -> frozenset[str]:
        """All sets: the trainer's, and the declared ones."""
        return frozenset([TRAINER] if self.selection is None else self.selection.set_names)

    def select(self, selection: Selection | None) -> None:
        """Select groups by this rule from now on; by none after an installation. Local."""
        self.selection = selection
        if selection is not None:
            for group in self.managed():  # of an installation with other sets
                if group.set_name not in self.sets:
                    group.join(TRAINER)

    def _begin_process(self) -> None:
        self.lock = threading.RLock()
        """Never held across a callback or a collective step."""
        self.warned: set[str] = set()
        self.left_alone: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Selected groups that cannot be managed, with the reason."""
        self.without_set: WeakSet[ProcessGroup] = WeakSet()
        """Groups whose creator is in no set, by a rule or a region."""
        self.outside_tables: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Groups that are in none of torch's tables, with the reason."""
        self._inherited: ProcessGroup | None = None

    def after_fork(self) -> None:
        """In a forked child: keep the patches, disown the parent's groups.

        The child inherits the parent's groups and their sockets, but not the threads that serve
        them: a collective or the end of a group would wait indefinitely. So every operation is
        refused until the child starts its own job.
        """
        self._disowned += [group.disown() for group in _managed_groups()]
        # Gloo's destructor of torch 2.8 hangs in the end of the interpreter, or ends it by SIGABRT.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._disowned))
        self._begin_process()
        self._inherited = tables.world()

    def managed(self) -> list[ManagedGroup]:
        """List the reloadable groups, in the order that all ranks share: WORLD first."""
        if tables.world() is self._inherited is not None:
            return []
        return sorted(_managed_groups(), key=lambda group: group.construction.order)

    def unmanaged(self) -> list[tuple[ProcessGroup, str]]:
        """List the groups that are selected but not managed, with the reason."""
        rows = [
            (group, self.left_alone.get(group, _RAW))
            for group, bypass in self._others()
            if bypass is None
        ]
        if self.selection is not None:
            for group, reason in list(self.outside_tables.items()):
                if isinstance(self._decide(group, self.selection), Selected):
                    rows.append((group, reason))
        return rows

    def bypassed(self) -> list[tuple[ProcessGroup, Bypass]]:
        return [(group, bypass) for group, bypass in self._others() if bypass is not None]

    def of_one_rank(self) -> dict[ProcessGroup, tuple[str, ...]]:
        """The groups that bypass since they have one rank, with the devices of their backends."""
        if self.selection is None or self.selection.min_size == 1:
            return {}
        smaller = replace(self.selection, min_size=1)
        found = {
            group: self._decide(group, smaller)
            for group, bypass in self._others()
            if bypass is not None and group.size() == 1
        }
        return {group: one.devices for group, one in found.items() if isinstance(one, Selected)}

    def dropped(self, held: Collection[ProcessGroup] = ()) -> list[ProcessGroup]:
        """List the reloadable groups that only torch's tables refer to, and once each of ``held``.

        Local. The program dropped them without destroying them. A mesh finds its groups by name, so
        they do not count.
        """
        groups = [group for group in tables.known_groups() if managed(group) is not None]
        in_tables = tables.references()
        in_tables.update(map(id, held))
        none, *counts = [sys.getrefcount(thing) for thing in [object(), *groups]]
        return [
            group
            for group, count in zip(groups, counts, strict=True)
            if count - none <= in_tables[id(group)] and not tables.is_of_mesh(group)
        ]

    def _others(self) -> Iterator[tuple[ProcessGroup, Bypass | None]]:
        """Yield the groups that are not managed, with the reason if they bypass."""
        selection = self.selection
        if selection is None or tables.world() is self._inherited is not None:
            return
        for group in tables.known_groups():
            if not isinstance(group, ReloadableProcessGroup):
                decision = self._decide(group, selection)
                yield group, None if isinstance(decision, Selected) else decision

    def _decide(self, group: ProcessGroup, selection: Selection) -> Selected | Bypass:
        """What a selection decides about a group that torch created."""
        set_name = None if group in self.without_set else TRAINER
        is_world = group is tables.world()
        return selection.decide(tables.entry_of(group), lambda: set_name, is_world=is_world)

    def offloaded(self) -> list[ManagedGroup]:
        return [group for group in self.managed() if group.state is not GroupState.LIVE]

    def is_inherited(self, world: ProcessGroup) -> bool:
        """Whether a default group was inherited from the parent process by a fork."""
        return world is self._inherited


def _managed_groups() -> list[ManagedGroup]:
    return [record for group in tables.known_groups() if (record := managed(group)) is not None]


_RAW = (
    "it was created before reloadpg.install(), or by a function that reloadpg does not patch; "
    "call install() earlier, or pass the group to reloadpg.register_group()"
)

registry = Registry()
os.register_at_fork(after_in_child=registry.after_fork)
