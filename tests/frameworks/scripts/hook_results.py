"""Writes the results of a script ``tests/frameworks/scripts/hook_*.py`` for its test.

``python hook_NAME.py DIRECTORY`` trains; with ``hook`` as a second argument it uses the hook.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks.cycling import observed

import reloadpg

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
HOOK = "hook" in sys.argv[2:]
STEPS = 8
EVERY = 2

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
"""The sizes of a small ``LlamaConfig``."""

_seen: list[dict[str, Any]] = []


def phase(*_: Any, **__: Any) -> None:
    """Record the states of the groups during a rollout, and the error of a collective."""
    _seen.append(observed())


def leave(package: str, version: str, losses: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Write this rank's losses and weights, and the state of its groups."""
    rank = dist.get_rank()
    weights = [parameter.detach().double().flatten().tolist() for parameter in parameters]
    training = {"ranks": dist.get_world_size(), "losses": losses, "weights": weights}
    (FOLDER / f"training.{rank}.json").write_text(json.dumps(training))
    status = reloadpg.status()
    facts = {
        "package": package,
        "version": version,
        "installed": reloadpg.is_installed(),
        "state": status.state,
        "generation": status.generation,
        "reloadable": len(status.groups),
        "bypassed": len(status.bypassed_groups),
        "cycles": _seen,
    }
    (FOLDER / f"facts.{rank}.json").write_text(json.dumps(facts))
