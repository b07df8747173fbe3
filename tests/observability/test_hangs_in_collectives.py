"""A hang inside a collective, as `reloadpg status` shows it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.cli.job import JobView
from reloadpg.cli.records import read_directory
from reloadpg.observability import publish_status
from reloadpg.testing import run_ranks

LATE = 2


def skipped(rank: int, size: int, directory: str) -> list[Any]:
    """Rank 2 skips a collective, and polls the findings until they show the others in it."""
    reloadpg.install(backends={"gloo"})
    worlds.init("gloo")
    end = publish_status(directory)
    group: Any = dist.new_group(range(size), group_desc="ring")
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1))
    found: list[Any] = []
    while rank == LATE and not (
        found and "0-1, 3 in number" in found[0].message and "in all_reduce" in found[0].remedy
    ):
        job = JobView(read_directory(Path(directory)))
        found = [one for one in job.lasting_findings() if one.check == "collective"]
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1), group=group)
    worlds.barrier()
    end()
    return [(one.level, one.message, one.remedy) for one in found] + [group.group_name]


def test_a_rank_that_skips_a_collective_is_named_with_the_group(tmp_path: Path) -> None:
    """With the duration, and the program lines at which the ranks are."""
    results = run_ranks(skipped, 4, args=(str(tmp_path),), timeout=180)
    (level, message, remedy), name = results[LATE]
    assert level == "problem"
    assert f"0-1, 3 in number 2 of group '{name}'" in message
    assert "rank 2 1, for " in message
    assert 'rank 2 is at File "' in remedy
    assert "in skipped" in remedy
    assert "in all_reduce" in remedy  # where the others are
