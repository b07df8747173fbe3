"""Start and resources of a job on torch's ProcessGroupNCCL over the stand-ins."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import reloadpg
from helpers.fault_job import eventually, meet
from reloadpg.lifecycle.job import jobs
from reloadpg.testing import standins

CAN_SUSPEND = hasattr(torch._C._distributed_c10d.Backend, "suspend")
HAS_NCCL2 = hasattr(getattr(dist.distributed_c10d, "ProcessGroupNCCL2", None), "_comm_ptr")
"""Whether torch has a second implementation of the backend, which gives its communicators.

In torch 2.15 it is the default. That of 2.14 neither gives them nor splits groups by itself.
"""
ENGINES = ("legacy", "nccl2") if HAS_NCCL2 else ("legacy",)
"""Torch's implementations of the backend: ``ProcessGroupNCCL`` and ``ProcessGroupNCCL2``."""

LIMIT = timedelta(seconds=120)
MIB = 1 << 20
COMMUNICATOR_MIB = 484
"""Of a connected communicator of two ranks."""


ABORT_LEAVES = standins.NCCL in os.environ
"""Whether an abort during a suspend or resume leaves an unknown amount of memory on the device.

NVIDIA's host code of NCCL 2.30.7 does: 0 or 4 MiB in a suspend, in a resume 16 of 40 MiB with two
channels and 70 of 484 with all.
"""


def engine_variables(engine: str) -> dict[str, str]:
    """The variables that choose one of ``ENGINES``."""
    return {"TORCH_DIST_USE_NCCL2": "0" if engine == "legacy" else "1"}


def on_ranks(size: int, **env: str) -> Any:
    """Run a test on ranks over the stand-ins."""
    return pytest.mark.ranks(size, standins=True, timeout=240, env=env)


def on_engines(size: int, **env: str) -> Any:
    """The same, once with each of torch's implementations of the backend."""
    params = [
        pytest.param(one, marks=on_ranks(size, **engine_variables(one), **env)) for one in ENGINES
    ]
    return pytest.mark.parametrize("engine", params)


def start(rank: int, *, bound: bool = False, backend: str = "nccl", **options: Any) -> None:
    """Install the library and create the default group."""
    torch.cuda.set_device(rank)
    reloadpg.install(**{"timeout": LIMIT, **options})
    device = {"device_id": torch.device("cuda", rank)} if bound else {}
    dist.init_process_group(backend, timeout=LIMIT, **device)


def summed(group: Any, rank: int) -> float:
    """The sum of ``rank + 1`` over the members of a group."""
    tensor = torch.tensor([rank + 1.0]).cuda()
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def used() -> int:
    """MiB in use on this rank's device."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) // MIB


def signals() -> dist.Store:
    """A separate store client, for events between ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    return dist.PrefixStore("test", store)


class Meetings:
    """Barriers of a test over its own store client."""

    def __init__(self, size: int) -> None:
        self._store = signals()
        self._size = size
        self.number = 0

    def meet(self) -> None:
        """Wait for all ranks."""
        self.number += 1
        meet(f"{self.number}", self._size, LIMIT.total_seconds(), self._store)


class Held(NamedTuple):
    """The resources of a process."""

    communicators: int
    mib: int
    threads: int
    descriptors: int


def held() -> Held:
    """Resources of this process once the library's threads have ended. Local, with a timeout."""
    for thread in threading.enumerate():
        if thread.name.startswith("reloadpg"):
            thread.join(1)
    gc.collect()
    torch.cuda.empty_cache()
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # the thread has ended
            continue
    # A creating thread connects its store client when it first takes a group, and keeps it.
    kept = 0 if jobs.known is None else len(jobs.known.creation_stores)
    return Held(
        standins.communicators(),
        used() - (torch.cuda.memory_reserved() + standins.left_bytes()) // MIB,
        sum(name != "standin-stream" for name in names),  # these end when they are idle
        len(os.listdir("/proc/self/fd")) - kept,
    )


def left_over(before: Held, stuck: int = 0, stores: int = 0) -> str:
    """Wait until resources are as before; return the difference as text, or ``""``.

    Args:
        before: the expected resources.
        stuck: maximum number of communicators in which a thread stays until the process ends.
        stores: maximum number of store clients of groups that were not rebuilt.
    """
    most = Held(
        before.communicators + stuck,
        before.mib + COMMUNICATOR_MIB * stuck,
        before.threads + 5 * stuck,
        before.descriptors + 5 * stuck + stores,
    )

    def same() -> bool:
        now = held()
        return before[:2] <= now[:2] and all(map(int.__le__, now, most))

    return "" if eventually(same) else f"{held()} instead of {before}"
