"""The record of the call that created a group, and its replay.

Only the members take part in a replay. If torch first created the group by splitting another one
(``split_group``, or ``new_group`` under a default group that is bound to a device), all ranks of
the parent took part. The replay instead creates a separate communicator for the members, with the
same backend, timeout and options. So no group depends on another one.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup, Store

from ..c10d import creation, tables


class _Thread(threading.local):
    verbatim = False


thread = _Thread()


class verbatim:  # noqa: N801 - a context manager
    """A block in which the patched functions return this thread's groups as torch makes them."""

    def __enter__(self) -> None:
        self._before = thread.verbatim
        thread.verbatim = True

    def __exit__(self, *_: object) -> None:
        thread.verbatim = self._before


Order = tuple[Any, ...]
"""Sort key of a group, equal on all of its members."""

Defaults = tuple[object, "timedelta | None"]
"""``pg_options`` and timeout of a group whose call has none."""

WORLD_ORDER: Order = (0,)
HANDED_OVER: Order = (2,)
"""First element of the sort keys of groups passed to ``register_group()``, which come last."""


def group_order(name: str) -> Order:
    """Return the sort key of a group by its name: torch's counter, else a hash.

    The names of splits and of groups created with local synchronization are hashes that only the
    members know, and their order of creation may differ between ranks. One total order prevents a
    deadlock between ranks that share several groups.
    """
    return (1, 0, int(name)) if name.isdecimal() else (1, 1, name)


def _copied(value: Any) -> Any:
    """Copy a value that can hold ranks; return any other value unchanged. Drains iterators."""
    if isinstance(value, list):
        if value and type(value[0]) is int:
            return value.copy()  # ranks: 20 times as fast as element by element
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    if isinstance(value, Iterator):
        return [_copied(item) for item in value]
    if isinstance(value, (str, bytes, range, frozenset)) or not isinstance(value, Iterable):
        return value
    try:
        return copy.deepcopy(value)  # set, deque, UserList, array, numpy array, tensor
    except TypeError:  # a view of a dictionary
        return [_copied(item) for item in value]


@lru_cache(maxsize=64)
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that can be passed by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class Call(NamedTuple):
    """One call: torch's original function, and the caller's arguments with rank lists copied."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def capture(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Call:
        keywords = _NO_KEYWORDS
        if kwargs:
            keywords = MappingProxyType({name: _copied(value) for name, value in kwargs.items()})
        return cls(function, tuple(map(_copied, args)), keywords)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that were passed, by parameter name. Omitted parameters are absent."""
        names = parameters_of(self.function) if self.args else ()
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def replacing(self, name: str, value: object) -> Call:
        """Return a copy of the call with another value for one parameter."""
        by_position = parameters_of(self.function)[: len(self.args)]
        if name in by_position:
            position = by_position.index(name)
            args = (*self.args[:position], value, *self.args[position + 1 :])
            return Call(self.function, args, self.kwargs)
        return Call(self.function, self.args, {**self.kwargs, name: value})

    def forget_parent(self) -> None:
        """Let no options of the call keep the parent of a split alive. Local, idempotent."""
        for value in (*self.args[1:], *self.kwargs.values()):  # the ranks, or the parent, are first
            creation.forget_parent(value)

    def __call__(self) -> Any:
        """Call the function with copies, so that it cannot change the record."""
        return self.function(
            *(_copied(value) for value in self.args),
            **{name: _copied(value) for name, value in self.kwargs.items()},
        )


