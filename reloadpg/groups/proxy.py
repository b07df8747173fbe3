"""``ReloadableProcessGroup``: a process group whose communicator can be released and rebuilt.

Do not assume:

* that a backend object (``group._get_backend(device)``) outlives an offload. It belongs to one
  generation (:mod:`.loans`); get it again after a reload.
* that the proxy's C++ object has a backend. C++ code that requests one finds none; torch itself
  calls methods that find the live group.
* that another group replaces it while it is offloaded. Every operation that needs a communicator
  raises :class:`~reloadpg.errors.GroupOffloadedError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..c10d import backends, compiling, creation, tables
from ..errors import GroupPickleError
from .creation import Construction
from .dispatch import Dispatch, from_template
from .loans import OURS, THROUGH
from .managed import ManagedGroup
from .offloaded import GroupState as GroupState

_SET_DESC: Callable[[ProcessGroup, str], None] = ProcessGroup.__dict__["_set_group_desc"]
_BOUND_DEVICE: property = ProcessGroup.__dict__["bound_device_id"]


class ReloadableProcessGroup(Dispatch):
    """A process group that keeps its identity while its communicator is released and rebuilt.

    Instances are created by the patched ``torch.distributed`` functions. Identity, hash,
    ``group_name``, rank and size never change. Copying returns the same object. A pickle holds the
    group's name, which the receiving process resolves.

    It has the attributes of ``ProcessGroup``, an override of one of its methods in C++, and these:

    Attributes:
        generation: the job's number of reloads, of any set, when its communicator was built; 0 if
            the original call has built it. It is not the number of this group's rebuilds: a group
            that is created after one reload has 2 after its first rebuild.
        state: a :class:`~reloadpg.extend.GroupState`; a suspended group is offloaded.
    """

    _managed: ManagedGroup

    def __init__(self, inner: ProcessGroup, construction: Construction) -> None:
        self._rank, self._size = construction.rank, len(construction.entry.ranks)
        # The (store, rank, size) form, the only one in torch's stubs, fails for subclasses.
        ProcessGroup.__init__(self, self._rank, self._size)  # type: ignore[call-arg, arg-type]
        self._name = inner.name()
        self._inner = inner
        self._managed = ManagedGroup(self, inner, construction)
        desc = construction.entry.desc
        if desc != "undefined":  # torch's default, which no C++ code reads
            _SET_DESC(self, desc)
        device = inner.bound_device_id
        if device is not None:
            # The C++ getter is not virtual, so the proxy's C++ object must hold the device.
            _BOUND_DEVICE.__set__(self, device)
        tables.take_place(inner, self)

    @property
    def generation(self) -> int:
        return self._managed.generation

    @property
    def state(self) -> GroupState:
        return self._managed.state.shown

    # -- identity: available in every state -------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # It overrides a virtual method of C++, by its name there, which raises without a backend.
    def getGroupName(self) -> str:  # noqa: N802
        return self._managed.construction.name

    group_name = property(getGroupName)  # type: ignore[assignment]

    @property
    def group_desc(self) -> str:
        return self._managed.desc

    def name(self) -> str:
        return self._name

    _get_backend_name = name

    @property
    def _device_types(self) -> list[Any]:
        # Torch's creating functions read WORLD's backends; a replay needs none.
        if creation.is_creating():
            return []
        if (live := self._managed.live) is not None:
            return backends.device_types(live)
        return [torch.device(device) for device in self._managed.construction.devices]

    def _bind_device(self, device: Any) -> None:
        _BOUND_DEVICE.__set__(self, device)
        if (live := self._managed.live) is not None:
            live.bound_device_id = device

    # Every barrier reads it, so it is torch's getter, without a call into Python.
    bound_device_id = property(_BOUND_DEVICE.fget, _bind_device)

    @property
    def use_pg_for_symm_mem_rendezvous(self) -> Any:
        if (live := self._managed.live) is not None:
            return live.use_pg_for_symm_mem_rendezvous
        return self._managed.carried.symm_mem

    @use_pg_for_symm_mem_rendezvous.setter
    def use_pg_for_symm_mem_rendezvous(self, value: Any) -> None:
        self._managed.carried.set_symm_mem(value, self._managed.live)

    def get_group_store(self) -> Any:
        return tables.store_of(self)

    def _set_group_name(self, name: str) -> None:
        if name != self.group_name:
            raise ValueError(
                f"the name of {self!r} is fixed for the life of the job (meshes and compiled code "
                "find the group by it); create a new group for another name"
            )

    def _set_group_desc(self, desc: str) -> None:
        _SET_DESC(self, desc)  # the C++ object's
        self._managed.carried.set_desc(desc, self._managed.live)

    def _has_hooks(self) -> bool:
        return self._managed.carried.has_hooks

    def _wait_for_pending_works(self) -> None:
        if (live := self._managed.live) is not None:
            backends.await_hooks(live)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all backends, now or from the next generation on. Local."""
        self._managed.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        if (live := self._managed.live) is not None:  # it applies to pending collectives only
            live._add_ephemeral_timeout(timeout)

    def __copy__(self) -> ReloadableProcessGroup:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ReloadableProcessGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find_group, (self.group_name, self._managed.construction.ranks)

    def __repr__(self) -> str:
        return repr(self._managed)

    # -- end of life: the user destroys the group -------------------------------------------

    def shutdown(self) -> None:
        """Destroy the communicator permanently; called by ``destroy_process_group``. Idempotent.

        Waits for a running operation that was started with ``wait=False``.
        """
        if self._has_hooks():
            self._wait_for_pending_works()
        self._managed.destroy(lambda inner: inner.shutdown())

    def abort(self) -> None:
        """Abort the communicator permanently; called by ``_abort_process_group``. Idempotent.

        Waits like :meth:`shutdown`.
        """
        self._managed.destroy(lambda inner: inner.abort())


