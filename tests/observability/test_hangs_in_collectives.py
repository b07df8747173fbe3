"""A hang inside a collective, as `reloadpg status` shows it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.cli.status import JobView
from reloadpg.observability.record import read_directory

LATE = 2


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=180)
def test_a_rank_that_skips_a_collective_is_named_with_the_group(rank: int, tmp_path: Path) -> None:
    """With the duration, and the program lines at which the ranks are.

    Rank 2 skips a collective, and polls the findings until they name it.
    """
    os.environ["RELOADPG_STATUS_DIR"] = str(tmp_path)
    reloadpg.install(backends={"gloo"})
    worlds.init("gloo")
    group: Any = dist.new_group(range(4), group_desc="ring")
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(1))
    found: list[Any] = []
    while rank == LATE and not (
        found
        and "ranks 0-1, 3 in" in found[0].message
        and "in all_reduce" in found[0].remedy
        # Not within the functions that it polls with.
        and found[0].remedy.startswith("rank 2 is in test_a_rank_that_skips")
    ):
        job = JobView(read_directory(tmp_path))
        found = [one for one in job.findings if one.check == "collective"]
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1), group=group)
    worlds.barrier()
    for one in found:
        assert one.level == "problem"
        assert one.message.startswith(f"ranks 0-1, 3 in collective 2 of group '{group.group_name}'")
        assert one.message.endswith(" s; rank 2 has begun 1")
        late, waiting = one.remedy.splitlines()
        assert late.startswith("rank 2 is in test_a_rank_that_skips")
        assert waiting.startswith("rank 0 is in all_reduce (torch/distributed/distributed_c10d.py:")
        assert "), called by test_a_rank_that_skips" in waiting
        assert "c10d_logger" not in waiting  # torch's decorator around it
        assert one.lines("")[1:] == [f"-> {late}", f"-> {waiting}"]
    assert len(found) == (rank == LATE)
