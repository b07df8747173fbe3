"""Starts programs under real launchers, with or without ``RELOADPG_AUTOINSTALL``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import reloadpg

HELPERS = Path(__file__).parent
HERE = HELPERS.parent / "frameworks"
ROOT = Path(reloadpg.__file__).parents[1]

TIMEOUT_S = 280


def missing(*tools: str) -> str:
    """The reason to skip a test, which names missing tools; empty if all are installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [tool for tool in tools if shutil.which(tool, path=path) is None]
    return f"launcher not installed: {', '.join(absent)}" if absent else ""


NO_SLURM = missing("srun", "slurmctld", "slurmd", "munged", "ip", "unshare") or (
    "SLURM needs root to be started by the test" if os.getuid() else ""
)
"""The reason why no SLURM cluster can be started here; empty if one can."""


def clean_environment() -> dict[str, str]:
    prefixes = ("SLURM", "OMPI_", "PMI", "MV2_", "JSM_", "PET_", "TORCHELASTIC", "RELOADPG_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) and name not in (*names, "GROUP_RANK", "GROUP_WORLD_SIZE")
    }
    sbin = os.pathsep.join([kept.get("PATH", "/usr/bin"), "/usr/sbin", "/sbin"])
    return {
        **kept,
        "PATH": sbin,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def launch(*command: str) -> str:
    """Run a launcher with a timeout; kill its process group at the end."""
    process = subprocess.Popen(
        command,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output[-4000:]
    return output


def distribution(site: Path) -> Path:
    """Write metadata with reloadpg's entry point, which hide those of the installed package."""
    info = site / "reloadpg-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reloadpg\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nreloadpg = _reloadpg_activation:activate\n"
    )
    return site


def activation(folder: Path, backends: str = "gloo") -> dict[str, str]:
    """Return variables that install reloadpg in every process, however it was installed here."""
    site = distribution(folder / "site")
    return {
        "RELOADPG_AUTOINSTALL": "1",
        "RELOADPG_BACKENDS": backends,
        "RELOADPG_TIMEOUT_S": "60",
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, HELPERS.parent, HERE))),
    }


def torchrun(ranks: int, *program: object, **variables: str) -> str:
    """Run torchrun on 127.0.0.1; return its output."""
    return launch(
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *map(str, program),
    )


def ranks_of(folder: Path, label: str) -> list[Any]:
    """Read the files `label.RANK.json` of the ranks of a job, in rank order."""
    found = sorted(folder.glob(f"{label}.*.json"), key=lambda path: int(path.suffixes[0][1:]))
    return [json.loads(path.read_text()) for path in found]


DEEPSPEED = {
    # One ninja for its build and for the ranks: another one builds all of it again.
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "DS_ACCELERATOR": "cpu",
}


def build_deepspeed() -> None:
    """Build what DeepSpeed compiles at its first use on a CPU: ranks would not wait that long."""
    code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    environment = {**os.environ, **DEEPSPEED}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=800)
