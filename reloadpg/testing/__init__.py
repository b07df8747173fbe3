"""Test tools: run a function as the ranks of a job (``run_ranks``), a simulated accelerator
(``reloadpg.testing.simulated``), and stand-ins for CUDA and NCCL (``reloadpg.testing.standins``).

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reloadpg.testing import simulated, standins
    from reloadpg.testing.ranks import RankOutcome, RanksFailedError, run_ranks

__all__ = ["RankOutcome", "RanksFailedError", "run_ranks", "simulated", "standins"]


def __getattr__(name: str) -> Any:
    if name in ("simulated", "standins"):
        return importlib.import_module(f"reloadpg.testing.{name}")
    if name in __all__:
        return getattr(importlib.import_module("reloadpg.testing.ranks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
