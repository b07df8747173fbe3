"""The groups of torchft bypass, and work while the others are offloaded."""

from __future__ import annotations

from typing import Any

import pytest
from torchft_job import alongside
from worlds import unbound_only

from reloadpg.testing import run_ranks

pytestmark = unbound_only  # torch asks the group for the device that the world is bound to


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="sequence"),
        pytest.param(True, id="torchft", marks=[pytest.mark.frameworks, pytest.mark.timeout(600)]),
    ],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Two replicas, with the calling sequence of torchft's source, and with torchft itself."""
    return run_ranks(alongside, 2, args=(request.param,), timeout=400)


def test_a_registered_group_is_the_object_of_torchft(ranks: list[dict[str, Any]]) -> None:
    """``register()`` works under ``install``, functional collectives find the group."""
    for rank in ranks:
        assert rank["same"]
        assert rank["functional"] == 2
        assert rank["afterwards"] == []
        assert rank["last"] == 2


def test_a_group_of_torchft_works_while_the_others_are_offloaded(
    ranks: list[dict[str, Any]],
) -> None:
    """Also after a new quorum has configured it again."""
    for rank in ranks:
        assert rank["live"] == rank["reloaded"] == (2, 2)
        assert rank["offloaded"] == rank["configured"] == ("GroupOffloadedError", 2)


def test_status_gives_the_reason_why_a_group_of_torchft_bypasses(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        reason = "1 rank, fewer than min_size=2"
        assert rank["bypassed"] == [("torchft-gloo:replicas", reason)]
        assert rank["unmanaged"] == {}
        if "managed" in rank:  # the real package's
            descs = ["torchft-gloo:replicas", "torchft-gloo:managed"]
            assert rank["managed"] == (2, 7, descs)
