"""Scripts of accelerate and Lightning Fabric that do not use reloadpg, under torchrun.

Both are in the ``test`` extra; without them these tests fail, they are not skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launching import HELPERS, HERE, activation, ranks_of, torchrun

pytestmark = pytest.mark.slow

SCRIPTS = ("with_accelerate.py", "with_fabric.py")


class Runs(NamedTuple):
    """Results of the unchanged script, of the script with cycles, and of the cycles."""

    plain: list[dict[str, Any]]
    cycled: list[dict[str, Any]]
    cycles: list[dict[str, Any]]


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda name: name[5:-3])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same file twice: by torchrun alone, and by torchrun with reloadpg around it."""
    script = HERE / "scripts" / request.param
    folders = [tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("cycled")]
    torchrun(2, script, folders[0])
    cycling = (HELPERS / "cycling.py", folders[1], script, folders[1])
    torchrun(2, *cycling, **activation(folders[1]))
    return Runs(*(ranks_of(folder, "training") for folder in folders), cycles_of(folders[1]))


def cycles_of(folder: Path) -> list[dict[str, Any]]:
    return ranks_of(folder, "cycles")


def test_losses_and_weights_are_equal_to_the_last_bit(runs: Runs) -> None:
    """The loss of every rank in every step through three cycles, and the weights at the end.

    (JSON keeps a float exactly.)
    """
    assert runs.cycled == runs.plain


def test_the_script_trained_in_two_processes(runs: Runs) -> None:
    """The losses of the two ranks differ and fall, and the weights are equal."""
    assert [rank["world size"] for rank in runs.plain] == [2, 2]
    losses = runs.plain[0]["losses"]
    assert len(losses) == 16
    assert all(len(step) == 2 and step[0] != step[1] for step in losses)
    assert sum(losses[-1]) < sum(losses[0])
    assert runs.plain[0]["weights"] == runs.plain[1]["weights"]


def test_every_group_went_through_three_cycles(runs: Runs) -> None:
    """In each the groups are released, refuse a collective, and are live again."""
    assert [(rank["installed"], rank["steps"]) for rank in runs.cycles] == [(True, 8)] * 2
    for rank in runs.cycles:
        assert [cycle["generation"] for cycle in rank["cycles"]] == [1, 2, 3]
        for cycle in rank["cycles"]:
            assert cycle["released"] >= 1
            assert cycle["refused"] == "GroupOffloadedError"
            assert cycle["states"] == ["live"]
