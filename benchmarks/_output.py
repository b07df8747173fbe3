"""What the benchmarks share: where they ran, and where their figures go."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Versions, cores, and the load average of the last minute: others' work shows in figures."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write the figures, if a path was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
