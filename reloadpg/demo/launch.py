"""Starts the ranks of one run with torch's own elastic launcher, and ends them all."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..lifecycle.autoinstall import SWITCH
from . import job
from .parallel import megatron_version
from .settings import Settings

__all__ = ["RanksFailedError", "launch"]

ENTRYPOINT: Callable[[Settings], dict[str, Any] | None] = job.main
"""What each rank runs."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the ranks share this machine's cores
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is not deterministic without it
    "PYTHONWARNINGS": "ignore",
    # Torch asks DNS for the name of 127.0.0.1 at each connection to its store. A query that was
    # lost, one in a hundred on one machine, then held all ranks up for 5 s.
    "RES_OPTIONS": "timeout:1",
}


class RanksFailedError(RuntimeError):
    """A rank failed; the message is its error."""


def launch(settings: Settings) -> list[dict[str, Any]]:
    """Run the job on fresh ranks and return what each saw, in rank order. Blocking.

    Ctrl-C ends all ranks and raises torch's SignalException or KeyboardInterrupt.

    Raises:
        RanksFailedError: a rank failed; all others have been ended.
    """
    preloaded = [job.__name__, *(["megatron.core.parallel_state"] if megatron_version() else [])]
    multiprocessing.set_forkserver_preload(preloaded)
    with tempfile.TemporaryDirectory(prefix="reloadpg-demo-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # the port is known once the store listens
            local_addr="127.0.0.1",
            max_restarts=0,
            # Forked ranks start in 0.1 s instead of 5; a process that has used CUDA cannot fork.
            start_method="spawn" if settings.accelerator == "cuda" else "forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(logs, "log"), redirects=Std.ERR),
        )
        with (
            _environment(ENVIRONMENT),
            _quiet("torch.distributed.elastic", "torch.multiprocessing"),
        ):
            try:
                seen: dict[int, dict[str, Any]] = elastic_launch(config, ENTRYPOINT)(settings)
            except ChildFailedError as error:
                raise RanksFailedError(_first_error(error, Path(logs))) from None
    return [seen[rank] for rank in range(settings.ranks)]


def _first_error(error: ChildFailedError, logs: Path) -> str:
    """The error of the rank that failed first, with what it wrote if it left no traceback."""
    reported = min(error.failures)
    exit_code = error.failures[reported].exitcode
    # The launcher reports the one rank that it looks at first, which may have only lost its peer.
    # Every rank that raised has left a file; one that was killed leaves none, and its peers fail
    # because of it.
    left = {int(file.parent.name): file for file in logs.glob("log/**/error.json")}
    files = {rank: file for rank, file in left.items() if file.stat().st_size}
    if reported not in files:
        written = sorted(logs.glob(f"log/**/{reported}/stderr.log"))
        output = written[-1].read_text()[-4000:] if written else ""
        message = f"{error.failures[reported].message}\n{output}"
        return f"rank {reported} failed (exit code {exit_code}):\n{message}".rstrip()
    first = min(files, key=lambda rank: files[rank].stat().st_mtime_ns)
    message = json.loads(files[first].read_text())["message"]
    if isinstance(message, Mapping):
        message = message["extraInfo"].get("py_callstack") or message["message"]
    return f"rank {first} failed (exit code {exit_code}):\n{message}".rstrip()


@contextmanager
def _quiet(*packages: str) -> Iterator[None]:
    """Without the launcher's own log of how it ends ranks: the demo says it in one message."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    levels = {one: one.level for one in loggers if one.name.startswith(packages)}
    for one in levels:
        one.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for one, level in levels.items():
            one.setLevel(level)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the ranks, which inherit this process's; those set already stay.

    Less the switch that installs reloadpg: a rank does so with options of its own, or not at all.
    """
    added = {name: value for name, value in variables.items() if name not in os.environ}
    switch = os.environ.pop(SWITCH, None)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        if switch is not None:
            os.environ[SWITCH] = switch
