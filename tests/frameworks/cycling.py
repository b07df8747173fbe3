"""Runs an unmodified training script, and offloads and reloads all groups between its steps.

Usage: ``python cycling.py DIRECTORY [--every-step] SCRIPT ARGUMENT...``. It installs the library,
unless ``RELOADPG_AUTOINSTALL`` has. The cycles run in a hook after optimizer steps, when no
collective is in flight. The result is written to ``DIRECTORY/cycles.RANK.json``.
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

AFTER_STEPS = (2, 4, 5)


class Cycles:
    """A hook that counts optimizer steps, and runs a cycle after three of them, or after each."""

    def __init__(self, every: bool) -> None:
        self.every = every
        self.steps = 0
        self.seen: list[dict[str, Any]] = []

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if not self.every and self.steps not in AFTER_STEPS:
            return
        with reloadpg.offloaded() as report:
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                refused = type(error).__name__
            else:
                refused = ""
        status = reloadpg.status()
        self.seen.append(
            {
                "released": len(report.groups),
                "refused": refused,
                "generation": status.generation,
                "states": sorted({group.state for group in status.groups}),
            }
        )


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    every = script == "--every-step"
    if every:
        script, *arguments = arguments
    cycles = Cycles(every)
    if not reloadpg.is_installed():
        reloadpg.install(backends={"gloo"}, timeout=60)
    register_optimizer_step_post_hook(cycles)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    left = {"installed": reloadpg.is_installed(), "steps": cycles.steps, "cycles": cycles.seen}
    (Path(folder) / f"cycles.{os.environ['RANK']}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
