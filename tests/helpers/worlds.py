"""Worlds as trainers make them: bound to a device, or not; on CPU, with torch's own functions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
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
"""``unbound``, ``bound``, ``nccl``, ``nccl-bound`` or ``torchcomms``: what :func:`init` makes.

The tests run in all of them. Most trainers bind the default group to a device, and torch then takes
other ways. ``nccl`` is torch's own ProcessGroupNCCL over the stand-ins for CUDA and NCCL, or on
GPUs; tensors are then on the device by default. ``torchcomms`` is gloo by TorchComms, unbound.
"""
if WORLD not in ("unbound", "bound", "nccl", "nccl-bound", "torchcomms"):
    raise ValueError(f"TEST_WORLD={WORLD}: it is unbound, bound, nccl, nccl-bound or torchcomms")

BOUND = WORLD.endswith("bound") and WORLD != "unbound"
"""Whether :func:`init` binds the default group to a device."""

NCCL = WORLD.startswith("nccl")

SPLITS_EVERY_GROUP = NCCL and (BOUND or TorchVersion(torch.__version__) >= "2.15")
"""Whether torch makes each new group by a split of the default one, which takes all ranks."""

SPLIT_CLONES_STORE = NCCL and BOUND and TorchVersion(torch.__version__) < "2.15"
"""Whether torch connects to the store again for each group that it splits."""

BACKEND = "nccl" if NCCL else "gloo"
"""The backend of the default group, and what ``install(backends={BACKEND})`` makes reloadable."""

DEVICE_TYPE = "cuda" if NCCL else "cpu"

WITH_CPU = "cpu:gloo,cuda:nccl" if NCCL else "gloo"
"""The backends of a default group that also takes tensors of the CPU."""

BYPASSING = {"min_size": 1 << 20} if NCCL else {}
"""Options of ``install`` with which no group of the world is reloadable."""


def device() -> torch.device:
    """Where collectives of the world find their tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if NCCL else torch.device("cpu")


def device_of(group: Any) -> torch.device:
    """Where collectives of a group find their tensors."""
    served = {device.type for device in (group or dist.group.WORLD)._device_types}
    return device() if device().type in served else torch.device("cpu")


def generator(seed: int) -> torch.Generator:
    """A seeded generator for tensors on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def use_device(rank: int | None = None) -> None:
    """Give this rank a separate device, on which tensors are created from now on. Idempotent."""
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
    """Make the default group with torch's own function, and bind it to a device if asked to.

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
        # Torch before 2.15 lets gloo split, and asks those that are not in the new group to take
        # part as NCCL's must; gloo has no such function, and needs none.
        dist.ProcessGroupGloo.perform_nocolor_split = lambda self, device: None  # type: ignore[attr-defined]
    world: Any = dist.group.WORLD
    served = {device.type for device in world._device_types}
    world.bound_device_id = torch.device("cuda" if "cuda" in served else "privateuseone", 0)


unbound_only = pytest.mark.skipif(
    WORLD == "bound",
    reason="torch looks for the bound device in barriers, in collectives of objects and in every "
    "new group, and this one is not here",
)


def barrier() -> None:
    """Wait for all ranks, without the device that the default group may be bound to."""
    value = torch.zeros(1)
    dist.all_reduce(value)
    value.item()  # a device computes on its own


@contextmanager
def accelerator_claimed() -> Iterator[None]:
    """Within this block torch believes that the CPU is an accelerator.

    Before 2.15 ``split_group`` asks whether there is one, and splits its backend.
    """
    own = torch.accelerator.is_available, torch.accelerator.current_accelerator
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.accelerator.is_available, torch.accelerator.current_accelerator = own


def start(
    world: str, *, backend: str = "gloo", file: str = "", store: Any = None, **options: Any
) -> None:
    """Install and make a default group.

    Args:
        world: ``unbound``; ``bound`` to a device when it is installed; ``bound late``, afterwards.
        backend: of the default group.
        file: of a FileStore to meet on. Torch 2.13 splits gloo groups with a clone of the store,
            and one in fifty splits over a TCPStore's then reads garbage for an address.
        store: another store to meet on.
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
    # Not "cpu:gloo,cuda:gloo": where a plugin is registered, torch gives such a group no default
    # backend, and cannot split it. The one gloo serves both devices.
    dist.init_process_group(backend, timeout=TIMEOUT, **where)
    if world != "unbound":
        dist.group.WORLD.bound_device_id = DEVICE
    if world == "bound":
        reloadpg.install(**given)


def subgroup(ranks: list[int], **kwargs: Any) -> Any:
    """A group of some ranks, which every rank of the world asks for.

    In a bound world torch lets the other ranks take part in a split of the default group, which
    gloo cannot do (2.13: it has no ``perform_nocolor_split``); the members alone make it there.
    """
    bound = dist.group.WORLD.bound_device_id is not None
    return dist.new_group(ranks, use_local_synchronization=bound, **kwargs)


def split(ranks: list[list[int]], parent: Any = None, **kwargs: Any) -> Any:
    """Torch's own ``split_group``.

    Before 2.15 it cannot copy gloo's options, and is given them; and it splits the one gloo backend
    of two devices twice under one name in the store, which fails every other time: it is asked for
    one of them.
    """
    kwargs = {"timeout": TIMEOUT, **kwargs}
    if TorchVersion(torch.__version__) >= "2.15":
        return dist.split_group(parent, ranks, **kwargs)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]  # type: ignore[attr-defined]
    options._timeout = kwargs["timeout"]
    kwargs["pg_options"] = options
    with accelerator_claimed():
        return dist.split_group(parent, ranks, backend="cpu:gloo", **kwargs)


def stop_for(seconds: float, *, after: float, pids: Sequence[int] = ()) -> None:
    """Have this process stopped in a moment, as a loaded or suspended machine stops it. Local.

    Or several processes, all at once.
    """
    which = " ".join(map(str, pids or [os.getpid()]))
    command = f"sleep {after}; kill -STOP {which}; sleep {seconds}; kill -CONT {which}"
    subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL)


def summed(group: Any, rank: int) -> float:
    """The sum of ``rank + 1`` over a group."""
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def sums_right(*groups: Any) -> bool:
    """Whether a collective sums over the own members of each group, all of which run it.

    Each rank contributes a power of two. None is the default group.
    """
    found = []
    for group in groups:
        tensor = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(tensor, group=group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        found.append(tensor.item() == sum(2.0**rank for rank in ranks))
    return all(found)
