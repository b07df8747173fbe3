"""Reads c10d's tables without the library; barriers for jobs in which rank 0 hosts the store."""

from __future__ import annotations

import inspect
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d


def world_tables() -> dict[str, Any]:
    """The tables of ``distributed_c10d._world`` by name, without computed properties."""
    properties = inspect.getmembers(type(c10d._world), lambda value: isinstance(value, property))
    return {name: getattr(c10d._world, name) for name, _ in properties if name != "pg_config_info"}


def lengths() -> dict[str, int]:
    """The number of entries of each table."""
    return {name: len(table) for name, table in world_tables().items() if hasattr(table, "__len__")}


def resolves_to(name: str) -> Any:
    """The group of that name in the C++ registry; None if there is none."""
    try:
        return _resolve_process_group(name)
    except (RuntimeError, ValueError):
        return None


def summed(group: Any, rank: int) -> int:
    """The sum of ``2**rank`` over a group, which identifies the ranks that took part."""
    import torch

    tensor = torch.tensor([2**rank])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def expected_sum(ranks: Any) -> int:
    return sum(2**rank for rank in ranks)


def meet_at_rank_0(rank: int, key: str) -> None:
    """Make rank 0, which hosts the store, wait until rank 1 has read the decision."""
    store = c10d._get_default_store()
    if rank == 0:
        store.wait([key], timedelta(seconds=120))
    else:
        store.set(key, "")


def store_closed_by_rank_0(rank: int, marker: Path) -> None:
    """Wait until rank 0 has closed the store; otherwise a new job would connect to the old one."""
    if rank == 0:
        marker.touch()
    while not marker.exists():
        time.sleep(0.01)
