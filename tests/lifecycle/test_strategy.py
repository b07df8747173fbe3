"""Strategy of a group: a table, and what members conclude from each other's proposals."""

from __future__ import annotations

import itertools

import pytest

from reloadpg import InvalidOptionError, StrategyPolicy
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
def test_what_a_member_proposes(wanted, obstacle, used, strategy, reason):
    """By what the user wants and what the communicator can do."""
    choice = propose(wanted, obstacle, used=used)
    assert choice.strategy == strategy
    assert reason in choice.reason
    assert bool(choice.reason) == bool(reason)


def test_members_conclude_alike():
    """Whatever three members propose, all conclude the same, and the strongest of it."""
    kinds = [Choice("suspend"), Choice("skip", "unused"), Choice("recreate", "old")]
    for proposals in itertools.product(kinds, repeat=3):
        proposed = [p.to_proposal("g") for p in proposals if p.strategy != "suspend"]
        proposed.sort(key=lambda one: one.yields)  # one that yields is read only without others
        theirs = Choice.from_text(proposed[0].text) if proposed else None
        results = {conclude(mine, theirs).strategy for mine in proposals}
        strongest = max((p.strategy for p in proposals), key=["suspend", "skip", "recreate"].index)
        assert results == {strongest}


def test_without_another_proposal_a_group_keeps_its_own_proposal():
    """Nobody had anything to say against it."""
    assert conclude(Choice("suspend"), None) == Choice("suspend")


def test_a_group_that_is_to_be_recreated_stays_so():
    """What the user wants recreated is not suspended for others' sake, nor given their reasons."""
    for theirs in (Choice("skip", "x"), Choice("recreate", "y")):
        assert conclude(Choice("recreate"), theirs) == Choice("recreate")


@pytest.mark.parametrize(
    ("name", "desc", "wanted"),
    [
        ("12", "TENSOR_MODEL_PARALLEL_GROUP", "recreate"),
        ("12", "PIPELINE", "suspend"),
        ("world", "default_pg", "recreate"),
    ],
)
def test_patterns(name, desc, wanted):
    """Descriptions and names; the first that matches counts."""
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
def test_whether_any_group_may_be_suspended(name, groups, may):
    """It decides which barriers a job has."""
    assert StrategyPolicy(name, groups=groups).may_suspend is may


@pytest.mark.parametrize(
    "make",
    [
        lambda: StrategyPolicy("wishful"),
        lambda: StrategyPolicy("auto"),
        lambda: StrategyPolicy(groups={"x": "wishful"}),
        lambda: StrategyPolicy.of(["recreate"]),
        lambda: StrategyPolicy("suspend", groups=["a"]),
        lambda: StrategyPolicy("suspend", groups={1: "suspend"}),
        lambda: StrategyPolicy("suspend", groups=None),
    ],
)
def test_bad_policies_are_refused(make):
    """An InvalidOptionError, which is a ValueError."""
    with pytest.raises(InvalidOptionError, match="nothing was installed"):
        make()


def test_auto_is_refused_and_suspend_is_named():
    """``auto`` was a strategy of earlier versions; ``suspend`` does what it was used for."""
    with pytest.raises(InvalidOptionError, match="'suspend', which recreates a group that cannot"):
        StrategyPolicy.of("auto")


def test_a_policy_keeps_what_it_was_given():
    """Changing the caller's mapping afterwards changes nothing."""
    groups = {"x": "suspend"}
    policy = StrategyPolicy(groups=groups)
    groups["x"] = "wishful"
    assert policy.wanted("x", "") == "suspend"
