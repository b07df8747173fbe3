"""Torch's and Python's debug modes change nothing: see ``debug_job``."""

from __future__ import annotations

import pytest
from debug_modes import MODES, run_mode


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(name, marks=[pytest.mark.matrix] * (name == "DETAIL")) for name in MODES]
)
def test_a_debug_mode_changes_nothing(mode: str) -> None:
    """Values, two cycles and a recovery of a gloo job."""
    run_mode(mode, "gloo")
