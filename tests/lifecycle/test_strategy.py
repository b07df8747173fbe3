"""Strategy of a group: the proposals of its members, and their common decision."""

from __future__ import annotations

import itertools

import pytest

from reloadpg import StrategyPolicy
from reloadpg.errors import InvalidOptionError
from reloadpg.lifecycle.strategy import Choice, conclude, propose

TABLE = [
    # wanted, obstacle, used, strategy, part of the reason
    ("recreate", "", True, "recreate", ""),
    ("recreate", "too old", True, "recreate", ""),
    ("suspend", "", True, "suspend", ""),
    ("suspend", "too old", True, "recreate", "too old"),
    ("suspend", "", False, "skip", "never used"),
    ("suspend", "too old", False, "recreate", "too old"),
]


@pytest.mark.parametrize(("wanted", "obstacle", "used", "strategy", "reason"), TABLE)
def test_proposal_of_a_member(wanted, obstacle, used, strategy, reason):
    choice = propose(wanted, obstacle, used=used)
    assert choice.strategy == strategy
    assert reason in choice.reason
    assert bool(choice.reason) == bool(reason)


def test_members_agree_on_the_strongest_proposal():
    """This holds for all combinations of three proposals."""
    kinds = [Choice("suspend"), Choice("skip", "unused"), Choice("recreate", "old")]
    for proposals in itertools.product(kinds, repeat=3):
        proposed = [p.to_proposal("g") for p in proposals if p.strategy != "suspend"]
        proposed.sort(key=lambda one: one.yields)  # a proposal that yields is the last choice
        theirs = Choice.from_text(proposed[0].text) if proposed else None
        results = {conclude(mine, theirs).strategy for mine in proposals}
        strongest = max((p.strategy for p in proposals), key=["suspend", "skip", "recreate"].index)
        assert results == {strongest}


@pytest.mark.parametrize(
    ("name", "desc", "wanted"),
    [
        ("12", "TENSOR_MODEL_PARALLEL_GROUP", "recreate"),
        ("12", "PIPELINE", "suspend"),
        ("world", "default_pg", "recreate"),
    ],
)
def test_the_first_pattern_that_matches_name_or_description_counts(name, desc, wanted):
    groups = {"TENSOR*": "recreate", "default_pg": "recreate", "TENSOR_MODEL*": "suspend"}
    assert StrategyPolicy("suspend", groups=groups).wanted(name, desc) == wanted


@pytest.mark.parametrize(
    ("name", "groups", "may"),
    [
        ("recreate", {}, False),
        ("suspend", {}, True),
        ("recreate", {"x": "suspend"}, True),
        ("recreate", {"x": "recreate"}, False),
        ("suspend", {"*": "recreate"}, True),
    ],
)
def test_may_suspend(name, groups, may):
    """The barriers of a job depend on it."""
    assert StrategyPolicy(name, groups=groups).may_suspend is may


@pytest.mark.parametrize(
    "make",
    [
        lambda: StrategyPolicy("wishful"),
        lambda: StrategyPolicy(groups={"x": "wishful"}),
        lambda: StrategyPolicy.of(["recreate"]),
        lambda: StrategyPolicy("suspend", groups=["a"]),
        lambda: StrategyPolicy("suspend", groups={1: "suspend"}),
        lambda: StrategyPolicy("suspend", groups=None),
    ],
)
def test_invalid_policies_are_refused(make):
    with pytest.raises(InvalidOptionError, match="nothing was installed"):
        make()


def test_the_error_for_auto_names_suspend():
    """``auto`` was a strategy of earlier versions."""
    with pytest.raises(InvalidOptionError, match="'suspend', which recreates a group that cannot"):
        StrategyPolicy.of("auto")


def test_a_policy_copies_its_mapping():
    groups = {"x": "suspend"}
    policy = StrategyPolicy(groups=groups)
    groups["x"] = "wishful"
    assert policy.wanted("x", "") == "suspend"
