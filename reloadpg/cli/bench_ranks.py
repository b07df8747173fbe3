"""What each rank of ``reloadpg bench`` does."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reloadpg

__all__ = ["run"]


def run(
    rank: int, world_size: int, backend: str, groups: int, cycles: int, ticks: str
) -> list[dict[str, Any]]:
    """Cycles of offload and reload over so many groups, WORLD among them. Collective, blocking.

    Every group is used before each offload, so that its communicator is there. The first cycle
    opens connections and fills caches; it is left out.

    Args:
        rank: this rank.
        world_size: number of ranks.
        backend: ``gloo``, ``sim`` or ``nccl``.
        groups: number of groups of all ranks.
        cycles: number of cycles that count.
        ticks: a file that rank 0 makes one byte longer with each cycle.

    Returns:
        One dictionary a cycle: milliseconds and bytes as the reports of this rank have them.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if backend == "sim":
        from ..testing import simulated

        simulated.register()
    reloadpg.uninstall()  # with RELOADPG_AUTOINSTALL=1 it came with torch, with other options
    with reloadpg.install(backends={backend}, min_size=1):
        dist.init_process_group(backend)
        held = [dist.group.WORLD, *(dist.new_group() for _ in range(groups - 1))]
        rows = []
        for cycle in range(cycles + 1):
            _use(held, device, world_size)
            offload, reload = reloadpg.offload(), reloadpg.reload()
            for report in (offload, reload):
                if len(report.groups) != groups:
                    raise RuntimeError(f"{report} is not about {groups} groups")
            if cycle:
                rows.append({**_figures(offload), **_figures(reload)})
            if rank == 0:
                with Path(ticks).open("a") as file:
                    file.write(".")
        _use(held, device, world_size)
        dist.destroy_process_group()
    return rows


def _use(groups: list[Any], device: torch.device, world_size: int) -> None:
    for group in groups:
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group)
        if tensor.item() != world_size:
            raise RuntimeError(f"a sum over {world_size} ranks was {tensor.item()}")


def _figures(report: reloadpg.Report) -> dict[str, Any]:
    moved = report.released_bytes if report.operation == "offload" else report.restored_bytes
    waited = sum(ms for name, ms in report.phases_ms.items() if name.startswith("wait."))
    return {
        f"{report.operation}_ms": report.total_ms,
        f"{report.operation}_group_ms": statistics.median([group.ms for group in report.groups]),
        f"{report.operation}_wait_ms": waited,
        f"{report.operation}_own_ms": report.overhead_ms,
        f"{report.operation}_bytes": moved,
        "memory_source": report.memory_source,
    }
