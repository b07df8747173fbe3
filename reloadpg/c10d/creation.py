"""Torch's functions that create groups, called with a given name, store and device."""

from __future__ import annotations

import inspect
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as _cpp
from torch.distributed import ProcessGroup, Store, device_mesh
from torch.distributed import distributed_c10d as _c10d

from . import tables
from .backends import live_backends

COMPILERS_NEW_GROUP = "_new_group_with_tag"
"""The function with which torch's compiler creates its groups."""


def creator_modules() -> tuple[ModuleType, ...]:
    """Return torch's modules that bind the creating functions."""
    return (_c10d, torch.distributed, device_mesh)


def creators_outside_tables() -> list[str]:
    """Name the functions of the installed torch whose groups are in none of its tables."""
    methods = ("split_group", "merge_remote_group")
    names = [f"ProcessGroup.{name}" for name in methods if name in vars(ProcessGroup)]
    return [*names, "_dist2.new_group"] if find_spec("torch.distributed._dist2") else names


def owner_of(name: str) -> tuple[Any, str]:
    """Return the class or module that defines one of these functions, and its name there."""
    owner, _, attribute = name.partition(".")
    if owner == "ProcessGroup":
        return ProcessGroup, attribute
    return import_module(f"torch.distributed.{owner}"), attribute


def original(name: str) -> Callable[..., Any]:
    """Return one of torch's creating functions, unpatched."""
    function = getattr(_c10d, name)
    return cast("Callable[..., Any]", getattr(function, "__wrapped__", function))


def sorts_ranks() -> bool:
    """Whether ``new_group`` always sorts the ranks (2.8); later versions have ``sort_ranks``."""
    return "sort_ranks" not in inspect.signature(original("new_group")).parameters


def batching_refuses_subclasses() -> bool:
    """Whether ``batch_isend_irecv`` coalesces only for plain groups (2.8, 2.13)."""
    return "type" in inspect.unwrap(_c10d.batch_isend_irecv).__code__.co_names


def check_batch(operations: Any) -> None:
    _c10d._check_p2p_op_list(operations)


def batch_coalesced(operations: Sequence[Any]) -> list[Any]:
    """Run operations as ``batch_isend_irecv`` does for a group whose backend coalesces."""
    first = operations[0]
    with _c10d._coalescing_manager(first.group, first.tensor.device, async_ops=True) as manager:
        for p2p in operations:
            peer = "group_dst" if p2p.op in (_c10d.isend, _c10d.send) else "group_src"
            p2p.op(p2p.tensor, group=p2p.group, tag=p2p.tag, **{peer: p2p.group_peer})
    return cast("list[Any]", manager.works)


@dataclass
class PrivateCreation:
    """What differs for the groups that a thread creates in a :func:`private_creation` block.

    Attributes:
        by_members: whether its members alone take part. If the default group is bound to a device,
            torch creates new groups by splitting its communicator, which is collective over all
            ranks of the job. With ``TORCH_DIST_INIT_BARRIER=1`` all ranks also wait for each other.
            Neither happens then (2.8, 2.13 and 2.15).
        name: the name of the groups; None for torch's names, from a counter that must be equal on
            all ranks.
        store: the store beneath the name's prefix; None for the default group's.
        device: the device that groups are bound to, if ``name`` is given.
        tables: the tables that this thread sees, by name; None for the tables of the process.
    """

    by_members: bool = True
    name: str | None = None
    store: Store | None = None
    device: torch.device | None = None
    tables: dict[str, Any] | None = None


class _Thread(threading.local):
    creation: PrivateCreation | None = None


_thread = _Thread()


def is_creating() -> bool:
    """Whether this thread creates groups by their members, in a :func:`private_creation`."""
    creation = _thread.creation
    return creation is not None and creation.by_members


@contextmanager
def private_creation(creation: PrivateCreation, *, unseen: bool = False) -> Iterator[None]:
    """A block in which this thread creates groups apart from other threads, and from WORLD.

    With ``unseen``, it enters them into tables that no other thread sees, and after the block they
    are in no table. Torch derives names from the number of groups in its tables
    (``use_local_synchronization=True`` and ``split_group``, seen on 2.8 to 2.15). A group that is
    rebuilt while other threads create groups must not be counted: otherwise ranks would derive
    different names for one group. Existing groups stay visible.
    """
    world, before = cast(Any, _c10d._world), _thread.creation
    _replacements.enter()
    try:
        if unseen:
            seen = {name: ChainMap({}, getattr(world, name)) for name in tables.NAMED_TABLES}
            # Torch returns a group that has the same tag, and appends to the lists it finds there.
            creation.tables = {**seen, "tags_to_pg": {}}
        _thread.creation = creation
        yield
    finally:
        _thread.creation = before
        _replacements.leave()
        if creation.tables is not None:
            _unregister_unknown(creation.tables["pg_names"].maps[0])


