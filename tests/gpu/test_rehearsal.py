"""The code of the GPU tests, on the simulated accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gpu import gpu_job

from reloadpg.testing import run_ranks

ROOT = Path(__file__).parents[2]


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


def benchmark(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


@pytest.mark.slow
def test_no_page_without_results(tmp_path: Path) -> None:
    ended = benchmark("--page", tmp_path / "none.json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "none.json does not exist: run the steps with --json first" in ended.stderr


@pytest.mark.standins
@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_the_steps_over_stand_ins(tmp_path: Path) -> None:
    """Each is saved when it ends, so a run that is cut off continues; all take some minutes."""
    path = tmp_path / "results.json"
    first = benchmark("--standins", "--json", path, "--minutes", 0.5)
    assert "not begun, 0.5 minutes are over" in first.stdout, first.stdout + first.stderr
    done = json.loads(path.read_text())["steps"]
    assert "result" in done["facts"]
    rest = benchmark("--standins", "--json", path, "--minutes", 8)
    steps = json.loads(path.read_text())["steps"]
    assert rest.returncode == 0, rest.stdout + rest.stderr
    finished = {name: step for name, step in done.items() if "result" in step}
    assert finished.items() <= steps.items()  # a step that the time ended runs again
    assert [name for name, step in steps.items() if "error" in step] == []
    assert steps["recreate, 2 ranks"]["result"]["same_bits"]
    held = steps["recreate, 2 ranks"]["result"]
    assert held["released_bytes"] == held["held_bytes"] == held["reported_bytes"]
    policies = steps["borrowed"]["result"]
    assert policies["refuse"] == "refused, nothing was changed"
    assert policies["warn"] == "recreate, with a warning"
    assert policies["ignore"] == "recreate"
    assert "no figures of one" in rest.stdout
    for name, module in (("torch_memory_saver", "torch_memory_saver"), ("vLLM", "vllm")):
        why = "its kernels need a GPU" if find_spec(module) else f"{module} is not installed"
        assert steps[name]["skipped"] == why
        assert f"| {name} | {why} |" in rest.stdout


@pytest.mark.slow
def test_the_benchmark_ends_cleanly_without_a_gpu() -> None:
    """Exit code 0, and one line that says why nothing was measured."""
    if not gpu_job.no_gpu():
        pytest.skip("there is a GPU here")
    ended = benchmark()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "nothing was measured: no CUDA device" in ended.stdout
