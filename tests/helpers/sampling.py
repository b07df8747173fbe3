"""Parameters of which the default run takes a few, and the slow run the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(values: Iterable[Any], *default: Any) -> list[Any]:
    """Return the values as parameters; all but the default ones are marked as slow."""
    values = list(values)
    assert all(one in values for one in default), "a sample that is not among the values"
    return [one if one in default else pytest.param(one, marks=pytest.mark.slow) for one in values]
