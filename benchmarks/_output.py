"""What the benchmarks share: their options, the description of the machine, and the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import reloadpg


def command_line(description: str | None, *, check: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; the first line of the description is shown."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="a short run, without valid figures")
    if check:
        parser.add_argument("--check", action="store_true", help="exit code 1 over a limit")
    return parser


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write the figures, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def installed(**options: Any) -> Iterator[None]:
    """Install reloadpg for a block of code."""
    reloadpg.install(**options)
    try:
        yield
    finally:
        reloadpg.uninstall()


def machine() -> dict[str, Any]:
    """Versions, cores, and the load average of the last minute: others' work shows in figures."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }
