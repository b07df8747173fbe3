"""A job that torchrun restarts as a whole is a new job: no process counts as a replacement."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import meet
from helpers.launching import HELPERS, launch
from helpers.replacing import store

import reloadpg
from reloadpg.testing import run_ranks

LIMIT = timedelta(minutes=4)
"""Reached only if something hangs."""


def _start(rank: int, size: int, creator: str) -> float | None:
    """Ranks 2 and 3 are the second start of ranks 0 and 1, on the launcher's store."""
    start, rank = divmod(rank, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place["TORCHELASTIC_RESTART_COUNT"] = start
    os.environ.update({name: str(value) for name, value in place.items()})
    meeting = store()
    if start == 1:
        meeting.wait(["the first start has failed"], LIMIT)
    reloadpg.install(backends={"gloo"}, recoverable=True)
    if creator == "init_process_group":
        dist.init_process_group("gloo")
    elif start == 1:
        reloadpg.environment.init_distributed()
    else:
        with pytest.raises(reloadpg.DisagreementError):
            reloadpg.environment.init_distributed(mesh_dims={"tp": 2} if rank == 0 else None)
    if start == 0:
        meet("ended", 2, LIMIT.total_seconds(), meeting)
        meeting.set("the first start has failed", "")
        return None
    assert not reloadpg.recovery.rejoin().changed
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("creator", ["init_process_group", "init_distributed"])
def test_the_second_start_does_not_read_what_the_first_one_wrote(creator: str) -> None:
    """Neither the processes of the first start nor the end of its bring-up."""
    found = run_ranks(_start, 4, args=(creator,), timeout=240)
    assert found == [None, None, 2.0, 2.0]


@pytest.mark.slow
def test_a_restart_of_all_ranks_is_a_new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the same store."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # torchrun's own would be refused
    output = launch(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(HELPERS / "restarted_job.py")),
    )
    for rank in range(2):
        assert f"start 1 rank {rank} rejoined False steps [0, 1, 2] sum 2.0" in output
