"""Starts programs under real launchers, with reloadpg switched on from outside or not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import reloadpg

HELPERS = Path(__file__).parent
HERE = HELPERS.parent / "frameworks"
ROOT = Path(reloadpg.__file__).parents[1]
ENVIRONMENT_TESTS = HERE.parent / "environment"

sys.path.insert(0, str(ENVIRONMENT_TESTS))
from test_launchers import launch  # noqa: E402  # what starts and ends launchers there

__all__ = ["HELPERS", "HERE", "activation", "launch", "ranks_of", "torchrun"]


def activation(folder: Path, backends: str = "gloo") -> dict[str, str]:
    """Variables that install reloadpg in every process, without a line in its program.

    The entry point is that of a distribution in `folder`, which hides the installed one: nothing
    here depends on how the package was installed.
    """
    info = folder / "site" / "reloadpg-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reloadpg\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nreloadpg = _reloadpg_activation:activate\n"
    )
    return {
        "RELOADPG_AUTOINSTALL": "1",
        "RELOADPG_BACKENDS": backends,
        "RELOADPG_TIMEOUT_S": "60",
        "PYTHONPATH": os.pathsep.join(map(str, (info.parent, ROOT, HELPERS))),
    }


def torchrun(ranks: int, *program: object, **variables: str) -> str:
    """torchrun as a user starts it, on 127.0.0.1; returns what was printed."""
    return launch(
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *map(str, program),
    )


def ranks_of(folder: Path, label: str) -> list[Any]:
    """What the ranks of a job left as `label.RANK.json`, in rank order."""
    found = sorted(folder.glob(f"{label}.*.json"), key=lambda path: int(path.suffixes[0][1:]))
    return [json.loads(path.read_text()) for path in found]
