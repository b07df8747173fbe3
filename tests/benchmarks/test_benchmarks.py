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


@pytest.fixture(scope="module")
def dispatch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return quick("dispatch.py", tmp_path_factory.mktemp("dispatch") / "figures.json")


@pytest.fixture(scope="module")
def reload(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return quick("reload.py", tmp_path_factory.mktemp("reload") / "figures.json")


def quick(script: str, path: Path) -> dict[str, Any]:
    done = run(str(BENCHMARKS / script), "--quick", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


@pytest.mark.matrix
def test_dispatch_measures_every_path_on_a_subgroup_and_on_world(dispatch: dict[str, Any]) -> None:
    rows = dispatch["rows"]
    measured = {(row["path"], row["group"]) for row in rows}
    paths = ("python", "functional", "launch", "query")
    assert measured == {(path, group) for path in paths for group in ("subgroup", "world")}
    assert all(row["native_us"] > 0 and row["proxy_us"] > 0 for row in rows)


@pytest.mark.matrix
def test_dispatch_covers_the_collectives(dispatch: dict[str, Any]) -> None:
    python = {row["call"] for row in dispatch["rows"] if row["path"] == "python"}
    assert python >= {
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


def test_reload_measures_by_number_of_groups(reload: dict[str, Any]) -> None:
    """On real gloo ranks and the fake backend, with the cost of torch alone."""
    assert [(row["backend"], row["groups"]) for row in reload["by_groups"]] == [
        ("gloo", 1),
        ("gloo", 3),
        ("fake", 1),
        ("fake", 3),
    ]
    for row in reload["by_groups"]:
        assert row["offload_ms"] > 0
        assert row["reload_ms"] > 0
        assert row["reload_own_ms"] < row["reload_ms"]
        assert row["torch_create_ms"] > 0


def test_reload_measures_by_job_size(reload: dict[str, Any]) -> None:
    """A rank has as many groups in a larger job; the baseline replays all groups of the job."""
    small, large = reload["by_job_size"]
    assert (small["ranks"], large["ranks"]) == (64, 256)
    assert small["member_groups"] == large["member_groups"] >= 20
    assert small["job_groups"] < large["job_groups"]
    for row in (small, large):
        assert row["speedup"] == pytest.approx(row["replay_all_ms"] / row["reload_ms"])


def test_an_offload_and_a_reload_start_no_full_garbage_collection(reload: dict[str, Any]) -> None:
    """Measured with the automatic collection off."""
    assert reload["checks"]["collections"]["value"] == 0


def test_reload_fails_over_a_limit() -> None:
    """Each of the four limits."""
    code = """
import reload
group = {"groups": 50, "offload_own_ms": 1.0, "reload_own_ms": 1.0, "collections": 0}
jobs = [{"reload_ms": 2.0, "speedup": 2.0, "collections": 0},
        {"reload_ms": 2.9, "speedup": 51.0, "collections": 0}]
print(reload.check_limits([group], jobs, 50)["ok"])
print(reload.check_limits([{**group, "reload_own_ms": 10.5}], jobs, 50)["ok"])
print(reload.check_limits([{**group, "collections": 1}], jobs, 50)["ok"])
print(reload.check_limits([group], [jobs[0], {**jobs[1], "reload_ms": 3.1}], 50)["ok"])
print(reload.check_limits([group], [jobs[0], {**jobs[1], "speedup": 49.0}], 50)["ok"])
"""
    done = run("-c", code)
    assert done.stdout.split() == ["True", "False", "False", "False", "False"], done.stderr


@pytest.mark.matrix
def test_creation_measures_all_calls_of_a_job(tmp_path: Path) -> None:
    """All 80 calls, of which 77 create groups of other ranks and 3 groups of this rank."""
    rows = quick("creation.py", tmp_path / "figures.json")["rows"]
    assert [(row["part"], row["calls"]) for row in rows] == [
        ("job", 80),
        ("others", 77),
        ("members", 3),
    ]
    assert all(row[f"{kind}_us"] > 0 for row in rows for kind in ("torch", "reloadable"))


def test_creation_fails_over_a_limit() -> None:
    code = """
import creation
row = {"part": "others", "ranks": 64, "limit": 1.2}
print(creation.check_limits([{**row, "reloadable_ratio": 1.2}])["ok"])
print(creation.check_limits([{**row, "reloadable_ratio": 1.21}])["over"])
print(creation.check_limits([{**row, "reloadable_ratio": 9.0, "limit": None}])["ok"])
"""
    done = run("-c", code)
    assert done.stdout.split("\n")[:3] == ["True", "['others at 64 ranks']", "True"], done.stderr


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cycle") / "figures.json"
    quick("cycle.py", path)
    return path


def test_cycle_measures_both_ways_on_both_backends(cycle: Path) -> None:
    """The memory of the two simulated communicators, of 4 MiB each, is released."""
    rows = json.loads(cycle.read_text())["by_groups"]
    assert [(row["backend"], row["way"]) for row in rows] == [
        ("sim", "reloadable"),
        ("sim", "by hand"),
        ("gloo", "reloadable"),
        ("gloo", "by hand"),
    ]
    for row in rows:
        assert row["cycle_ms"] > 0
        assert row["backend"] == "gloo" or row["freed_mb"] > 7


def test_plot_draws_what_the_cycle_benchmark_wrote(cycle: Path, tmp_path: Path) -> None:
    """With a line for each way. Equal figures give equal files."""
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        done = run(str(BENCHMARKS / "plot.py"), str(cycle), str(picture))
        assert done.returncode == 0, done.stderr
    text = pictures[0].read_text()
    for label in ("gloo, by hand", "simulated, reloadable", "all calls of the job again"):
        assert label in text
    assert text == pictures[1].read_text()


def test_rendezvous_counts_the_store_operations_of_a_barrier(tmp_path: Path) -> None:
    """A few for each rank, fewer with more ranks on the host, and few keys remain."""
    path = tmp_path / "figures.json"
    arguments = ("--ranks", "2", "8", "--barriers", "3", "--json", str(path))
    done = run(str(BENCHMARKS / "rendezvous.py"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())["barriers"]
    assert [row["ranks"] for row in figures] == [2, 8]
    assert all(1 <= row["operations"] <= 12 for row in figures)
    assert figures[1]["operations"] < figures[0]["operations"]
    assert all(row["keys_per_rank"] < 10 for row in figures)


def test_parallel_measures_every_width_and_the_overlap(tmp_path: Path) -> None:
    """Reloads with one to eight groups at a time, and one in parallel with a copy."""
    figures = quick("parallel.py", tmp_path / "figures.json")
    assert list(figures["reload_s"]) == ["1", "2", "4", "8"]
    assert figures["ratio"] == figures["reload_s"]["8"] / figures["reload_s"]["1"]
    assert min(figures["torch_s"], figures["after_s"], figures["along_s"]) > figures["creation_s"]


def test_recovery_measures_a_fault_in_both_ways(tmp_path: Path) -> None:
    """In place and with new processes; the weights are equal."""
    figures = quick("recovery.py", tmp_path / "figures.json")
    assert {way: len(seconds) for way, seconds in figures["seconds"].items()} == {
        "retrying": 1,
        "restart": 1,
    }
    assert all(seconds > 0 for seconds in figures["medians"].values())
    assert figures["ratio"] == figures["medians"]["retrying"] / figures["medians"]["restart"]
    assert figures["equal"]


def test_startup_measures_import_and_install(tmp_path: Path) -> None:
    """The import does not load torch; install finds an early alias among 3,000 modules."""
    figures = quick("startup.py", tmp_path / "figures.json")
    assert figures["facts"]["import_loads_torch"] is False
    assert figures["facts"]["alias_found"] is True
    assert 3000 <= figures["facts"]["modules"] < 3100
    assert [row["what"] for row in figures["rows"]] == ["import", "install", "load"]
    assert all(row["wall_ms"] > 0 and row["cpu_ms"] > 0 for row in figures["rows"])


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ("", True),
        ("installs[0]['alias_found'] = False", False),
        ("rows[1]['cpu_ms'] = 20.5", False),
    ],
)
def test_startup_fails_over_a_limit(change: str, ok: bool) -> None:
    """Each figure has a limit, and each fact must hold."""
    code = f"""
import startup
imports = [{{"import": (1, 49), "torch": False}}]
installs = [{{"install": (1, 19), "load": (1, 90), "alias_found": True, "modules": 1, "names": 1}}]
rows = startup.rows_of(imports, ["import"]) + startup.rows_of(installs, ["install", "load"])
{change}
print(startup.check_limits(rows, imports, installs)["ok"])
"""
    done = run("-c", code)
    assert done.stdout == f"{ok}\n", done.stderr
