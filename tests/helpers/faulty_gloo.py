"""The backend ``faulty``: gloo with fault injection.

It is registered with torch's ``register_backend``. Faults happen while torch creates a group, in
``shutdown``, or in a collective. A job needs ``reloadpg.install(backends={"faulty"})``.
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
"""The devices that gloo serves."""

Moment = Literal["create", "created", "shutdown", "abort", "allreduce"]
"""Before and after a creation; before a release, an abort or a sum."""


@dataclass
class _Fault:
    moment: Moment
    action: Callable[[], object]
    left: int
    group: str


_faults: list[_Fault] = []
_lock = threading.Lock()


def inject(moment: Moment, action: Callable[[], object], *, nth: int = 1, group: str = "*") -> None:
    """Call a function once at a moment in a group of this process. Local.

    Args:
        moment: the kind of moment.
        action: called in the thread that reaches the moment; its exception propagates there.
        nth: which occurrence of the moment; the first is 1.
        group: a pattern for the names of groups in torch's tables.
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
    """Create a gloo group as torch does."""
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
    """A process group that forwards every call to a group of torch's own class.

    Without forwarding there is a deadlock: torch holds the GIL while a collective of a Python
    subclass runs in C++, and gloo's threads need it.
    """

    def __init__(self, rank: int, size: int, gloo: Any, store: dist.Store) -> None:
        super().__init__(rank, size)
        self._group: Any = dist.ProcessGroup(store, rank, size)  # type: ignore[call-arg, arg-type]
        for group in (self, self._group):
            for device in DEVICES:
                group._register_backend(torch.device(device), self.BackendType.GLOO, gloo)
            group._set_default_backend(self.BackendType.GLOO)

    def split_group(self, *args: Any, **kwargs: Any) -> FaultyGroup | None:
        """Split as gloo does; return a group of this backend."""
        _come_to("create", kwargs["group_name"])
        kwargs["device_types"] = [torch.device("cpu")]  # see worlds.split()
        part = self._group.split_group(*args, **kwargs)
        if part is None:
            return None
        _come_to("created", kwargs["group_name"])
        gloo = part._get_backend(torch.device("cpu"))
        made = FaultyGroup(part.rank(), part.size(), gloo, part.get_group_store())
        made._set_group_name(part.group_name)
        made._set_group_desc(part.group_desc)
        return made

    def shutdown(self) -> None:
        _come_to("shutdown", self.group_name)
        self._group.shutdown()

    def abort(self) -> None:
        _come_to("abort", self.group_name)
        self._group.abort()


def _collective(name: Any) -> Callable[..., Any]:
    def call(group: FaultyGroup, *args: Any, **kwargs: Any) -> Any:
        _come_to(name, group.group_name)
        try:
            return getattr(group._group, name)(*args, **kwargs)
        finally:  # an error references this frame, which would keep gloo's connections open
            del group

    return call


for _name in dispatch.COLLECTIVES & {*dir(dist.ProcessGroup)}:
    setattr(FaultyGroup, _name, _collective(_name))
