"""Gloo's groups as a backend of their own, in which something goes wrong where a test says so.

The backend comes in through torch's ``register_backend``, as users' do, so a fault happens where
theirs happen: while torch creates a group, in its ``shutdown``, or in a collective. Everything else
is gloo's. A job uses it with ``reloadpg.install(backends={"faulty"})`` and, as the backend of its
groups, ``faulty``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist

NAME = "faulty"
DEVICES = ("cpu", "cuda")
"""What gloo serves."""

Moment = Literal["create", "created", "shutdown", "shut down", "allreduce"]
"""Before and after a group is created; before and after it is released; before a sum."""


@dataclass
class _Fault:
    moment: Moment
    action: Callable[[], object]
    left: int
    group: str


_faults: list[_Fault] = []
_lock = threading.Lock()


def inject(moment: Moment, action: Callable[[], object], *, nth: int = 1, group: str = "*") -> None:
    """Do something at a moment of a group of this process, once. Local.

    Args:
        moment: when.
        action: called in the thread that is there, which raises what it raises.
        nth: the first such moment that counts is 1.
        group: only of groups whose name in torch's tables matches this pattern.
    """
    with _lock:
        _faults.append(_Fault(moment, action, nth, group))


def clear() -> None:
    """Remove all faults that have not happened. Local, idempotent."""
    with _lock:
        _faults.clear()


def register() -> None:
    """Make ``faulty`` a backend of ``torch.distributed``. Local, idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[*DEVICES])


def _come_to(moment: Moment, group: str) -> None:
    due = []
    with _lock:
        for fault in [*_faults]:
            if fault.moment == moment and fnmatchcase(group, fault.group):
                fault.left -= 1
                if fault.left == 0:
                    _faults.remove(fault)
                    due.append(fault)
    for fault in due:
        fault.action()


def _create(given: Any, _: object) -> FaultyGroup:
    """Do what torch does for a gloo group."""
    _come_to("create", given.group_id)
    gloo: Any = dist.ProcessGroupGloo(
        given.store, given.group_rank, given.group_size, timeout=given.timeout
    )
    gloo.options.global_ranks_in_group = given.global_ranks_in_group
    gloo.options.group_name = given.group_id
    gloo._set_sequence_number_for_group()
    _come_to("created", given.group_id)
    return FaultyGroup(given.group_rank, given.group_size, gloo, given.store.underlying_store)


def _serve(group: dist.ProcessGroup, gloo: Any) -> None:
    for device in DEVICES:
        group._register_backend(torch.device(device), group.BackendType.GLOO, gloo)
    group._set_default_backend(group.BackendType.GLOO)


class FaultyGroup(dist.ProcessGroup):
    """A process group over a gloo backend."""

    def __init__(self, rank: int, size: int, gloo: Any, store: dist.Store) -> None:
        super().__init__(rank, size)
        _serve(self, gloo)
        self._store = store

    def shutdown(self) -> None:
        try:
            _come_to("shutdown", self.group_name)
            super().shutdown()
            _come_to("shut down", self.group_name)
        finally:
            del self  # as below

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        try:
            _come_to("allreduce", self.group_name)
            return super().allreduce(*args, **kwargs)
        finally:  # an error keeps this frame, and the frame would keep gloo's connections open
            del self, args, kwargs

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Split as torch does, which it can only with the store that a subclass cannot give it."""
        parent: Any = dist.ProcessGroup(self._store, self.rank(), self.size())
        _serve(parent, self._get_backend(torch.device("cpu")))
        parent.bound_device_id = self.bound_device_id
        part = parent.split_group(*args, **kwargs)
        if part is None:
            return None
        gloo = part._get_backend(torch.device("cpu"))
        group = FaultyGroup(part.rank(), part.size(), gloo, self._store)
        group._set_group_name(part.group_name)
        group._set_group_desc(part.group_desc)
        return group
