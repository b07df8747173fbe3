"""Reads c10d's tables without the library; barriers for jobs in which rank 0 hosts the store."""

from __future__ import annotations

import gc
import inspect
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d

_LEAVES = (str, bytes, int, float, bool, type(None), types.ModuleType, types.FunctionType, type)


def world_tables() -> dict[str, Any]:
    """The tables of ``distributed_c10d._world`` by name, without computed properties."""
    properties = inspect.getmembers(type(c10d._world), lambda value: isinstance(value, property))
    return {name: getattr(c10d._world, name) for name, _ in properties if name != "pg_config_info"}


def lengths() -> dict[str, int]:
    """The number of entries of each table."""
    return {name: len(table) for name, table in world_tables().items() if hasattr(table, "__len__")}


def mentions(target: object) -> list[str]:
    """The places that hold an object: c10d's tables, and containers in the module's globals."""
    found: list[str] = []
    seen: set[int] = set()
    names = {**vars(c10d), **world_tables()}
    todo = [(name, value) for name, value in names.items() if not name.startswith("__")]
    while todo:
        path, value = todo.pop()
        if value is target:
            found.append(path)
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [(f"{path} (key)", key) for key in value]
            todo += [(f"{path}[...]", item) for item in value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += [(f"{path}[...]", item) for item in value]
    return sorted(found)


def holders(target: object) -> list[str]:
    """Types of Python objects that refer to an object, without frames."""
    return sorted(
        type(referrer).__name__
        for referrer in gc.get_referrers(target)
        if not isinstance(referrer, types.FrameType)
    )


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
