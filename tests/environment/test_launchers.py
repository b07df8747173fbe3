"""Bring-up and three cycles under real launchers: torchrun, srun, mpirun, a bare python."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import NO_SLURM, launch, missing, torchrun

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
REPORT = str(HERE / "rank_report.py")
EXAMPLE = str(HERE.parents[1] / "examples" / "bring_up.py")


def reports(folder: Path, label: str = "job") -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob(f"{label}.*.json")]
    return sorted(found, key=lambda report: report["rank"])


def check(found: list[dict[str, Any]], source: str, world_size: int) -> None:
    assert [report["rank"] for report in found] == list(range(world_size))
    for rank, report in enumerate(found):
        assert report["source"] == source
        assert report["local_rank"] == rank
        assert report["world_size"] == report["local_world_size"] == world_size
        assert (report["node_rank"], report["num_nodes"]) == (0, 1)
        assert report["early"] == [rank, rank == 0]
        assert report["torch_free"]
        assert report["group"] == [rank, world_size]
        assert report["sums"] == [sum(range(world_size))] * 4
        assert report["generation"] == 3


ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--num_processes", "1", "--cpu"),
]


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable],
        [*(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")],
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
        ACCELERATE,
    ],
    ids=["python", "torchrun", "mpirun", "accelerate"],
)
def test_the_example_of_the_page_runs_under_each_launcher(launcher: list[str]) -> None:
    """As it is; ``srun`` is in the test of a cluster."""
    if launcher[0] == "mpirun" and OPENMPI:
        pytest.skip(OPENMPI)
    check_example(launch(*launcher, EXAMPLE), 2 if {"-n", "--nproc-per-node"} & {*launcher} else 1)


def check_example(said: str, size: int) -> None:
    """Each rank has printed the sum over all."""
    for rank in range(size):
        assert f"rank {rank} of {size} (" in said
    assert said.count(f" on cpu: {size}") == size


def test_ranks_of_torchrun_meet_on_the_store_of_its_agent(tmp_path: Path) -> None:
    torchrun(4, REPORT, tmp_path)
    check(reports(tmp_path), "torchrun", 4)


OPENMPI = missing("mpirun", "ompi_info")


@pytest.mark.skipif(bool(OPENMPI), reason=OPENMPI)
def test_ranks_of_mpirun_on_one_host_meet_on_the_loopback_interface(tmp_path: Path) -> None:
    """OpenMPI gives no address."""
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    launch(*("mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, REPORT, str(tmp_path)))
    found = reports(tmp_path)
    check(found, "openmpi", 2)
    assert {report["master_addr"] for report in found} == {"127.0.0.1"}


slurm = pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)

STEPS = """
set -e
PYTHON="{python}"; REPORT="{report}"
mkdir step shell steps
srun -n 2 "$PYTHON" "$REPORT" "$PWD/step"
srun -n 2 "$PYTHON" "{example}" >example.out 2>&1
salloc -Q -n 8 sh -c '"'$PYTHON'" "'$REPORT'" shell; {two_steps}'
"""
TWO_STEPS = (
    'srun --exact -n 2 "\'$PYTHON\'" "\'$REPORT\'" "$PWD/steps" A B & first=$!; '
    'srun --exact -n 2 "\'$PYTHON\'" "\'$REPORT\'" "$PWD/steps" B A && wait $first'
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All SLURM runs, in one cluster: starting it costs more than the runs."""
    folder = tmp_path_factory.mktemp("slurm")
    steps = STEPS.format(python=sys.executable, report=REPORT, example=EXAMPLE, two_steps=TWO_STEPS)
    launch(
        *("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"),
        *("sh", str(HERE / "slurm_cluster.sh"), str(folder), steps),
    )
    return folder


@slurm
def test_each_task_of_srun_finds_rank_host_and_port(cluster: Path) -> None:
    """The example of the page runs there, too."""
    check_example((cluster / "example.out").read_text(), 2)
    found = reports(cluster / "step")
    check(found, "slurm", 2)
    assert {report["master_addr"] for report in found} == {"localhost"}
    assert len({report["master_port"] for report in found}) == 1
    assert 15000 <= found[0]["master_port"] <= 30000


@slurm
def test_the_shell_of_an_allocation_is_one_process(cluster: Path) -> None:
    """Under salloc, outside any step: rank 0 of 1 and not of 8."""
    found = reports(cluster / "shell")
    assert [(r["rank"], r["world_size"], r["sums"]) for r in found] == [(0, 1, [0.0] * 4)]
    assert found[0]["source"] in ("single", "slurm")


@slurm
def test_two_steps_of_one_job_run_at_the_same_time_on_different_ports(cluster: Path) -> None:
    """Neither sees the ranks of the other."""
    first, second = reports(cluster / "steps", "A"), reports(cluster / "steps", "B")
    check(first, "slurm", 2)
    check(second, "slurm", 2)
    ports = {report["master_port"] for report in first}, {r["master_port"] for r in second}
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]
