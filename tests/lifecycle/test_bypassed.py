"""Bypassed groups are named, each with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import Job

import reloadpg
from reloadpg.c10d.tables import Entry
from reloadpg.cli.doctor import diagnose
from reloadpg.groups.selection import Bypass, Selection
from reloadpg.groups.sets import TRAINER


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_bypassed_groups_are_named_with_the_reason(rank: int) -> None:
    """The report of an offload that releases nothing says so, with the remedy.

    Excluded groups are plain groups of torch, and work while others are offloaded. Torch's
    "undefined" for a missing description is in no text.
    """
    assert reloadpg.status().bypassed_groups == ()
    worlds.init()
    reloadpg.install()
    dist.new_group([0, 1], group_desc="TP")
    report = reloadpg.offload()
    reloadpg.reload()
    (text,) = report.warnings
    assert "no group is reloadable: group '0' (default_pg), '1' (TP): backend gloo" in text
    assert "Installed with backends=None, min_size=2, world=True" in text
    assert "call install(backends={'gloo'})" in text
    listed = "bypassed: group '0' (default_pg), '1' (TP): backend gloo serves"
    assert listed in str(reloadpg.status())
    reloadpg.uninstall()

    reloadpg.install(backends="gloo", exclude=["*_SERVICE", "TP"])
    service = dist.new_group([0, 1], group_desc="WEIGHT_SERVICE")
    plain = dist.new_group([0, 1])
    alone = dist.new_group([rank], use_local_synchronization=True)
    kinds = [type(one).__name__ for one in (service, plain, alone)]
    assert kinds == ["ProcessGroup", "ReloadableProcessGroup", "ProcessGroup"]
    found = reloadpg.status().bypassed_groups
    assert {(one.desc, one.ranks, one.backend): one.reason for one in found} == {
        ("TP", (0, 1), "gloo"): "matches exclude 'TP'",
        ("WEIGHT_SERVICE", (0, 1), "gloo"): "matches exclude '*_SERVICE'",
        ("undefined", (rank,), "gloo"): "1 rank, fewer than min_size=2",
    }
    shown = repr(plain)
    with reloadpg.offloaded():
        with pytest.raises(reloadpg.GroupOffloadedError, match="leave the offloaded") as error:
            plain.allreduce([torch.ones(1)]).wait()  # type: ignore[union-attr]
        assert worlds.sums_right(service)
    table = str(reloadpg.status())
    assert "undefined" not in f"{shown} {table} {error.value}"
    assert "[0, 1] gloo live" in shown
    assert f"(rank {rank}): 1 rank, fewer than" in table


def test_exclude_matches_names_and_descriptions() -> None:
    """A string is one pattern."""
    selection = Selection.of(None, 2, True, exclude="default*")

    def reason(name: str, desc: str) -> str:
        entry = Entry(name, range(2), "nccl", "cuda:nccl", desc)
        decision = selection.decide(entry, lambda: TRAINER)
        return decision.reason if isinstance(decision, Bypass) else ""

    assert reason("default_pg", "TP") == "matches exclude 'default*'"
    assert reason("1", "default") == "matches exclude 'default*'"
    assert not reason("1", "TP")


@pytest.mark.ranks(2)
def test_groups_of_one_rank_with_a_communicator_are_warned_of_once_per_job(rank: int) -> None:
    """In the report of the first offload after they have one, in the status, and by doctor."""

    def told(report: reloadpg.Report) -> list[str]:
        return [text for text in report.warnings if "of one rank" in text]

    Job("sim", subgroups=())
    groups = [dist.new_group([one]) for one in (0, 1)]
    mine: dist.ProcessGroup = groups[rank]  # type: ignore[assignment]
    assert not told(reloadpg.offload()), "it was never used"
    reloadpg.reload()
    assert not [one for one in diagnose() if one.check == "groups"]
    mine.allreduce([torch.ones(1)]).wait()
    reports = [reloadpg.offload(), reloadpg.reload(), reloadpg.offload(), reloadpg.reload()]
    (text,) = told(reports[0])
    label = f"group {str(rank + 1)!r} (rank {rank})"
    assert text == (
        f"1 bypassed group of one rank has a communicator of 16.0 MiB, first {label}; "
        "install(min_size=1) on all ranks makes it reloadable"
    )
    assert not any(map(told, reports[1:]))
    assert text in str(reloadpg.status())
    found = {one.name: (one.holds, one.memory_bytes) for one in reloadpg.status().bypassed_groups}
    assert found == {str(rank + 1): (True, 16 << 20)}
    (finding,) = [one for one in diagnose() if one.check == "groups"]
    assert f"{finding.message}; {finding.remedy}" == text
