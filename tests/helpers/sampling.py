"""Parameters of which the default run uses a sample, and the slow run the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(values: Iterable[Any], *default: Any) -> list[Any]:
    """Return the values as parameters; all but the default ones are marked as slow."""
    values = list(values)
    assert all(one in values for one in default), "the sample is not a subset of the values"
    return [one if one in default else pytest.param(one, marks=pytest.mark.slow) for one in values]
