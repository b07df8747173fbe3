"""What the benchmarks share: where they ran, and where their figures go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reloadpg.cli.bench import machine

__all__ = ["machine", "write_json"]


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write the figures, if a path was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
