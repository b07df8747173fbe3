"""Callbacks that users register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import reloadpg


@pytest.mark.parametrize("where", ["on_offload", "on_reload", "on_report"])
@pytest.mark.parametrize("callback", [None, 3, "a name"])
def test_what_cannot_be_called_is_refused_at_once(where: str, callback: Any) -> None:
    """Not at each offload from then on, on all ranks."""
    register: Callable[[Any], object] = getattr(reloadpg, where)
    with pytest.raises(reloadpg.InvalidOptionError, match=f"{where}.*nothing was registered"):
        register(callback)
