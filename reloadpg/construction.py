"""The frozen record of one call that created a group, and its replay.

A construction is a value: what the caller passed is captured once, before torch sees it, and is
given to the original function again, verbatim, at every reload. Rank lists are copied (a caller
may go on using its own), positional arguments stay positional, and ``timeout`` and ``pg_options``
are the caller's own objects.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from . import c10d

_replaying = threading.local()


@contextmanager
def verbatim() -> Iterator[None]:
    """Within this block of this thread, groups come back as torch makes them."""
    before = getattr(_replaying, "active", False)
    _replaying.active = True
    try:
        yield
    finally:
        _replaying.active = before


def is_verbatim() -> bool:
    return bool(getattr(_replaying, "active", False))


def _copied(value: Any) -> Any:
    """A copy of rank lists, nested ones too; iterators are drained; all else is kept as it is."""
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return value.copy()  # thousands of ranks in a large job: 20 times as fast as one by one
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, Iterator):
        return list(value)
    return value


@dataclass(frozen=True)
class Call:
    """One call: the original function and what the caller passed.

    Attributes:
        function: torch's own function, never a wrapper of ours.
        args: positional arguments, rank lists copied.
        kwargs: keyword arguments, rank lists copied; read-only.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def capture(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call:
        return cls(
            function,
            tuple(_copied(value) for value in args),
            MappingProxyType({name: _copied(value) for name, value in kwargs.items()}),
        )

    @cached_property
    def given(self) -> dict[str, Any]:
        """What was passed, by parameter name; without the parameters left out."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    def __call__(self) -> Any:
        """Call the function with fresh copies, so that it cannot change the record."""
        return self.function(
            *(_copied(value) for value in self.args),
            **{name: _copied(value) for name, value in self.kwargs.items()},
        )


Order = tuple[Any, ...]
"""Sort key of a group, alike on all ranks that take part in its creation."""

WORLD_ORDER: Order = (0,)


def subgroup_order(name: str) -> Order:
    """Key of a group made by ``new_group``: by torch's counter, else by its hashed name.

    Torch's counter is equal on all ranks; names from local synchronization are hashes, known to
    the members alone and created in an order that may differ from rank to rank. One total order
    over both keeps ranks that share several groups from waiting for each other in a circle.
    """
    return (1, 0, int(name)) if name.isdecimal() else (1, 1, name)


def split_order(parent: Order, index: int) -> Order:
    """Key of the ``index``-th split of a parent: after the parent, alike on all its ranks."""
    return (parent[0] + 1, 2, *parent, index)


@dataclass(frozen=True)
class Construction:
    """How one group was made, and all that a replay needs.

    Attributes:
        call: the captured call.
        name: the group's stable name, as torch gave it the first time.
        ranks: global ranks of the members, in the order of their group ranks; empty on a rank
            that is no member.
        backend: the backend as asked for (``nccl``, ``cpu:gloo,cuda:nccl``).
        devices: backend by device type.
        selected: the device types whose backend is released and rebuilt.
        order: sort key of the group.
    """

    call: Call
    name: str
    ranks: tuple[int, ...]
    backend: str
    devices: Mapping[str, str]
    selected: tuple[str, ...]
    order: Order

    @property
    def args(self) -> tuple[Any, ...]:
        return self.call.args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return self.call.kwargs

    @property
    def kept(self) -> tuple[str, ...]:
        """The device types whose backend stays alive while the group is offloaded."""
        return tuple(device for device in self.devices if device not in self.selected)

    @property
    def is_mixed(self) -> bool:
        """Whether part of the group's backends stays alive while it is offloaded."""
        return bool(self.kept)

    @property
    def is_split(self) -> bool:
        """Whether the group was made by ``split_group``."""
        return self.call.function.__name__ == "split_group"

    @property
    def is_orphan(self) -> bool:
        """Whether the group was split from one that its user has destroyed since. Local."""
        if not self.is_split:
            return False
        parent = self.call.given.get("parent_pg")
        return parent is not None and not c10d.is_known(parent)

    @cached_property
    def digest(self) -> int:
        """40 bits over name, members, backends and order: what all members must agree on."""
        text = repr((self.name, self.ranks, sorted(self.devices.items()), self.order))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")

    def replay(self, name: str) -> ProcessGroup | None:
        """Create the group again under another name; None on a rank that is no member.

        Collective over the ranks that torch wants in the call (the members; for a split, the
        parent's ranks, unless the parent was destroyed: then the members make it alone).
        Blocking as the backend's own creation is. The result stands in c10d's tables, as the
        original function leaves it there.
        """
        with verbatim(), c10d.forced_name(name):
            made = self._create()
        return None if c10d.is_non_member(made) else made

    def _create(self) -> Any:
        # Of a mixed group only the selected backends are made again: the others never went away.
        backend = self.backend
        if self.is_mixed:
            backend = ",".join(f"{device}:{self.devices[device]}" for device in self.selected)
        if self.is_orphan:
            return self._by_members(backend)
        return (self._with_backend(backend) if self.is_mixed else self.call)()

    def _by_members(self, backend: str) -> ProcessGroup | None:
        if not self.ranks:
            return None
        given = self.call.given
        return c10d.create_among_members(
            self.ranks,
            backend=backend,
            options=given.get("pg_options"),
            timeout=given.get("timeout"),
            desc=given.get("group_desc"),
        )

    def _with_backend(self, backend: str) -> Call:
        position = 2  # new_group(ranks, timeout, backend, ...)
        if self.call.function.__name__ != "new_group":  # split_group(..., backend) is the sixth
            position = 5
        if len(self.call.args) > position:
            args = (*self.call.args[:position], backend, *self.call.args[position + 1 :])
            return Call(self.call.function, args, self.call.kwargs)
        return Call(self.call.function, self.call.args, {**self.call.kwargs, "backend": backend})


@dataclass(frozen=True)
class WorldConstruction(Construction):
    """How the default group was made.

    Attributes:
        store: the store beneath the group's name prefix.
        rank: this process's rank.
        options: ``pg_options`` as the caller gave them.
        timeout: the timeout that the creating function resolved.
        device: the device that the group is bound to, or None.
        desc: torch's description of the default group.
    """

    store: Store = field(kw_only=True)
    rank: int = field(kw_only=True)
    options: object = field(kw_only=True)
    timeout: timedelta = field(kw_only=True)
    device: torch.device | None = field(kw_only=True)
    desc: str = field(kw_only=True)

    def _create(self) -> Any:
        raise NotImplementedError("the default group is replayed with its name: use replay()")

    def with_store(self, store: Store) -> WorldConstruction:
        """The same on another client of its store. Local."""
        return replace(self, store=store)

    def replay(self, name: str) -> ProcessGroup | None:
        backend = self.backend
        if self.is_mixed:
            backend = ",".join(f"{device}:{self.devices[device]}" for device in self.selected)
        with verbatim():
            return c10d.create_world(
                rank=self.rank,
                size=len(self.ranks),
                backend=backend,
                store=self.store,
                name=name,
                options=self.options,
                timeout=self.timeout,
                device=self.device,
                desc=self.desc,
            )
