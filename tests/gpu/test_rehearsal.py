"""The GPU tests' own code, on the simulated accelerator: it is right before it meets a GPU."""

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
def test_cycles(strategy: str) -> None:
    """Memory, bits and the strategy are seen as they are."""
    (seen,) = run_ranks(gpu_job.cycles, 1, args=("sim", 3, strategy), timeout=280)
    assert (seen["source"], seen["equal"], seen["groups"]) == ("simulated", True, 4)
    for row in seen["rows"]:
        stays = row["before"] // 8 if strategy == "suspend" else 0
        assert row["before"] - row["after"] == row["reported"] == row["before"] - stays
        assert row["strategies"] == [strategy]


def test_options() -> None:
    """The timeout and the options object of the rebuilt backend."""
    (seen,) = run_ranks(gpu_job.options, 1, args=("sim",), timeout=280)
    assert seen["first"] == {"timeout": timedelta(seconds=77), "high": True}
    assert seen["later"] == [seen["first"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
def test_training(how: str) -> None:
    """Losses with and without cycles are the same bits, and fall."""
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