@dataclass(eq=False)
class Construction:
    """The record of one group's creation: everything that a replay needs. It is never changed.

    A job creates thousands of groups. So torch's own values are kept without a copy, and the rest
    is computed when an operation first reads it. A frozen dataclass takes 7 us instead of 1.

    Attributes:
        call: the call that created it; of a group passed to ``register_group()``, the one that
            rebuilds it.
        entry: its entries in c10d's tables, with the name that torch gave it the first time.
        selected: the device types whose backend is released and rebuilt.
        rank: the group rank of this process.
        defaults: ``pg_options`` and timeout if the call has none.
        place: the sort key, if it does not follow from the name.
    """

    call: Call
    entry: tables.Entry
    selected: tuple[str, ...]
    rank: int
    defaults: Defaults = (None, None)
    place: Order | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def desc(self) -> str:
        return self.entry.desc

    @property
    def backend(self) -> str:
        """The requested backend (``nccl``, ``cpu:gloo,cuda:nccl``)."""
        return self.entry.backend

    @property
    def devices(self) -> Mapping[str, str]:
        """The backend of each device type."""
        return self.entry.devices

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in the order of their group ranks.

        Torch keeps the caller's values, which may be integers of NumPy or tensors.
        """
        return tuple(map(int, self.entry.ranks))

    @cached_property
    def order(self) -> Order:
        return group_order(self.name) if self.place is None else self.place

    @cached_property
    def options(self) -> object:
        """``pg_options``, from the caller or read from the group."""
        given = self.call.given
        options = given.get("pg_options", given.get("backend_options"))
        return self.defaults[0] if options is None else options

    @cached_property
    def timeout(self) -> timedelta | None:
        """The timeout, from the caller or read from the group; None for torch's default."""
        timeout: timedelta | None = self.call.given.get("timeout")
        return self.defaults[1] if timeout is None else timeout

    @property
    def size(self) -> int:
        return len(self.entry.ranks)

    @property
    def is_world(self) -> bool:
        return self.order == WORLD_ORDER

    @property
    def is_handed_over(self) -> bool:
        """Whether it was passed to ``register_group()``; its ranks are not ranks of the job."""
        return self.order[:1] == HANDED_OVER

    @property
    def kept(self) -> tuple[str, ...]:
        """The device types whose backend stays alive while the group is offloaded."""
        return tuple(device for device in self.devices if device not in self.selected)

    @property
    def released(self) -> dict[str, str]:
        """The backends that are released and rebuilt, by device type."""
        return {device: self.devices[device] for device in self.selected}

    @property
    def is_mixed(self) -> bool:
        return bool(self.kept)

    @property
    def backends(self) -> str:
        """The backend of each device type; equal on all members."""
        return ",".join(f"{device}:{name}" for device, name in sorted(self.devices.items()))

    @property
    def summary(self) -> str:
        return self.backends if self.desc in ("", "undefined") else f"{self.backends} {self.desc!r}"

    def name_of_generation(self, suffix: str) -> str:
        """Return the name of a new generation. The first rank tells the parts of a split apart."""
        return f"{self.name}@{suffix}.{self.ranks[0]}"

    def replay(
        self, name: str, store: Store, group: ProcessGroup, *, whole: bool = False
    ) -> ProcessGroup:
        """Recreate the group, in no table of torch. Collective over the members; blocks as torch.

        Args:
            name: the name of the new generation: never used before, equal on all members.
            store: a client of the job's store that only this thread uses; with the prefix of the
                default group, except for the default group itself.
            group: the reloadable group.
            whole: whether to also create the backends that stay alive in an offload.
        """
        # A user's function may give its group the old name, and creates it as it likes.
        private = creation.PrivateCreation(by_members=False)
        freed: AbstractContextManager[None] = nullcontext()
        if self.is_handed_over:
            freed = creation.name_freed(group)
        else:
            private = creation.PrivateCreation(True, name, store, self._device_of(group))
        with verbatim(), creation.private_creation(private, unseen=True), freed:
            made = self._replay(private, whole)
        if tables.is_non_member(made) and not self.is_handed_over:
            raise RuntimeError("torch returned the value for non-members to a member of the group")
        return cast(ProcessGroup, made)

    def _device_of(self, group: ProcessGroup) -> torch.device | None:
        """The device that the next generation is bound to, or None.

        Torch binds a split to the default group's device; a group that has no backend for it is
        bound to none.
        """
        device: torch.device | None = group.bound_device_id
        return device if device is not None and device.type in self.devices else None

    def _replay(self, private: creation.PrivateCreation, whole: bool) -> Any:
        call = self.call
        if self.is_handed_over:
            return call()
        # The other backends of a mixed group were not released.
        backend, part = self.backend, self.is_mixed and not whole
        if part:
            backend = ",".join(f"{device}:{name}" for device, name in self.released.items())
        creation.forget_parent(self.options)
        if self.is_world:
            return creation.create_world(
                private,
                self.rank,
                len(self.ranks),
                backend,
                backend_options=self.options,
                timeout=self.timeout or tables.default_timeout(backend),
                group_desc=self.desc,
            )
        if call.function.__name__ == "split_group":  # without its parent
            call = by_members(self.ranks, self.timeout, backend, self.desc, self.options)
        elif part:
            call = call.replacing("backend", backend)
        return call()


def by_members(
    ranks: Sequence[int], timeout: object, backend: object, desc: str, options: object = None
) -> Call:
    """The ``new_group`` call in which only the members take part, ranks in this order."""
    kwargs = {
        "ranks": list(ranks),
        "timeout": timeout,
        "backend": backend,
        "pg_options": options,
        "use_local_synchronization": True,
        "group_desc": desc,
        **({} if creation.sorts_ranks() else {"sort_ranks": False}),
    }
    return Call(creation.original("new_group"), (), kwargs)
