"""Connection of rebuilt communicators before their first use, and a check by value.

NCCL connects a communicator in its first collective. After a reload, the order of the first
collectives depends on the data, and expert-parallel jobs deadlocked (miles#823). Connecting all
communicators in an order that all ranks share cannot deadlock. Several threads may create
communicators (``eager_connect_single_device``); collectives run one group after the other.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch.distributed import ProcessGroup

from ..c10d import devices, nccl
from ..c10d.backends import (
    backend_for,
    connects_eagerly,
    connects_in_first_use,
    pointer_of,
    raise_for_aborted,
)
from ..errors import InvalidOptionError, RebuildError
from ..groups.managed import ManagedGroup
from ..threads import CancelToken

Connect = Literal["none", "eager", "canary"]


def validate(connect: str | None, caller: str = "reload") -> None:
    """Refuse an unknown value; None is the default of the installation."""
    if connect is not None and connect not in get_args(Connect):
        raise InvalidOptionError(
            f"{caller}(connect={connect!r}): unknown; nothing was changed. Use 'none', 'eager' "
            "(connect all communicators now) or 'canary' (and check a small all-reduce by value)."
        )


def connects_alone(group: ManagedGroup) -> bool:
    """Whether the backend of a live group has a connection without a collective."""
    return connects_eagerly(backend_for(group.proxy, _device(group)))


def needs_collective(group: ManagedGroup) -> bool:
    """Whether only a collective connects a live group entirely."""
    return not connects_alone(group) or connects_in_first_use(
        backend_for(group.proxy, _device(group))
    )


def connect_group(group: ManagedGroup) -> Any:
    """Create the communicator of a live group, without a kernel. Collective, idempotent.

    Returns the backend that has it.
    """
    device = _device(group)
    backend = backend_for(group.proxy, device)
    with devices.current(device.index):
        if not pointer_of(backend):
            backend.eager_connect_single_device(device)
    return backend


def check_group(group: ManagedGroup, how: Connect, wanted: CancelToken) -> None:
    """Run an all-reduce of two numbers over a live group; for ``canary``, check the sum."""
    sums = sum_ranks(group.proxy, _device(group), wanted, group.communicator)
    if sums is None:
        return
    total, expected = sums
    if how == "canary" and total != expected:
        raise RebuildError(
            f"canary on {group!r}: the sum over the ranks is {total}, expected {expected}. "
            "The rebuilt communicator does not connect the right ranks, or corrupts data."
        )


def sum_ranks(
    group: ProcessGroup, device: torch.device, wanted: CancelToken, aborted: object = None
) -> tuple[list[int], list[int]] | None:
    """Sum two numbers over the ranks; return the sums and those expected. Collective, blocking.

    The first collective of an NCCL communicator connects it. :func:`.destroy.abort_communicator`
    ends the connection, also while torch holds its lock.

    Args:
        group: the group.
        device: the device of this rank.
        wanted: cancelled before the communicator is aborted; the result is then None.
        aborted: what is then aborted, if it is not ``group``.
    """
    rank, size = group.rank(), group.size()
    with devices.current(device.index):
        tensor = torch.tensor([1, rank + 1], dtype=torch.int64, device=device)
        with wanted as is_wanted:
            if not is_wanted:
                return None
            call = nccl.Call(aborted or group, backend_for(group, device))
        with call:
            work = group.allreduce([tensor])
        work.wait()
        devices.synchronize(device.index)
        raise_for_aborted()
        return tensor.tolist(), [size, size * (size + 1) // 2]


def _device(group: ManagedGroup) -> torch.device:
    """The device of this rank, of a type whose backend was rebuilt."""
    selected = group.construction.selected
    index = devices.index_for(group.proxy)
    if index is not None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type in selected:
            return torch.device(accelerator.type, index)
    return torch.device("cpu" if "cpu" in selected else selected[0])
