"""The backend ``faulty``: gloo whose groups have the faults of ``reloadpg.testing.faults``.

It is registered with torch's ``register_backend``. Its groups have the points ``create``,
``release`` and ``collective``. A job needs ``reloadpg.install(backends={"faulty"})``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from reloadpg.groups import dispatch
from reloadpg.testing import faults

NAME = "faulty"
DEVICES = ("cpu", "cuda")
"""The devices that gloo serves."""


def inject(at: Any, action: Callable[[], object], **where: Any) -> None:
    """Call a function at a point of a group of this process; ``where`` are arguments of a Fault."""
    faults.inject(faults.Fault(at, "call", call=lambda _: action(), **where))


def register() -> None:
    """Make ``faulty`` a backend of ``torch.distributed``. Local, idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[*DEVICES])


def _check(at: Any, operation: str, name: str, moment: Any = "before") -> None:
    faults.check(at, operation, int(os.environ["RANK"]), name, moment, (name,))


def _create(given: Any, _: object) -> FaultyGroup:
    """Create a gloo group as torch does."""
    _check("create", "create", given.group_id)
    gloo: Any = dist.ProcessGroupGloo(
        given.store, given.group_rank, given.group_size, timeout=given.timeout
    )
    gloo.options.global_ranks_in_group = given.global_ranks_in_group
    gloo.options.group_name = given.group_id
    gloo._set_sequence_number_for_group()
    _check("create", "create", given.group_id, "after")
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
        _check("create", "split", kwargs["group_name"])
        kwargs["device_types"] = [torch.device("cpu")]  # see worlds.split()
        part = self._group.split_group(*args, **kwargs)
        if part is None:
            return None
        _check("create", "split", kwargs["group_name"], "after")
        gloo = part._get_backend(torch.device("cpu"))
        made = FaultyGroup(part.rank(), part.size(), gloo, part.get_group_store())
        made._set_group_name(part.group_name)
        made._set_group_desc(part.group_desc)
        return made

    def shutdown(self) -> None:
        _check("release", "shutdown", self.group_name)
        self._group.shutdown()

    def abort(self) -> None:
        _check("release", "abort", self.group_name)
        self._group.abort()


def _collective(name: Any) -> Callable[..., Any]:
    def call(group: FaultyGroup, *args: Any, **kwargs: Any) -> Any:
        _check("collective", name, group.group_name)
        try:
            return getattr(group._group, name)(*args, **kwargs)
        finally:  # an error references this frame, which would keep gloo's connections open
            del group

    return call


for _name in dispatch.COLLECTIVES & {*dir(dist.ProcessGroup)}:
    setattr(FaultyGroup, _name, _collective(_name))
