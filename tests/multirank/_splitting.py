"""``split_group`` where torch's own does not split gloo groups: before 2.15."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.torch_version import TorchVersion

_OWN = c10d.split_group


@functools.wraps(_OWN)
def _split_group(
    parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, backend=None
):
    """Like torch's: it knows its parent, all ranks of that call it, the parts are made apart."""
    parent = parent_pg or c10d._get_default_group()
    if parent not in c10d._world.pg_group_ranks:
        raise ValueError(f"Group {parent} is not registered")
    members = dist.get_process_group_ranks(parent)
    parts = [[members[rank] for rank in part] for part in split_ranks]
    mine = next((part for part in parts if dist.get_rank() in part), None)
    if mine is None:
        c10d._process_group_name(parts[0], use_hashed_name=True)
        return None
    return c10d.new_group(mine, timeout, backend, pg_options, True, group_desc)


def prepare():
    """Let ``split_group`` split gloo groups, and note its calls. Before ``install``."""
    own = _OWN if TorchVersion(torch.__version__) >= "2.15" else _split_group
    calls = []

    @functools.wraps(_OWN)
    def split_group(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    for module in (c10d, dist, device_mesh):
        if hasattr(module, "split_group"):
            module.split_group = split_group
    return calls
