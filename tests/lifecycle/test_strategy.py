"""The strategy of a job."""

from __future__ import annotations

from typing import Any

import pytest

import reloadpg
from reloadpg.errors import InvalidOptionError


@pytest.mark.parametrize("strategy", ["wishful", "auto", ["recreate"], {"recreate": "*"}, ""])
def test_an_unknown_strategy_is_refused(strategy: Any) -> None:
    """The message names both."""
    with pytest.raises(InvalidOptionError, match=r"'recreate', or 'suspend', which recreates"):
        reloadpg.install(strategy=strategy)
    assert not reloadpg.is_installed()
