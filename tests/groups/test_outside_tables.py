"""Groups that are in none of c10d's tables: the status names them, and each offload warns."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds import CAN_SPLIT, start

import reloadpg

pytestmark = [
    pytest.mark.skipif(not CAN_SPLIT, reason="this torch has none of these functions"),
    pytest.mark.matrix,
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parent", ["reloadable", "plain"])
def test_a_group_of_the_method_split_group_is_named(rank, parent, tmp_path):
    """In ``status().unmanaged`` and in the report, as long as the program refers to it."""
    original = dist.ProcessGroup.split_group
    start("bound", file=str(tmp_path / "store"), min_size=1)
    whole = dist.group.WORLD
    if parent == "plain":
        with reloadpg.region(None):
            whole = dist.new_group([0, 1])
    part = whole.split_group([rank], group_name=f"part {rank}", group_desc="part")
    ((name, reason),) = reloadpg.status().unmanaged.items()
    assert name == part.group_name
    assert "ProcessGroup.split_group()" in reason
    assert any("(part)" in one and "new_group" in one for one in reloadpg.offload().warnings)
    reloadpg.reload()
    del part
    assert reloadpg.status().unmanaged == {}
    reloadpg.uninstall()
    assert dist.ProcessGroup.split_group is original


@pytest.mark.ranks(2)
@pytest.mark.skipif(
    not importlib.util.find_spec("torch.distributed._dist2"), reason="this torch has no _dist2"
)
def test_a_group_of_the_experimental_module_is_named():
    """It works while the others are offloaded, so it holds memory."""
    from torch.distributed import _dist2

    start("unbound", min_size=1)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # its rendezvous reads the environment
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    group = _dist2.new_group("gloo", timedelta(seconds=60), "cpu")
    (reason,) = reloadpg.status().unmanaged.values()
    assert "_dist2.new_group()" in reason
    reloadpg.offload()
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    assert tensor.item() == 1.0
    reloadpg.reload()
    reloadpg.uninstall()
    assert _dist2.new_group.__module__ == "torch.distributed._dist2"
