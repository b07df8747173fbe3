"""The groups that a block has created, and the open blocks of this process. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from .launchers import is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


class Scope:
    """The groups that were created since this object was created, or since its block began.

    Reusable, but not reentrant. A group is identified by its store. A proxy and a reload keep it,
    and a later group of the same name has another one.
    """

    def __init__(self) -> None:
        self._before = _stores_of_groups()

    def begin(self) -> None:
        """Begin a block: the groups that exist now are not part of it. Local."""
        self._before = _stores_of_groups()

    def now(self) -> list[ProcessGroup]:
        """Return the existing groups, in order of creation; WORLD first, if it is one of them."""
        if not is_initialized():
            return []
        from ..c10d import tables

        return [one for one in tables.known_groups() if tables.store_of(one) not in self._before]

    def meets_on(self) -> list[ProcessGroup]:
        """The groups whose ranks meet at the end: WORLD, which covers all; otherwise each one."""
        if not is_initialized():
            return []
        from ..c10d import tables

        groups = self.now()
        return groups[:1] if tables.world() in groups else groups


open_scopes: list[Scope] = []
"""The open blocks of this process, in the order in which they began."""


def _stores_of_groups() -> WeakSet[Store]:
    """The stores of the existing groups."""
    if not is_initialized():
        return WeakSet()
    from ..c10d import tables

    return WeakSet(tables.store_of(group) for group in tables.known_groups())
