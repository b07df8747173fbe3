"""verl's workers offload their groups between a transfer of weights and the next training call."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from verl_job import Modes, Sequence, of_workers
from worlds import unbound_only

import reloadpg
from reloadpg.errors import InvalidOptionError
from reloadpg.integrations import verl
from reloadpg.testing import run_ranks

TRANSFERRED = ["resume weights: live", "weights: live", "resume kv_cache: offloaded"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="sequence"),
        pytest.param(
            True, id="verl", marks=[pytest.mark.frameworks, pytest.mark.timeout(600), unbound_only]
        ),
    ],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Two workers, with the calling sequence of verl's source, and with verl itself."""
    return run_ranks(of_workers, 2, args=(request.param,), timeout=400)


def test_groups_are_offloaded_after_the_weights_are_sent(ranks: list[dict[str, Any]]) -> None:
    """The KV cache gets their memory, and they stay offloaded through the generation."""
    for rank in ranks:
        during = ["profile: offloaded", "rank zero: offloaded", "after: offloaded"]
        assert rank["cases"]["generating"] == [*TRANSFERRED, *during]


def test_groups_are_reloaded_by_the_next_call_that_trains(ranks: list[dict[str, Any]]) -> None:
    """Log probabilities, a checkpoint, or another transfer, with or without a generation."""
    for rank in ranks:
        cases = rank["cases"]
        assert cases["trained"] == cases["saved"] == ["after: live"]
        assert cases["twice"] == [*TRANSFERRED, *TRANSFERRED, "after: offloaded"]


def test_a_transfer_that_fails_leaves_live_groups(ranks: list[dict[str, Any]]) -> None:
    """Its error is raised."""
    for rank in ranks:
        error = "resume kv_cache on purpose: live"
        assert rank["cases"]["failed"] == [*TRANSFERRED, error, "after: live"]


def test_an_engine_that_keeps_its_memory_offloads_without_a_kv_cache(
    ranks: list[dict[str, Any]],
) -> None:
    """One on other machines offloads nothing."""
    for rank in ranks:
        assert rank["cases"]["keeps its memory"] == ["weights: live", "after: offloaded"]
        assert rank["cases"]["elsewhere"] == ["after: live"]


def test_remove_restores_the_methods_of_the_classes_and_reloads_the_groups(
    ranks: list[dict[str, Any]],
) -> None:
    """In the middle of a rollout, too."""
    for rank in ranks:
        assert rank["restored"]
        assert rank["cycles"] == 6
        assert rank["cases"]["removed"] == ["weights: live", "after: live"]
        assert rank["cases"]["without hook"] == ["weights: live", "after: live"]


def test_older_workers_have_live_groups_after_each_generation(ranks: list[dict[str, Any]]) -> None:
    """Sharding managers too; also after a generation that raised."""
    generated = [*TRANSFERRED, "generate: offloaded"]
    slept = [*generated, "release: offloaded", "", "after: live"]
    if "older" not in ranks[0]:
        pytest.skip("verl 0.9 has neither")
    for rank in ranks:
        older = rank["older"]
        cases = older["cases"]
        assert cases["servers"] == cases["worker "] == slept
        assert cases["worker generate"] == [*generated, "generate on purpose", "after: live"]
        # While it is entered, a manager uses live groups; they are offloaded afterwards.
        entered = ["resume weights: live", "weights: live", "resume kv_cache: live"]
        left = [*entered, "generate: offloaded", "release: offloaded"]
        assert cases["manager "] == [*left, "", "after: live"]
        assert cases["manager generate"] == [*left, "generate on purpose", "after: live"]
        assert older["cycles"] == [3, 2]


def test_a_class_that_is_not_of_verl_or_was_passed_before_is_refused() -> None:
    """Nothing is changed."""
    before = dict(vars(Sequence))
    with pytest.raises(InvalidOptionError, match=r"\(SimpleNamespace\).*nothing was changed"):
        verl.offloaded_rollouts(Sequence, type("SimpleNamespace", (), {}))
    assert dict(vars(Sequence)) == before
    handle = verl.offloaded_rollouts(Modes)
    with pytest.raises(InvalidOptionError, match=r"\(Modes\): already passed"):
        verl.offloaded_rollouts(Modes)
    handle.remove()
    verl.offloaded_rollouts(Modes).remove()


def test_without_verl_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(reloadpg.ReloadpgError, match=r"needs verl 0.9.*nothing was changed"):
        verl.offloaded_rollouts()
