"""megatron-core trains a small GPT, tensor 2 x pipeline 2, through its own schedule and cycles.

megatron-core is in the ``test`` extra; without it these tests fail, they are not skipped. What of
CUDA is answered by the CPU, and that nothing else is, is written in ``gpt_job``.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpt_job import PRELOAD, STEPS, plain_and_cycled

from reloadpg.testing import run_ranks

pytestmark = pytest.mark.slow

RESULTS = ("losses", "norms", "weights")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Four ranks; each trains without reloadpg, then with it."""
    return run_ranks(plain_and_cycled, 4, timeout=200, preload=PRELOAD)


def test_training_with_cycles_is_bit_equal_to_training_without(ranks: list[dict[str, Any]]) -> None:
    """Losses, gradient norms and weights of every rank, dropout and tied embedding included."""
    for rank in ranks:
        assert {name: rank["cycled"][name] for name in RESULTS} == {
            name: rank["plain"][name] for name in RESULTS
        }


def test_megatron_used_its_own_pipeline(ranks: list[dict[str, Any]]) -> None:
    """The 1F1B schedule ran, the losses on the last stage fall, and tensor-parallel ranks agree on
    them with different weights: so the comparison proves something."""
    for rank in ranks:
        assert rank["plain"]["schedule"] == "forward_backward_pipelining_without_interleaving"
    first, last = ranks[0]["plain"], ranks[2]["plain"]
    assert first["losses"] == [[]] * STEPS
    assert [len(losses) for losses in last["losses"]] == [4] * STEPS
    assert sum(last["losses"][-1]) < sum(last["losses"][0])
    assert last["losses"] == ranks[3]["plain"]["losses"]
    assert first["weights"] != ranks[1]["plain"]["weights"]
    assert len({rank["plain"]["norms"][0] for rank in ranks}) == 1
    tied = "embedding.word_embeddings.weight", "output_layer.weight"
    assert first["weights"][tied[0]] == last["weights"][tied[1]]


def test_every_group_of_megatron_is_offloaded_and_reloaded_three_times(
    ranks: list[dict[str, Any]],
) -> None:
    """WORLD too. In the first run the groups are those of torch."""
    for rank in ranks:
        assert set(rank["plain"]["groups"].values()) == {(False, 2)}
        assert set(rank["cycled"]["groups"].values()) == {(True, 2)}
        assert [cycle["generation"] for cycle in rank["cycles"]] == [1, 2, 3]
        for cycle in rank["cycles"]:
            assert cycle["released"] >= 8
            assert cycle["states"] == ["live", "offloaded"]
