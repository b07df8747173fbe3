"""torchrun and srun, real: one script under each, through three cycles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ENVIRONMENT_TESTS, HERE, NO_SLURM, launch, ranks_of, torchrun

pytestmark = pytest.mark.slow

SCRIPT = HERE / "scripts" / "with_reloadpg.py"


def check(folder: Path, launcher: str, generation: int) -> list[dict[str, Any]]:
    """The facts of a run are as they should be; its results."""
    facts = {"launcher": launcher, "world size": 2, "generation": generation}
    assert ranks_of(folder, "facts") == [facts] * 2
    results: list[dict[str, Any]] = ranks_of(folder, "training")
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["sums"] for result in results] == [[3.0] * 8] * 2
    return results


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of a run without a cycle."""
    folder = tmp_path_factory.mktemp("without")
    torchrun(2, SCRIPT, folder, 0)
    return check(folder, "torchrun", 0)


def test_training_under_torchrun_is_bit_equal_with_three_cycles(
    without: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Losses and weights equal those of the run without cycles."""
    torchrun(2, SCRIPT, tmp_path, 3)
    assert check(tmp_path, "torchrun", 3) == without


@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_training_under_srun_is_bit_equal_with_three_cycles(
    without: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The same script in a step of a real SLURM."""
    results = tmp_path / "results"
    launch(
        *("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"),
        *("sh", str(ENVIRONMENT_TESTS / "slurm_cluster.sh"), str(tmp_path)),
        f"srun -n 2 '{sys.executable}' '{SCRIPT}' '{results}' 3",
    )
    assert check(results, "slurm", 3) == without
