"""Gloo's groups as a separate backend, in which something goes wrong where a test says so.

The backend comes in through torch's ``register_backend``, as users' do, so a fault happens where
theirs happen: while torch creates a group, in its ``shutdown``, or in a collective. All else is
gloo's, but that its groups cannot be split. A job uses it with
``reloadpg.install(backends={"faulty"})`` and, as the backend of its groups, ``faulty``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist

from reloadpg.groups import dispatch

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


class FaultyGroup(dist.ProcessGroup):
    """A process group that does everything by a group as torch makes it.

    Torch holds the interpreter's lock while a subclass's own collectives run in C++, and gloo's
    threads want it: sooner or later both wait for each other.
    """

    def __init__(self, rank: int, size: int, gloo: Any, store: dist.Store) -> None:
        super().__init__(rank, size)
        self._group: Any = dist.ProcessGroup(store, rank, size)  # type: ignore[call-arg, arg-type]
        for group in (self, self._group):
            for device in DEVICES:
                group._register_backend(torch.device(device), self.BackendType.GLOO, gloo)
            group._set_default_backend(self.BackendType.GLOO)

    def shutdown(self) -> None:
        _come_to("shutdown", self.group_name)
        self._group.shutdown()
        _come_to("shut down", self.group_name)

    def abort(self) -> None:
        self._group.abort()


def _collective(name: Any) -> Callable[..., Any]:
    def call(group: FaultyGroup, *args: Any, **kwargs: Any) -> Any:
        _come_to(name, group.group_name)
        try:
            return getattr(group._group, name)(*args, **kwargs)
        finally:  # an error keeps this frame, which would keep gloo's connections open
            del group

    return call


for _name in dispatch.COLLECTIVES & {*dir(dist.ProcessGroup)}:
    setattr(FaultyGroup, _name, _collective(_name))
