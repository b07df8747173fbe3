"""Creates default groups as trainers do, bound to a device or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import reloadpg

TIMEOUT = timedelta(seconds=20)

DEVICE = torch.device("cuda", 0)

CAN_SPLIT = hasattr(dist.ProcessGroup, "split_group")
"""Whether the installed torch can split gloo groups: from 2.13 on."""


WORLD = os.environ.get("TEST_WORLD", "unbound")
"""``unbound``, ``bound``, ``nccl`` or ``nccl-bound``: the default group of :func:`init`.

The tests run in all of them. Most trainers bind the default group to a device, and torch then uses
other code paths. ``nccl`` is torch's ProcessGroupNCCL, over the stand-ins for CUDA and NCCL or on
GPUs; tensors are then on the device by default.
"""
if WORLD not in ("unbound", "bound", "nccl", "nccl-bound"):
    raise ValueError(f"TEST_WORLD={WORLD}: it is unbound, bound, nccl or nccl-bound")

BOUND = WORLD.endswith("bound") and WORLD != "unbound"
"""Whether :func:`init` binds the default group to a device."""

NCCL = WORLD.startswith("nccl")

SPLITS_EVERY_GROUP = NCCL and (BOUND or TorchVersion(torch.__version__) >= "2.15")
"""Whether torch splits each new group from the default group, which needs all ranks."""

BACKEND = "nccl" if NCCL else "gloo"
"""The backend of the default group, for ``install(backends={BACKEND})``."""

DEVICE_TYPE = "cuda" if NCCL else "cpu"

SILENCE = {"RELOADPG_GRACE_S": "3"}
"""The environment of jobs in which a rank does not respond to a failure: the others wait this long
for it. By default it is a minute here, and the wait ends as soon as all ranks have responded."""

BYPASSING = {"min_size": 1 << 20} if NCCL else {}
"""Options of ``install`` with which all groups bypass."""


def device() -> torch.device:
    """The device of tensors for collectives."""
    return torch.device("cuda", torch.cuda.current_device()) if NCCL else torch.device("cpu")


def device_of(group: Any) -> torch.device:
    """The device of tensors for the collectives of a group."""
    served = {device.type for device in (group or dist.group.WORLD)._device_types}
    return device() if device().type in served else torch.device("cpu")


def generator(seed: int) -> torch.Generator:
    """A seeded generator for tensors on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def use_device(rank: int | None = None) -> None:
    """Give this rank a separate device, and create tensors there by default. Idempotent."""
    if not NCCL:
        return
    rank = int(os.environ["RANK"]) if rank is None else rank
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device("cuda")


def init(
    backend: str = BACKEND,
    *,
    bound: bool = BOUND,
    create: Callable[..., None] | None = None,
    **kwargs: Any,
) -> None:
    """Create the default group with torch's function, and bind it to a device if requested.

    `create` is that function as a test has bound it.
    """
    create = create or dist.init_process_group
    if "nccl" in backend:
        use_device(kwargs.get("rank"))
        create(backend, **kwargs, **{"device_id": device()} if bound else {})
        return
    create(backend, **kwargs)
    if bound:
        bind()


def bind() -> None:
    """Bind the default group to a device, as ``init_process_group(device_id=...)`` does."""
    if not hasattr(dist.ProcessGroupGloo, "perform_nocolor_split"):
        # Before 2.15, torch calls this on ranks outside the new group, as NCCL needs it. Gloo does
        # not have it.
        dist.ProcessGroupGloo.perform_nocolor_split = lambda self, device: None  # type: ignore[attr-defined]
    world: Any = dist.group.WORLD
    served = {device.type for device in world._device_types}
    world.bound_device_id = torch.device("cuda" if "cuda" in served else "privateuseone", 0)


unbound_only = pytest.mark.skipif(
    WORLD == "bound",
    reason="torch uses the bound device in barriers, in collectives of objects and in every new "
    "group, and this machine does not have it",
)


def barrier() -> None:
    """Wait for all ranks, without the device that the default group is bound to."""
    value = torch.zeros(1)
    dist.all_reduce(value)
    value.item()  # waits for the device


@contextmanager
def accelerator_claimed() -> Iterator[None]:
    """Make torch treat the CPU as an accelerator within this block.

    Before 2.15, ``split_group`` splits the backend of the accelerator if there is one.
    """
    claims = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cpu"),
        "current_device_index": lambda: 0,
    }
    own = {name: getattr(torch.accelerator, name) for name in claims}
    vars(torch.accelerator).update(claims)
    try:
        yield
    finally:
        vars(torch.accelerator).update(own)


def start(
    world: str, *, backend: str = "gloo", file: str = "", store: Any = None, **options: Any
) -> None:
    """Install, and create a default group.

    Args:
        world: ``unbound``; ``bound``: bound to a device before ``install``; ``bound late``: after.
        backend: of the default group.
        file: of a FileStore for the rendezvous. Torch 2.13 splits gloo groups with a clone of the
            store; with a TCPStore, one split in fifty then reads a wrong address.
        store: another store for the rendezvous.
        options: of ``install``.
    """
    given = {"backends": {backend}, "timeout": TIMEOUT, **options}
    if world != "bound":
        reloadpg.install(**given)
    where: dict[str, Any] = {}
    if file or store is not None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(file, size) if file else store
        where = {"store": store, "rank": rank, "world_size": size}
    # Not "cpu:gloo,cuda:gloo": if a plugin is registered, torch sets no default backend for such a
    # group, and cannot split it. One gloo backend serves both devices.
    dist.init_process_group(backend, timeout=TIMEOUT, **where)
    if world != "unbound":
        dist.group.WORLD.bound_device_id = DEVICE
    if world == "bound":
        reloadpg.install(**given)


def subgroup(ranks: list[int], **kwargs: Any) -> Any:
    """Create a group of some ranks; call it on every rank.

    With a bound default group, torch splits it on all ranks, for which gloo has no function
    (``perform_nocolor_split``, 2.13). There, only the members create the group.
    """
    bound = dist.group.WORLD.bound_device_id is not None
    return dist.new_group(ranks, use_local_synchronization=bound, **kwargs)


def split(ranks: list[list[int]], parent: Any = None, **kwargs: Any) -> Any:
    """Call torch's ``split_group``.

    Before 2.15 it cannot copy gloo's options, so they are passed. It also splits a gloo backend of
    two devices twice under one key of the store, which often fails, so one device is selected.
    """
    kwargs = {"timeout": TIMEOUT, **kwargs}
    if TorchVersion(torch.__version__) >= "2.15":
        return dist.split_group(parent, ranks, **kwargs)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]  # type: ignore[attr-defined]
    options._timeout = kwargs["timeout"]
    kwargs["pg_options"] = options
    with accelerator_claimed():
        if dist.get_backend(parent) == "gloo":
            kwargs["backend"] = "cpu:gloo"
        return dist.split_group(parent, ranks, **kwargs)


def summed(group: Any, rank: int) -> float:
    """The sum of ``rank + 1`` over a group."""
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def sums_right(*groups: Any) -> bool:
    """Whether an all-reduce sums over the members of each group (None: the default). Collective."""
    found = []
    for group in groups:
        tensor = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(tensor, group=group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        found.append(tensor.item() == sum(2.0**rank for rank in ranks))
    return all(found)