def managed(group: object) -> ManagedGroup | None:
    """Return the record of a reloadable group; None for any other object."""
    return group._managed if isinstance(group, ReloadableProcessGroup) else None


# -- what leaves a group: see .loans ---------------------------------------------------------


def _taken(self: Any, *args: Any, **kwargs: Any) -> Any:
    value = self._inner.METHOD(*args, **kwargs)
    return self._managed.loans.take(self._managed, "METHOD", value)


def _taken_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
    call = self._inner.METHOD
    backend = call(*args, **kwargs) if kwargs else call(*args)
    # A batch of sends gets it once, and torch 2.15 WORLD's four times in each creation: no further
    # call for torch.
    caller = sys._getframe(1)
    name = caller.f_globals.get("__name__", "")
    if name.startswith(OURS) and caller.f_code.co_name not in THROUGH:
        return backend
    return self._managed.loans.take(self._managed, "METHOD", backend)


for _template, _names in (
    (_taken_backend, ("_get_backend", "get_backend")),
    (_taken, ("new_window", "register_abort_hook")),
):
    for _name in _names:
        if hasattr(ProcessGroup, _name):  # hasattr() must give the same result as on a plain group
            setattr(ReloadableProcessGroup, _name, from_template(_template, _name, globals()))

for _name in ("get_group_store", "set_timeout", "use_pg_for_symm_mem_rendezvous"):
    if not hasattr(ProcessGroup, _name):  # before torch 2.9 to 2.15
        delattr(ReloadableProcessGroup, _name)

compiling.skip_methods_in_compiled_code(ReloadableProcessGroup)


def find_group(name: str, ranks: tuple[int, ...] = ()) -> ProcessGroup:
    """Return this process's group of that name, to resolve a pickled group."""
    for group in tables.known_groups():
        if tables.name_of(group) == name:
            if ranks and tables.ranks_of(group) != tuple(ranks):
                raise GroupPickleError(
                    f"a pickled process group {name!r} of ranks {list(ranks)} cannot be resolved: "
                    f"here the group has the ranks {list(tables.ranks_of(group))}. Unpickle it "
                    "in a process of the same job, with its groups created in the same order."
                )
            return group
    raise GroupPickleError(
        f"a pickled process group {name!r} cannot be resolved: this process has no group of that "
        "name. A pickle holds only the name. Create the same groups here first, or do not pickle "
        "the group."
    )
