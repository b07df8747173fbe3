"""The interface for integrations and other packages, beyond the functions that programs call.

The modules of ``reloadpg.integrations`` and ``reloadpg.observability`` use these names, the public
functions, ``errors``, ``reports``, ``recovery``, ``environment`` and the shared helpers of the
package (``c10d``, ``settings``, ``texts``, ``processes``), and nothing else. The names here change
only with a note in the changelog. All of them are functions, or types of arguments and results.

* Groups: :func:`managed`, :func:`managed_groups`, of :class:`ManagedGroup` with a
  :class:`GroupState`; :func:`new_plain_group`, :func:`select_world`, :func:`is_inherited`.
* Sets of groups: :func:`named_sets`, :func:`check_name`, :func:`declared_sets`, :func:`concerns`,
  ``TRAINER``.
* Operations: :func:`check_before`, :func:`running`, :func:`validate` for a ``Connect``,
  :class:`Block`, :class:`~reloadpg.Pending`.
* The library itself: :func:`on_uninstall`; :class:`LibraryThread`, a thread that ends before the
  interpreter does.
"""

from __future__ import annotations

from .groups.managed import ManagedGroup as ManagedGroup
from .groups.offloaded import GroupState as GroupState
from .groups.proxy import managed as managed
from .groups.registry import registry
from .groups.sets import TRAINER as TRAINER
from .groups.sets import check_name as check_name
from .groups.sets import concerns as concerns
from .groups.sets import named_sets as named_sets
from .groups.wrappers import new_plain_group as new_plain_group
from .lifecycle.block import Block as Block
from .lifecycle.callbacks import check_before as check_before
from .lifecycle.callbacks import on_uninstall as on_uninstall
from .lifecycle.connect import Connect as Connect
from .lifecycle.connect import validate as validate
from .lifecycle.install import select_world as select_world
from .lifecycle.job import jobs
from .lifecycle.pending import Pending as Pending
from .threads import LibraryThread as LibraryThread

is_inherited = registry.is_inherited
managed_groups = registry.managed
running = jobs.progress


def declared_sets() -> frozenset[str]:
    """All sets: the trainer's, and the declared ones. Local."""
    return registry.sets


__all__ = [
    "TRAINER",
    "Block",
    "Connect",
    "GroupState",
    "LibraryThread",
    "ManagedGroup",
    "Pending",
    "check_before",
    "check_name",
    "concerns",
    "declared_sets",
    "is_inherited",
    "managed",
    "managed_groups",
    "named_sets",
    "new_plain_group",
    "on_uninstall",
    "running",
    "select_world",
    "validate",
]
