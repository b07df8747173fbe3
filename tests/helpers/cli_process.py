"""The command line as its users start it: a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import reloadpg

LIMIT = 280  # seconds; a command takes some seconds, most of them to import torch


def environment(**variables):
    """This process's, with the source tree on the path and nothing of a job in it."""
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
    """What a command wrote to stdout as JSON; its errors if it wrote none."""
    try:
        return json.loads(process.stdout)
    except ValueError:
        raise AssertionError(f"no JSON:\n{process.stdout}\n{process.stderr}") from None
