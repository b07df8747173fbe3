"""The debug modes of torch and of Python, and a job in each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from launching import ROOT, clean_environment

HELPERS = Path(__file__).parent
LIMIT_S = 200

MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "DETAIL": ((), {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    "INFO": ((), {"TORCH_DISTRIBUTED_DEBUG": "INFO"}),
    "stack traces of C++": ((), {"TORCH_SHOW_CPP_STACKTRACES": "1"}),
    "all logs": ((), {"TORCH_LOGS": "+all", "TORCH_CPP_LOG_LEVEL": "INFO"}),
    "dev mode": (("-X", "dev"), {}),
    "optimized": (("-O",), {}),
    # Torch and its dependencies warn when they are imported.
    "warnings are errors": (("-W", "error:::reloadpg"), {}),
    "faulthandler": ((), {"PYTHONFAULTHANDLER": "1"}),
    "flight recorder": (
        (),
        {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"},
    ),
    "desync debug": ((), {"TORCH_NCCL_DESYNC_DEBUG": "1"}),
    "blocking launches": ((), {"CUDA_LAUNCH_BLOCKING": "1"}),
    "blocking wait": ((), {"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    "a trace function": ((), {"DEBUG_JOB": "trace"}),
}
"""Arguments of the interpreter, and the environment, of each mode."""


def run_mode(mode: str, backend: str, env: Mapping[str, str] | None = None) -> None:
    """Run ``debug_job`` on two ranks in a mode."""
    flags, variables = MODES[mode]
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
    )
    command = [sys.executable, *flags, str(HELPERS / "debug_job.py"), backend]
    ranks = [
        subprocess.Popen(
            [*command, *variables.get("DEBUG_JOB", "").split()],
            env={
                **clean_environment(),
                **variables,
                **(env or {}),
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS)]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(server.port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        ended = rank.returncode == 0 and "complete\n" in output
        assert ended, f"rank {number} ended with {rank.returncode}:\n{output[-8000:]}"
