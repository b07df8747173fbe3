"""The code of the GPU tests, on the simulated accelerator."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import gpu_job
import pytest

from reloadpg.testing import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("strategy", ["recreate", "suspend"])
def test_cycles_of_the_gpu_job(strategy: str) -> None:
    """Memory, bits and the strategy."""
    (seen,) = run_ranks(gpu_job.cycles, 1, args=("sim", 3, strategy), timeout=280)
    assert (seen["source"], seen["equal"], seen["groups"]) == ("simulated", True, 4)
    for row in seen["rows"]:
        stays = row["before"] // 8 if strategy == "suspend" else 0
        assert row["before"] - row["after"] == row["reported"] == row["before"] - stays
        assert row["strategies"] == [strategy]


def test_options_of_the_gpu_job() -> None:
    (seen,) = run_ranks(gpu_job.options, 1, args=("sim",), timeout=280)
    assert seen["first"] == {"timeout": timedelta(seconds=77), "high": True}
    assert seen["later"] == [seen["first"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
def test_training_of_the_gpu_job(how: str) -> None:
    """Losses with and without cycles are bit-identical, and fall."""
    with_cycles, without = (
        run_ranks(gpu_job.train, 2, args=("sim", how, offloads), timeout=280)
        for offloads in (True, False)
    )
    assert with_cycles == without
    losses = [float.fromhex(loss) for loss in without[0]]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_benchmark_ends_cleanly_without_a_gpu() -> None:
    """Exit code 0, and one line that says why nothing was measured."""
    if not gpu_job.no_gpu():
        pytest.skip("there is a GPU here")
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "nothing was measured: no CUDA device" in ended.stdout
