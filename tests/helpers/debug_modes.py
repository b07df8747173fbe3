"""The debug modes of torch and of Python, and a job in each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from helpers.launching import ROOT, clean_environment

HELPERS = Path(__file__).parent
LIMIT_S = 400

MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "DETAIL": ((), {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    "INFO": ((), {"TORCH_DISTRIBUTED_DEBUG": "INFO"}),
    "stack traces of C++": ((), {"TORCH_SHOW_CPP_STACKTRACES": "1"}),
    "all logs": ((), {"TORCH_LOGS": "+all", "TORCH_CPP_LOG_LEVEL": "INFO"}),
    "dev mode": (("-X", "dev"), {}),
    "optimized": (("-O",), {}),
    "warnings are errors": ((), {"DEBUG_JOB": "errors"}),
    "faulthandler": ((), {"PYTHONFAULTHANDLER": "1"}),
    "flight recorder": (
        (),
        {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"},
    ),
    "desync debug": ((), {"TORCH_NCCL_DESYNC_DEBUG": "1"}),
    "blocking launches": ((), {"CUDA_LAUNCH_BLOCKING": "1"}),
    "blocking wait": ((), {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    "a trace function": ((), {"DEBUG_JOB": "trace"}),
    "coverage": (("-m", "coverage", "run", "-p"), {}),
}
"""Arguments of the interpreter, and the environment, of each mode."""


def run_mode(mode: str, backend: str, env: Mapping[str, str] | None = None) -> None:
    """Run ``debug_job`` on two ranks in a mode."""
    flags, variables = MODES[mode]
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
    )
    command = [sys.executable, *flags, str(HELPERS / "debug_job.py"), backend]
    with tempfile.TemporaryDirectory() as folder:  # for what coverage and torch's recorder write
        ranks = _started(command, folder, server.port, {**variables, **(env or {})})
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            outputs = [Path(folder, f"output.{number}").read_text() for number in range(2)]
            shown = "\n".join(f"rank {n}:\n{text[-8000:]}" for n, text in enumerate(outputs))
            assert all("complete: " in text for text in outputs), shown
    assert codes == [0, 0], shown


def _started(
    command: list[str], folder: str, port: int, variables: Mapping[str, str]
) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            [*command, *variables.get("DEBUG_JOB", "").split()],
            env={
                **clean_environment(),
                **variables,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS.parent)]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            # Not a pipe: it would fill with the logs of one rank while another is waited for.
            stdout=Path(folder, f"output.{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
