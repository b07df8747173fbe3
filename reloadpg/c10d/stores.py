"""The store of a group: clients of it, and the keys that a group leaves there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
)
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as _c10d

from .tables import name_of, store_of, world

__all__ = [
    "clone_store",
    "rendezvous_keys",
    "replace_store",
    "root_store",
    "store_path",
    "top_path",
]


def root_store(group: ProcessGroup) -> Store:
    """The store beneath the group's own name prefix: shared by all ranks, not by generations."""
    store = store_of(group)
    return store.underlying_store if isinstance(store, PrefixStore) else store


def clone_store(store: Store) -> Store:
    """A handle on the same store with its own connection.

    A blocking wait holds the lock of its TCPStore client until it ends, so two threads that must
    not wait for each other need a client each.
    """
    return cast(Store, cast(Any, store).clone())


def store_path(name: str, *, is_world: bool) -> str:
    """Where a group of that name, created now, keeps its keys in the job's store.

    Torch puts the default group's under its name, and all others under the default group's.
    """
    return f"{name}//" if is_world else f"{top_path()}{name}//"


def top_path() -> str:
    """Where the groups that are created now keep their keys: under the default group's. Local."""
    top = world()
    if top is None:
        return ""
    paths: list[str] = getattr(top, "store_paths", None) or [f"{name_of(top)}//"]
    return paths[-1]


def rendezvous_keys(path: str, devices: Sequence[str], rank: int, *, split: bool) -> list[str]:
    """The keys that one member of a group writes to connect it, in the job's store.

    A group leaves them in the store for ever; with names that change from generation to
    generation the store would grow. Seen: gloo writes ``0/<rank>`` in the device's prefix on
    torch 2.8 to 2.15, and a split of it without that prefix (2.15); NCCL's unique id is written
    by group rank 0 as ``0``.
    """
    places = [f"{path}{device}//" for device in devices] + [path] * split
    return [
        f"{place}{key}"
        for place in places
        for key in ([f"0/{rank}", "0"] if rank == 0 else [f"0/{rank}"])
    ]


def replace_store(group: ProcessGroup, store: Store) -> None:
    """Let a group, and the groups created after it, use another client of the same store."""
    tables = _c10d._world
    tables.pg_map[group] = (tables.pg_map[group][0], store)
