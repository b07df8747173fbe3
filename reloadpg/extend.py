"""The interface for integrations and other packages, beyond the functions that programs call.

The modules of ``reloadpg.integrations`` and ``reloadpg.observability`` use these names, the public
functions, ``errors``, ``reports``, ``recovery``, ``environment`` and the shared helpers of the
package (``c10d``, ``settings``, ``texts``, ``processes``), and nothing else. The names here change
only with a note in the changelog.

* Groups: :class:`GroupState`, :class:`ManagedGroup`, :func:`managed`, :func:`managed_groups`,
  :func:`new_plain_group`; sets of groups:
  :func:`named_sets`, :func:`check_name`, :func:`declared_sets`, :func:`concerns`, ``TRAINER``.
* Operations: :class:`Pending`; :class:`Block`; :func:`check_group`, :func:`validate` and
  ``Connect``.
* Callbacks: ``callbacks``, :class:`Callback`, :func:`register`.
* Memory: :func:`add_source`.
* State: ``registry``, whose options :func:`manage_world` reads; :func:`running`,
  :func:`is_inherited`; :class:`LibraryThread`, a thread that ends before the interpreter does.
"""

from __future__ import annotations

from .c10d.memory import add_source as add_source
from .groups.managed import ManagedGroup as ManagedGroup
from .groups.offloaded import GroupState as GroupState
from .groups.proxy import managed as managed
from .groups.registry import registry as registry
from .groups.sets import TRAINER as TRAINER
from .groups.sets import check_name as check_name
from .groups.sets import concerns as concerns
from .groups.sets import named_sets as named_sets
from .groups.wrappers import manage_world as manage_world
from .groups.wrappers import new_plain_group as new_plain_group
from .lifecycle.block import Block as Block
from .lifecycle.callbacks import Callback as Callback
from .lifecycle.callbacks import callbacks as callbacks
from .lifecycle.callbacks import register as register
from .lifecycle.connect import Connect as Connect
from .lifecycle.connect import check_group as check_group
from .lifecycle.connect import validate as validate
from .lifecycle.job import jobs
from .lifecycle.pending import Pending as Pending
from .threads import LibraryThread as LibraryThread

is_inherited = registry.is_inherited
managed_groups = registry.managed
running = jobs.progress


def declared_sets() -> frozenset[str]:
    """All sets: the trainer's, and those that the installation declares. Local."""
    return registry.sets


__all__ = [
    "TRAINER",
    "Block",
    "Callback",
    "Connect",
    "GroupState",
    "LibraryThread",
    "ManagedGroup",
    "Pending",
    "add_source",
    "callbacks",
    "check_group",
    "check_name",
    "concerns",
    "declared_sets",
    "is_inherited",
    "manage_world",
    "managed",
    "managed_groups",
    "named_sets",
    "new_plain_group",
    "register",
    "registry",
    "running",
    "validate",
]