def _unregister_unknown(entered: Mapping[Any, str]) -> None:
    """Remove from C++ the names that an unseen creation has registered there."""
    names = cast("dict[Any, str]", _c10d._world.pg_names)
    for group, name in entered.items():
        if group not in names and name not in list(names.values()):
            with suppress(RuntimeError):
                cast(Any, _cpp)._unregister_process_group(name)


@contextmanager
def name_freed(group: ProcessGroup) -> Iterator[None]:
    """A block in which another group can take a group's name; torch refuses that."""
    names = _c10d._world.pg_names
    name = names[group]
    names[group] = cast(Any, f"{name} (being rebuilt)")
    _cpp._unregister_process_group(name)
    try:
        yield
    finally:
        names[group] = name
        with suppress(RuntimeError):
            _cpp._unregister_process_group(name)
        _cpp._register_process_group(name, group)


class _Replacements:
    """What is replaced in torch while a thread is in a `private_creation`.

    These are four functions of ``distributed_c10d``, and the class of ``_world``. Each table is a
    property of that class; torch documents it as the place to override them. The other threads get
    torch's own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        hooks = (self._process_group_name, self._get_split_source, self._is_barrier_after_init)
        self._hooks = {hook.__name__: hook for hook in (*hooks, self._new_process_group_helper)}

    def enter(self) -> None:
        world = cast(Any, _c10d._world)
        with self._lock:
            if self._users == 0:
                self._originals = {name: getattr(_c10d, name) for name in self._hooks}
                self._put(self._hooks)
                found = {name: _table_of_thread(type(world), name) for name in tables.NAMED_TABLES}
                world.__class__ = type("_World", (type(world),), found)
            self._users += 1

    def leave(self) -> None:
        world = cast(Any, _c10d._world)
        with self._lock:
            self._users -= 1
            # The originals are kept: a caller may have looked a hook up just before.
            if self._users == 0:
                self._put(self._originals)
                world.__class__ = type(world).__base__

    @staticmethod
    def _put(functions: Mapping[str, Any]) -> None:
        for name, function in functions.items():
            setattr(_c10d, name, function)

    def _process_group_name(self, *args: Any, **kwargs: Any) -> Any:
        creation = _thread.creation
        if creation is not None and creation.name is not None:
            return creation.name
        return self._originals["_process_group_name"](*args, **kwargs)

    def _get_split_source(self, *args: Any, **kwargs: Any) -> Any:
        return None if is_creating() else self._originals["_get_split_source"](*args, **kwargs)

    def _is_barrier_after_init(self) -> Any:
        creation = _thread.creation
        if creation is not None and creation.name is not None:
            return 0
        return self._originals["_is_barrier_after_init"]()

    def _new_process_group_helper(
        self, size: Any, rank: Any, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        creation = _thread.creation
        if creation is not None and creation.name is not None:
            store = creation.store or store
            kwargs["device_id"] = creation.device
        helper = self._originals["_new_process_group_helper"]
        return helper(size, rank, ranks, backend, store, *args, **kwargs)


def _table_of_thread(world: type, name: str) -> property:
    """A property of ``_world`` for one table: this thread's, if it has one."""
    whole = getattr(world, name)

    def find(of: Any) -> Any:
        creation = _thread.creation
        own = None if creation is None else creation.tables
        return whole.fget(of) if own is None else own[name]

    return property(find)


_replacements = _Replacements()


def forget_parent(options: object) -> None:
    """Remove the parent of a split from these options. Local, idempotent.

    Torch stores the parent in the options that it was given (NCCL's have ``split_from``). It would
    split from it again for the next group with the same options, which keep the parent alive.
    """
    if getattr(options, "split_from", None) is not None:
        cast(Any, options).split_from = None


def create_world(
    creation: PrivateCreation, rank: int, size: int, backend: str, **given: Any
) -> ProcessGroup:
    """Create a default group on a store, as ``init_process_group`` does, within its block.

    ``given`` are ``backend_options``, ``timeout`` and ``group_desc``.

    ``init_process_group`` itself refuses a second default group, opens a new rendezvous, and wraps
    ``sys.excepthook`` again on each call.
    """
    place: Any = (_c10d.Backend(backend), creation.store, creation.name)
    group, _ = _c10d._new_process_group_helper(size, rank, [], *place, **given)
    return cast(ProcessGroup, group)


def complete_ranks(world: ProcessGroup, devices: Sequence[str]) -> None:
    """Set the ranks of a default group in its backends' options. Local, idempotent.

    Torch creates a default group with an empty list of ranks. The backends fill in the list, but
    only for the first group of the process. ``split`` of a later one indexes the empty list,
    which kills the process (seen with gloo on 2.13; ``ProcessGroupNCCL::split`` has the same line).
    """
    for backend in live_backends(world, devices).values():
        with suppress(AttributeError):  # written in Python, or without options
            options = cast(Any, backend).options
            if not options.global_ranks_in_group:
                options.global_ranks_in_group = list(range(world.size()))
