"""Torch's functions that create groups, called with a given name, store and device."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup, Store, device_mesh
from torch.distributed import distributed_c10d as _c10d

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
class CreationByMembers:
    """A block in which this thread's groups are created by their members, not split from WORLD.

    If the default group is bound to a device, torch creates new groups by splitting its
    communicator, which is collective over all ranks of the job. With ``TORCH_DIST_INIT_BARRIER=1``
    all ranks also wait for each other. Within this block neither happens (2.8, 2.13 and 2.15).

    Attributes:
        name: the name of the groups; None for torch's names, from a counter that must be equal on
            all ranks.
        store: the store beneath the name's prefix; None for that of the default group.
        device: the device that groups are bound to, if ``name`` is given.
    """

    name: str | None = None
    store: Store | None = None
    device: torch.device | None = None

    def __enter__(self) -> CreationByMembers:
        _hooks.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        _hooks.leave()


class _Hooks:
    """Private functions of torch, replaced while a thread is in a `CreationByMembers` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._local = threading.local()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._hooks: dict[str, Callable[..., Any]] = {
            "_process_group_name": self._process_group_name,
            "_get_split_source": self._get_split_source,
            "_is_barrier_after_init": self._is_barrier_after_init,
            "_new_process_group_helper": self._helper,
        }

    def enter(self, creation: CreationByMembers) -> None:
        with self._lock:
            for name, hook in self._hooks.items() if self._users == 0 else ():
                self._originals[name] = getattr(_c10d, name)
                setattr(_c10d, name, hook)
            self._users += 1
        self._local.creation = creation

    def leave(self) -> None:
        self._local.creation = None
        with self._lock:
            self._users -= 1
            # The originals are kept: a caller may have looked a hook up just before.
            for name in self._hooks if self._users == 0 else ():
                setattr(_c10d, name, self._originals[name])

    @property
    def creation(self) -> CreationByMembers | None:
        return getattr(self._local, "creation", None)

    def _process_group_name(self, *args: Any, **kwargs: Any) -> Any:
        creation = self.creation
        if creation is not None and creation.name is not None:
            return creation.name
        return self._originals["_process_group_name"](*args, **kwargs)

    def _get_split_source(self, *args: Any, **kwargs: Any) -> Any:
        if self.creation is not None:
            return None
        return self._originals["_get_split_source"](*args, **kwargs)

    def _is_barrier_after_init(self) -> Any:
        creation = self.creation
        if creation is not None and creation.name is not None:
            return 0
        return self._originals["_is_barrier_after_init"]()

    def _helper(
        self, size: Any, rank: Any, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        creation = self.creation
        if creation is not None and creation.name is not None:
            store = creation.store or store
            kwargs["device_id"] = creation.device
        helper = self._originals["_new_process_group_helper"]
        return helper(size, rank, ranks, backend, store, *args, **kwargs)


_hooks = _Hooks()


def is_creating() -> bool:
    """Whether this thread is in a :class:`CreationByMembers` block."""
    return _hooks.creation is not None


def forget_parent(options: object) -> None:
    """Remove the parent of a split from these options. Local, idempotent.

    Torch stores the parent in the options that it was given (NCCL's have ``split_from``). It would
    split from it again for the next group with the same options, which keep the parent alive.
    """
    if getattr(options, "split_from", None) is not None:
        cast(Any, options).split_from = None


def create_world(
    creation: CreationByMembers, rank: int, size: int, backend: str, **given: Any
) -> ProcessGroup:
    """Create a default group on a store, as ``init_process_group`` does, in the tables too.

    ``given`` are ``backend_options``, ``timeout`` and ``group_desc``.

    ``init_process_group`` itself refuses a second default group, opens a new rendezvous, and wraps
    ``sys.excepthook`` again on each call.
    """
    place: Any = (_c10d.Backend(backend), creation.store, creation.name)
    with creation:
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
