"""``explain``: runs the script's rank in a process of its own, and reads what it created."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Run", "run_script"]

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "LSB_", "JSM_", "TORCHELASTIC_")
_NODE = 8
"""Ranks a node, as most machines with GPUs have them."""
_OUTPUT = 4000
_START_LIMIT_S = 120.0
"""Until torch is imported, which can take long from a network file system."""


@dataclass
class Run:
    """What came of a script.

    Attributes:
        groups: the groups that the rank is a member of, as the child noted them, in order.
        others: number of creations that the rank was no member of.
        policy: what the script gave ``install`` (``backends``, ``min_size``, ``world``); None if
            it never called it.
        error: why the script ended early; empty if it did not.
        trace: its traceback.
        output: the end of what it wrote.
        timed_out: whether it was ended at the time limit.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    others: int = 0
    policy: Mapping[str, Any] | None = None
    error: str = ""
    trace: str = ""
    output: str = ""
    timed_out: bool = False


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    module: bool,
    rank: int,
    world_size: int,
    device: str,
    timeout: float,
    progress: Callable[[int], None],
) -> Run:
    """Run a script as one rank of a job of fake ranks. Blocking, bounded.

    No process of it is left when the call returns or raises.

    Args:
        script: a path, or with ``module`` the name of a module.
        arguments: its arguments.
        module: whether ``script`` names a module.
        rank: the rank to play.
        world_size: number of ranks of the job.
        device: the accelerator that the job runs on, for groups that name no backend.
        timeout: seconds from the start of the script until it is ended.
        progress: is told the number of creations so far.
    """
    with tempfile.TemporaryDirectory(prefix="reloadpg-explain-") as directory:
        record, output = Path(directory, "created.jsonl"), Path(directory, "output")
        record.touch()
        settings = {
            "script": script,
            "arguments": list(arguments),
            "module": module,
            "rank": rank,
            "world_size": world_size,
            "device": device,
            "record": str(record),
            "parent": os.getpid(),
        }
        command = [sys.executable, "-m", f"{__package__}._explain_child", json.dumps(settings)]
        with output.open("wb") as writer:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.STDOUT,
                env=_environment(rank, world_size),
                start_new_session=True,
            )
            try:
                ended = _wait(child, timeout, record, progress)
            finally:
                _end(child)
        run = _read(record)
        run.output = output.read_bytes()[-_OUTPUT:].decode(errors="replace")
        run.timed_out = not ended
        kinds = {one["kind"] for one in _records(record)}
        if ended and not run.error and "end" not in kinds:
            what = "the script ended its process" if "begin" in kinds else "it was not started"
            run.error = f"{what} (exit code {child.returncode})"
        return run


def _environment(rank: int, world_size: int) -> dict[str, str]:
    """Variables as torchrun sets them; those of the launcher that started us are left out."""
    local = min(world_size, _NODE)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    variables.pop("TORCH_DIST_INIT_BARRIER", None)  # there is nobody to meet
    package = str(Path(__file__).parents[2])
    paths = [package, variables.get("PYTHONPATH", "")]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(-(-world_size // local)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _wait(
    child: subprocess.Popen[bytes], timeout: float, record: Path, progress: Callable[[int], None]
) -> bool:
    """Whether the child ended in time, counted from the start of the script in it."""
    seen = 0
    deadline = time.monotonic() + _START_LIMIT_S
    with record.open("rb") as reader:
        while (left := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=min(0.1, left))
                return True
            lines = reader.read().count(b"\n")
            if lines and not seen:
                deadline = time.monotonic() + timeout
            seen += lines
            progress(max(0, seen - 1))
    return child.poll() is not None


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _records(record: Path) -> list[dict[str, Any]]:
    found = []
    for line in record.read_text().splitlines():
        with suppress(ValueError):  # the last line of a child that was ended
            found.append(json.loads(line))
    return found


def _read(record: Path) -> Run:
    run = Run()
    for one in _records(record):
        kind = one.pop("kind")
        if kind == "group":
            run.groups.append(one)
        elif kind == "other":
            run.others += 1
        elif kind == "policy":
            run.policy = one
        elif kind == "error":
            run.error, run.trace = one["error"], one["trace"]
        elif kind == "destroyed":
            for group in run.groups:
                if group["name"] == one["name"]:
                    group["destroyed"] = True
    return run
