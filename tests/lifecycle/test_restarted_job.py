"""A job that torchrun restarts as a whole is a new job: no process counts as a replacement."""

from __future__ import annotations

import sys

import pytest
from launching import HELPERS, launch


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
