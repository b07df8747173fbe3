"""The benchmarks run and fail over a limit. The figures of a quick run are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(BENCHMARKS)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )


def figures_of(script: str, path: Path, *arguments: str) -> dict[str, Any]:
    done = run(str(BENCHMARKS / script), *(arguments or ["--quick"]), "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


@pytest.mark.matrix
def test_dispatch_measures_every_collective_and_path(tmp_path: Path) -> None:
    """On a subgroup and on WORLD."""
    rows = figures_of("dispatch.py", tmp_path / "figures.json")["rows"]
    measured = {(row["path"], row["group"]) for row in rows}
    paths = ("python", "functional", "launch", "query")
    assert measured == {(path, group) for path in paths for group in ("subgroup", "world")}
    assert all(row["native_us"] > 0 and row["proxy_us"] > 0 for row in rows)
    assert {row["call"] for row in rows if row["path"] == "python"} >= {
        *("all_reduce", "broadcast", "reduce", "barrier", "all_to_all", "all_to_all_single"),
        *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
        *("gather", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
        *("all_gather_object", "broadcast_object_list", "all_reduce async"),
    }


def test_dispatch_fails_over_a_limit() -> None:
    """With exit code 1."""
    code = (
        "import sys, dispatch; dispatch.LIMITS['query'] = 0; sys.exit(dispatch.main(sys.argv[1:]))"
    )
    over = run("-c", code, "--quick", "--check")
    assert over.returncode == 1, over.stderr
    assert "OVER" in over.stdout


def test_reload_measures_by_number_of_groups_and_by_job_size(tmp_path: Path) -> None:
    """On real gloo ranks and the fake backend, with the cost of torch alone.

    A rank has as many groups in a larger job; the baseline replays all groups of the job. Without
    automatic garbage collection, an offload and a reload start no full one.
    """
    figures = figures_of("reload.py", tmp_path / "figures.json")
    by_groups = [(row["backend"], row["groups"]) for row in figures["by_groups"]]
    assert by_groups == [("gloo", 1), ("gloo", 3), ("fake", 1), ("fake", 3)]
    for row in figures["by_groups"]:
        assert min(row["offload_ms"], row["reload_ms"], row["torch_create_ms"]) > 0
        assert row["reload_own_ms"] < row["reload_ms"]
    small, large = figures["by_job_size"]
    assert (small["ranks"], large["ranks"]) == (64, 256)
    assert small["member_groups"] == large["member_groups"] >= 20
    assert small["job_groups"] < large["job_groups"]
    for row in (small, large):
        assert row["speedup"] == pytest.approx(row["replay_all_ms"] / row["reload_ms"])
    assert figures["checks"]["collections"]["value"] == 0


@pytest.mark.matrix
def test_creation_measures_all_calls_of_a_job(tmp_path: Path) -> None:
    """All 80 calls, of which 77 create groups of other ranks and 3 groups of this rank."""
    rows = figures_of("creation.py", tmp_path / "figures.json")["rows"]
    calls = [(row["part"], row["calls"]) for row in rows]
    assert calls == [("job", 80), ("others", 77), ("members", 3)]
    assert all(row[f"{kind}_us"] > 0 for row in rows for kind in ("torch", "reloadable"))


def test_cycle_measures_both_ways_on_both_backends_and_plot_draws_them(tmp_path: Path) -> None:
    """The memory of the two simulated communicators, of 4 MiB each, is released.

    The picture has a line for each way. Equal figures give equal files.
    """
    path = tmp_path / "figures.json"
    rows = figures_of("cycle.py", path)["by_groups"]
    assert [(row["backend"], row["way"]) for row in rows] == [
        (backend, way) for backend in ("sim", "gloo") for way in ("reloadable", "by hand")
    ]
    for row in rows:
        assert row["cycle_ms"] > 0
        assert row["backend"] == "gloo" or row["freed_mb"] > 7
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        done = run(str(BENCHMARKS / "plot.py"), str(path), str(picture))
        assert done.returncode == 0, done.stderr
    text = pictures[0].read_text()
    for label in ("gloo, by hand", "simulated, reloadable", "all calls of the job again"):
        assert label in text
    assert text == pictures[1].read_text()


def test_rendezvous_counts_the_store_operations_of_a_barrier(tmp_path: Path) -> None:
    """A few for each rank, fewer with more ranks on the host, and few keys remain."""
    arguments = ("--ranks", "2", "8", "--barriers", "3")
    figures = figures_of("rendezvous.py", tmp_path / "figures.json", *arguments)["barriers"]
    assert [row["ranks"] for row in figures] == [2, 8]
    assert all(1 <= row["operations"] <= 12 for row in figures)
    assert figures[1]["operations"] < figures[0]["operations"]
    assert all(row["keys_per_rank"] < 10 for row in figures)


def test_parallel_measures_every_width_and_the_overlap(tmp_path: Path) -> None:
    """Reloads with one to eight groups at a time, and one in parallel with a copy."""
    figures = figures_of("parallel.py", tmp_path / "figures.json")
    assert list(figures["reload_s"]) == ["1", "2", "4", "8"]
    assert figures["ratio"] == figures["reload_s"]["8"] / figures["reload_s"]["1"]
    assert min(figures["torch_s"], figures["after_s"], figures["along_s"]) > figures["creation_s"]


def test_recovery_measures_a_fault_in_both_ways(tmp_path: Path) -> None:
    """In place and with new processes; the weights are equal."""
    figures = figures_of("recovery.py", tmp_path / "figures.json")
    assert {way: len(seconds) for way, seconds in figures["seconds"].items()} == {
        "recover": 1,
        "restart": 1,
    }
    medians = figures["medians"]
    assert min(medians.values()) > 0
    assert figures["ratio"] == medians["recover"] / medians["restart"]
    assert figures["equal"]


def test_startup_measures_import_and_install(tmp_path: Path) -> None:
    """The import does not load torch; install finds an early alias among 3,000 modules."""
    figures = figures_of("startup.py", tmp_path / "figures.json")
    facts = figures["facts"]
    assert (facts["import_loads_torch"], facts["alias_found"]) == (False, True)
    assert 3000 <= facts["modules"] < 3100
    assert [row["what"] for row in figures["rows"]] == ["import", "install", "load"]
    assert all(row["wall_ms"] > 0 and row["cpu_ms"] > 0 for row in figures["rows"])
