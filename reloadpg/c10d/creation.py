"""Torch's creating functions, the names that they give, and the default group."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, cast

import torch
from torch._C._distributed_c10d import (
    Store,
)
from torch.distributed import ProcessGroup, device_mesh
from torch.distributed import distributed_c10d as _c10d

__all__ = [
    "batch_coalesced",
    "batching_refuses_subclasses",
    "check_batch",
    "create_among_members",
    "create_world",
    "creator_modules",
    "forced_name",
    "forget_parent",
    "observed_names",
    "original",
]


def creator_modules() -> tuple[ModuleType, ...]:
    """Torch's modules that bind the creating functions: where they live, and who imports them."""
    return (_c10d, torch.distributed, device_mesh)


def batching_refuses_subclasses() -> bool:
    """Whether ``batch_isend_irecv`` coalesces for plain ``ProcessGroup`` objects alone.

    Seen on 2.8 and 2.13: it asks ``type(group) is ProcessGroup``, so a batch on a subclass is
    issued operation by operation, which NCCL can deadlock on. 2.15 asks the backend only.
    """
    return "type" in inspect.unwrap(_c10d.batch_isend_irecv).__code__.co_names


def check_batch(operations: Any) -> None:
    """Raise what ``batch_isend_irecv`` raises for a list that is no batch."""
    _c10d._check_p2p_op_list(operations)


def batch_coalesced(operations: Sequence[Any]) -> list[Any]:
    """What ``batch_isend_irecv`` does for a group whose backend coalesces."""
    first = operations[0]
    with _c10d._coalescing_manager(first.group, first.tensor.device, async_ops=True) as manager:
        for one in operations:
            peer = "group_dst" if one.op in (_c10d.isend, _c10d.send) else "group_src"
            one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
    return cast("list[Any]", manager.works)


def original(name: str) -> Callable[..., Any]:
    """One of torch's creating functions, unpatched."""
    function = getattr(_c10d, name)
    return cast("Callable[..., Any]", getattr(function, "__wrapped__", function))


def create_among_members(
    ranks: Sequence[int],
    *,
    backend: str,
    options: object,
    timeout: timedelta | None,
    desc: str | None,
) -> ProcessGroup:
    """A group that its members create alone. Collective over them; blocking as the backend's."""
    forget_parent(options)
    made = original("new_group")(
        list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=desc,
    )
    return cast(ProcessGroup, made)


def forget_parent(options: object) -> None:
    """Let a group with these options connect afresh. Local.

    When torch splits a communicator it notes the parent in the options that it was given (NCCL's
    have ``split_from``), and would look for it again in the next group with the same options.
    """
    if getattr(options, "split_from", None) is not None:
        cast(Any, options).split_from = None


def create_world(
    *,
    rank: int,
    size: int,
    backend: str,
    store: Store,
    name: str,
    options: object,
    timeout: timedelta,
    device: torch.device | None,
    desc: str,
) -> ProcessGroup:
    """A default group as ``init_process_group`` makes it, given the store, and in the tables.

    ``init_process_group`` itself cannot be called again: it refuses a second default group, it
    opens a new rendezvous, and it wraps ``sys.excepthook`` once more each time. Collective over
    all ranks for backends that connect at creation; blocking.
    """
    group, _ = _c10d._new_process_group_helper(
        size,
        rank,
        [],
        _c10d.Backend(backend),
        store,
        cast(Any, name),
        backend_options=options,
        timeout=timeout,
        device_id=device,
        group_desc=desc,
    )
    created = cast(ProcessGroup, group)
    tables = _c10d._world
    ranks = tables.pg_group_ranks.get(cast(ProcessGroup, tables.default_pg))
    # The mapping is as long as the job is large: a rebuilt WORLD shares that of the one before.
    tables.pg_group_ranks[created] = ranks or {rank: rank for rank in range(size)}
    return created


class _Names:
    """Takes the place of ``_process_group_name`` while a creating function runs.

    Names normally come from a process-wide counter that all ranks must advance alike, so a
    replay by the members alone needs its own. The hook is per thread: a group that another
    thread creates meanwhile gets its name from torch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._original: Callable[..., Any] | None = None
        self._users = 0
        self._local = threading.local()

    @contextmanager
    def forced(self, name: str) -> Iterator[None]:
        with self._hooked():
            self._local.forced = name
            try:
                yield
            finally:
                self._local.forced = None

    @contextmanager
    def observed(self) -> Iterator[list[str]]:
        """The names that torch gave in this block, in order."""
        with self._hooked():
            seen: list[str] = []
            self._local.seen = seen
            try:
                yield seen
            finally:
                self._local.seen = None

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._original = _c10d._process_group_name
                _c10d._process_group_name = self._name
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _c10d._process_group_name = cast(Any, self._original)

    def _name(self, *args: Any, **kwargs: Any) -> Any:
        forced = getattr(self._local, "forced", None)
        if forced is not None:
            return forced
        original = self._original
        if original is None:  # a caller that looked the hook up just before it was taken off
            original = _c10d._process_group_name
        name = original(*args, **kwargs)
        seen = getattr(self._local, "seen", None)
        if seen is not None:
            seen.append(str(name))
        return name


_names = _Names()
forced_name = _names.forced
observed_names = _names.observed
