"""Scripts of accelerate and Lightning Fabric that do not use reloadpg, under torchrun.

Both are in the ``test`` extra; without them these tests fail, they are not skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launching import HERE, activation, ranks_of, torchrun


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_accelerate", "with_fabric"])
def test_a_script_trains_to_the_same_bits_with_three_cycles_around_it(
    name: str, tmp_path: Path
) -> None:
    """The loss of every rank in every step, and the weights at the end. (JSON keeps a float
    exactly.) In each cycle the groups are released, refuse a collective, and are live again.
    """
    script, plain, cycled = HERE / "scripts" / f"{name}.py", tmp_path / "plain", tmp_path / "cycled"
    plain.mkdir()
    cycled.mkdir()
    torchrun(2, script, plain)
    torchrun(2, HERE / "cycling.py", cycled, script, cycled, **activation(cycled))
    ranks = ranks_of(plain, "training")
    assert ranks_of(cycled, "training") == ranks
    # So that the comparison proves something: the losses differ and fall, the weights are equal.
    assert [rank["world size"] for rank in ranks] == [2, 2]
    losses = ranks[0]["losses"]
    assert len(losses) == 16
    assert all(len(step) == 2 and step[0] != step[1] for step in losses)
    assert sum(losses[-1]) < sum(losses[0])
    assert ranks[0]["weights"] == ranks[1]["weights"]
    around = ranks_of(cycled, "cycles")
    assert [(rank["installed"], rank["steps"]) for rank in around] == [(True, 8)] * 2
    for rank in around:
        assert [cycle["generation"] for cycle in rank["cycles"]] == [1, 2, 3]
        for cycle in rank["cycles"]:
            assert cycle["released"] >= 1
            assert (cycle["refused"], cycle["states"]) == ("GroupOffloadedError", ["live"])
