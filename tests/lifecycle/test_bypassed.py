"""Bypassed groups are named, each with the reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.testing import run_ranks


def _job(rank: int, size: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"uninstalled": reloadpg.status().bypassed_groups}
    worlds.init()
    reloadpg.install()
    dist.new_group([0, 1], group_desc="TP")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts["report"] = reloadpg.offload().warnings
        reloadpg.reload()
        reloadpg.offload()
        reloadpg.reload()
    facts["warned"] = [(str(one.message), one.filename == __file__) for one in caught]
    facts["status"] = str(reloadpg.status())
    reloadpg.uninstall()

    reloadpg.install(backends="gloo", exclude=["*_SERVICE", "TP"])
    service = dist.new_group([0, 1], group_desc="WEIGHT_SERVICE")
    plain = dist.new_group([0, 1])
    alone = dist.new_group([rank], use_local_synchronization=True)
    facts["kinds"] = [type(one).__name__ for one in (service, plain, alone)]
    facts["reasons"] = {
        (one.desc, one.ranks, one.backend): one.reason for one in reloadpg.status().bypassed_groups
    }
    facts["repr"] = repr(plain)
    with reloadpg.offloaded():
        facts["inside"] = _refused(plain)
        dist.all_reduce(torch.ones(1), group=service)
    facts["excluded"] = _summed(service)
    reloadpg.offload()
    facts["outside"] = _refused(plain)
    reloadpg.reload()
    facts["table"] = str(reloadpg.status())
    return facts


def _summed(group: Any) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return float(value)


def _refused(group: Any) -> str:
    try:
        group.allreduce(torch.ones(1)).wait()
    except reloadpg.GroupOffloadedError as error:
        return str(error)
    return ""


@pytest.mark.matrix
def test_bypassed_groups_are_named_with_the_reason() -> None:
    """An offload that releases nothing warns once, at the user's call, with the remedy.

    Excluded groups are torch's, and work while others are offloaded. The error inside a block does
    not tell the user to reload, since the end of the block does. Torch's "undefined" for a missing
    description is in no text.
    """
    for rank, facts in enumerate(run_ranks(_job, 2, timeout=120)):
        ((text, here),) = facts["warned"]
        assert here
        assert "no group is reloadable: group '0' (default_pg), '1' (TP): backend gloo" in text
        assert "Installed with backends=None, min_size=2, world=True" in text
        assert "call install(backends={'gloo'})" in text
        assert [text] == [f"reloadpg.offload(): {warning}" for warning in facts["report"]]
        assert facts["uninstalled"] == ()
        assert "bypassed: group '0' (default_pg), '1' (TP): backend gloo serves" in facts["status"]
        assert facts["reasons"] == {
            ("TP", (0, 1), "gloo"): "matches exclude 'TP'",
            ("WEIGHT_SERVICE", (0, 1), "gloo"): "matches exclude '*_SERVICE'",
            ("undefined", (rank,), "gloo"): "1 rank, fewer than min_size=2",
        }
        assert facts["kinds"] == ["ProcessGroup", "ReloadableProcessGroup", "ProcessGroup"]
        assert facts["excluded"] == 2
        assert "undefined" not in facts["repr"] + facts["table"] + facts["inside"]
        assert "[0, 1] gloo live" in facts["repr"]
        assert f"(rank {rank}): 1 rank, fewer than" in facts["table"]
        assert "reload()" not in facts["inside"]
        assert "reloadpg.barrier()" in facts["inside"]
        assert "gloo group" in facts["inside"]
        assert "Call reloadpg.reload() on all ranks" in facts["outside"]


def test_exclude_matches_names_and_descriptions() -> None:
    """A string is one pattern."""
    with reloadpg.install(exclude="default*") as installed:
        selection = installed.options.selection
    found = selection.bypass({"cuda": "nccl"}, 2, name="default_pg", desc="TP")
    assert found is not None
    assert found.reason == "matches exclude 'default*'"
    assert selection.bypass({"cuda": "nccl"}, 2, name="1", desc="default") is not None
    assert selection.bypass({"cuda": "nccl"}, 2, name="1", desc="TP") is None
