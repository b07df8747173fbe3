"""Runs an unmodified training script, and offloads and reloads all groups between its steps.

Usage: ``python cycling.py DIRECTORY SCRIPT ARGUMENT...``. It installs the library. A cycle runs in
a hook after each optimizer step, when no collective is in flight. The result is written to
``DIRECTORY/cycles.RANK.json``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import reloadpg


def observed() -> dict[str, Any]:
    """The error of a collective on the default group, and the states of all groups."""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        refused = type(error).__name__
    else:
        refused = ""
    groups = reloadpg.status().groups
    return {"refused": refused, "states": sorted({group.state for group in groups})}


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    cycles: list[dict[str, Any]] = []

    def cycle(*_: Any) -> None:
        with reloadpg.offloaded() as report:
            seen = observed()
        status = reloadpg.status()
        after = {"released": len(report.groups), "generation": status.generation}
        cycles.append({**seen, **after, "state": status.state})

    reloadpg.install(backends={"gloo"}, timeout=60)
    register_optimizer_step_post_hook(cycle)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    (Path(folder) / f"cycles.{os.environ['RANK']}.json").write_text(json.dumps(cycles))


if __name__ == "__main__":
    main()
