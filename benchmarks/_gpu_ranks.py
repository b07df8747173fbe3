"""Functions that each rank runs in gpu.py, beyond those of the GPU tests.

They take the backend as an argument. They need only torch, wrapt and reloadpg.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpu_job import GROUPS, TIMEOUT, device_of, groups_of, start, sums, used

import reloadpg


def growth(rank: int, size: int, backend: str) -> dict[str, int]:
    """Bytes per communicator: created, used, and left after its end; means of :data:`GROUPS`."""
    device = start(rank, size, backend)
    dist.all_reduce(torch.ones(1, device=device))
    bound = device if backend == "nccl" else None
    empty = used()
    everyone = list(range(size))
    groups = [dist.new_group(everyone, device_id=bound) for _ in range(GROUPS)]
    created = used() - empty
    sums(groups, device, 1)
    in_use = used() - empty
    for group in groups:
        dist.destroy_process_group(group)
    left = used() - empty
    dist.destroy_process_group()
    return {
        "created": created // GROUPS,
        "used": in_use // GROUPS,
        "left": left // GROUPS,
    }


def by_hand(rank: int, size: int, backend: str, count: int) -> dict[str, Any]:
    """Destroy and create the groups of ``gpu_job.cycles``, WORLD too, with torch's functions."""
    device = device_of(rank, backend)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, TIMEOUT
    )

    def create(number: int) -> list[Any]:
        place = {"store": dist.PrefixStore(str(number), store), "rank": rank, "world_size": size}
        dist.init_process_group(backend, timeout=TIMEOUT, **place)
        return groups_of(size)

    sums(create(0), device, 1)
    rows = []
    for number in range(1, count + 1):
        before, begun = used(), time.perf_counter()
        dist.destroy_process_group()
        destroyed = time.perf_counter()
        after, created = used(), time.perf_counter()
        groups = create(number)
        again = time.perf_counter()
        sums(groups, device, 1)
        rows.append(
            {
                "released": before - after,
                "offload_ms": (destroyed - begun) * 1e3,
                "reload_ms": (again - created) * 1e3,
                "first_use_ms": (time.perf_counter() - again) * 1e3,
            }
        )
    dist.destroy_process_group()
    return {"rows": rows}


def with_memory_saver(rank: int, size: int, backend: str) -> dict[str, int]:
    """Bytes that an offload and torch_memory_saver give back, in the recommended order."""
    from torch_memory_saver import torch_memory_saver

    device = start(rank, size, backend)
    groups = groups_of(size)
    sums(groups, device, 1)
    with torch_memory_saver.region():
        weights = torch.ones(64 << 20, device=device)
    before = used()
    reloadpg.offload()
    offloaded = used()
    torch_memory_saver.pause()
    paused = used()
    torch_memory_saver.resume()
    reloadpg.reload()
    sums(groups, device, 1)
    del weights
    dist.destroy_process_group()
    return {"offload_bytes": before - offloaded, "own_bytes": offloaded - paused}


def borrowed(rank: int, size: int, backend: str) -> dict[str, str]:
    """What an offload does with a group whose communicator's pointer was taken, by policy."""
    device = device_of(rank, backend)
    seen = {}
    for policy in ("refuse", "warn", "ignore"):
        reloadpg.install(min_size=1, timeout=timedelta(seconds=60), borrowed=policy)
        dist.init_process_group(backend, timeout=TIMEOUT)
        groups = groups_of(size)
        reference = sums(groups, device, 1)
        groups[-1]._get_backend(device)._comm_ptr()
        try:
            report = reloadpg.offload()
        except reloadpg.errors.BorrowedError:
            seen[policy] = "refused, nothing was changed"
        else:
            name = groups[-1].group_name
            done = next(one.strategy for one in report.groups if one.name == name)
            warned = any("communicator" in text and "pointer" in text for text in report.warnings)
            reloadpg.reload()
            seen[policy] = done + ", with a warning" * warned
        same = all(
            torch.equal(a, b) for a, b in zip(reference, sums(groups, device, 1), strict=True)
        )
        seen[policy] += "" if same else ", BUT THE SUMS DIFFER"
        dist.destroy_process_group()
        reloadpg.uninstall()
    return seen
