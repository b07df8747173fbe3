"""Groups that torch enters into none of its tables: they are named, and each offload warns."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds import CAN_SPLIT, start

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(not CAN_SPLIT, reason="this torch has none of these functions"),
    pytest.mark.matrix,
]


def _by_method(rank, world_size, parent, file):
    start("bound", file=file, min_size=1)
    if parent == "reloadable":
        whole = dist.group.WORLD
    else:
        with reloadpg.region(None):
            whole = dist.new_group([0, 1])
    part = whole.split_group([rank], group_name=f"part {rank}", group_desc="part")
    named = dict(reloadpg.status().unmanaged)
    warnings = reloadpg.offload().warnings
    reloadpg.reload()
    name = part.group_name
    del part
    return name, named, warnings, dict(reloadpg.status().unmanaged)


@pytest.mark.parametrize("parent", ["reloadable", "plain"])
def test_a_part_that_the_method_split_group_makes_is_named(parent, tmp_path):
    """In ``status().unmanaged`` and in the report, as long as the program holds it."""
    for name, named, warnings, later in run_ranks(
        _by_method, 2, args=(parent, str(tmp_path / "store"))
    ):
        assert list(named) == [name]
        assert "ProcessGroup.split_group()" in named[name]
        assert any("(part)" in one and "new_group" in one for one in warnings)
        assert later == {}


def _by_experimental_module(rank, world_size):
    from torch.distributed import _dist2

    start("unbound", min_size=1)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # it meets by the environment, here alone
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    group = _dist2.new_group("gloo", timedelta(seconds=60), "cpu")
    named = dict(reloadpg.status().unmanaged)
    reloadpg.offload()
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    reloadpg.reload()
    reloadpg.uninstall()
    return named, tensor.item(), _dist2.new_group.__module__, reloadpg.is_installed()


@pytest.mark.skipif(
    not importlib.util.find_spec("torch.distributed._dist2"), reason="this torch has no _dist2"
)
def test_a_group_of_the_experimental_module_is_named():
    """It works while the others are offloaded, so it holds memory."""
    for named, total, module, _ in run_ranks(_by_experimental_module, 2):
        (reason,) = named.values()
        assert "_dist2.new_group()" in reason
        assert total == 1.0
        assert module == "torch.distributed._dist2"
