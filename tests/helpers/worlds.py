"""Worlds as trainers make them: bound to a device, or not; on CPU, with torch's own functions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
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


BOUND = os.environ.get("TEST_WORLD", "unbound") == "bound"
"""Whether :func:`init` binds the default group to a device, as ``TEST_WORLD`` says.

The tests run in both worlds: most trainers bind theirs, and torch then takes other ways.
"""


def init(backend: str, *, bound: bool = BOUND, **kwargs: Any) -> None:
    """Make the default group with torch's own function, and bind it to a device if asked to."""
    dist.init_process_group(backend, **kwargs)
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
    BOUND,
    reason="torch looks for the bound device in barriers, in collectives of objects and in every "
    "new group, and this one is not here",
)


def barrier() -> None:
    """Wait for all ranks, without the device that the default group may be bound to."""
    dist.all_reduce(torch.zeros(1))


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
