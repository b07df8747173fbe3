"""The command line in a separate process."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import reloadpg
from reloadpg.cli import main
from reloadpg.testing import run_ranks

LIMIT = 280  # seconds; a command takes some seconds, most of them to import torch


def environment(**variables):
    """This process's environment with the source tree on the path and without a job."""
    root = Path(reloadpg.__file__).parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "RELOADPG_"))}
    return {**kept, "PYTHONPATH": path, **variables}


def command(*arguments, cwd=None, path="", **variables):
    """Run ``python -m reloadpg`` to its end."""
    env = environment(**variables)
    if path:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "reloadpg", *map(str, arguments)],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def decoded(process):
    """Parse the JSON that a command wrote to stdout; raise with its output if there is none."""
    try:
        return json.loads(process.stdout)
    except ValueError:
        raise AssertionError(f"no JSON:\n{process.stdout}\n{process.stderr}") from None


def _called(
    rank: int, world_size: int, arguments: tuple[str, ...], until: Path | None, cwd: Path | None
) -> tuple[int, str]:
    with ExitStack() as stack:
        output = stack.enter_context(redirect_stdout(StringIO()))
        if until is not None:
            clock = SimpleNamespace(monotonic=lambda: LIMIT * until.exists(), sleep=time.sleep)
            stack.enter_context(mock.patch("reloadpg.cli.explain.time", clock))
        if cwd is not None:
            os.chdir(cwd)
            sys.path.insert(0, str(cwd))
        code = main(list(arguments))
    return code, output.getvalue()


def called(
    *arguments: object, until: Path | None = None, cwd: Path | None = None, **env: str
) -> tuple[int, str]:
    """Run a command in a forked process that has torch imported; return its exit code and output.

    Commands that fork need this: a child of a process with many threads sometimes crashes.

    Args:
        arguments: of the command.
        until: for ``explain``: the script reaches its time limit once this file exists.
        cwd: the working directory, from which modules can be imported.
        env: environment variables.
    """
    args = (tuple(map(str, arguments)), until, cwd)
    result: tuple[int, str] = run_ranks(_called, 1, args=args, env=env, timeout=LIMIT)[0]
    return result
