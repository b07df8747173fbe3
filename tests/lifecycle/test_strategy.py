"""Strategy of a group: a table, and what members conclude from each other's proposals."""

from __future__ import annotations

import itertools

import pytest

from reloadpg import InvalidOptionError, StrategyPolicy
from reloadpg.lifecycle.strategy import Choice, Facts, conclude, propose

GOOD = Facts(total=100, suspendable=90)

TABLE = [
    # policy, facts, strategy, part of the reason
    ("recreate", GOOD, "recreate", ""),
    ("recreate", Facts("too old"), "recreate", ""),
    ("suspend", GOOD, "suspend", ""),
    ("suspend", Facts(total=100, suspendable=1), "suspend", ""),
    ("suspend", Facts(), "suspend", ""),
    ("suspend", Facts("too old", total=100), "recreate", "too old"),
    ("suspend", Facts(used=False), "skip", "never used"),
    ("suspend", Facts("too old", used=False), "recreate", "too old"),
    ("auto", GOOD, "suspend", "90%"),
    ("auto", Facts(total=100, suspendable=80), "suspend", "80%"),
    ("auto", Facts(total=100, suspendable=79), "recreate", "79% of what its communicator holds"),
    ("auto", Facts("too old", total=100, suspendable=90), "recreate", "too old"),
    ("auto", Facts(used=False), "recreate", "never used"),
    ("auto", Facts(), "recreate", "does not say"),
    ("auto", Facts(total=0), "recreate", "does not say"),
    (StrategyPolicy("auto", min_share=0.5), Facts(total=100, suspendable=50), "suspend", "50%"),
    (StrategyPolicy("auto", min_share=0.5), Facts(total=100, suspendable=49), "recreate", "50%"),
    (StrategyPolicy("auto", min_share=0), Facts(total=100), "suspend", "0%"),
    (StrategyPolicy("auto", min_share=1), GOOD, "recreate", "less than 100%"),
]


@pytest.mark.parametrize(("policy", "facts", "strategy", "reason"), TABLE)
def test_what_a_member_proposes(policy, facts, strategy, reason):
    """The table of issue and design: by what the user wants and what the communicator can do."""
    policy = StrategyPolicy.of(policy)
    choice = propose(policy, policy.name, facts)
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
        ("12", "PIPELINE", "auto"),
        ("world", "default_pg", "suspend"),
        ("7", "", "auto"),
    ],
)
def test_patterns(name, desc, wanted):
    """Descriptions and names; the first that matches counts."""
    policy = StrategyPolicy(
        "auto", groups={"TENSOR*": "recreate", "default_pg": "suspend", "TENSOR_MODEL*": "auto"}
    )
    assert policy.wanted(name, desc) == wanted


@pytest.mark.parametrize(
    ("name", "groups", "may"),
    [
        ("recreate", {}, False),
        ("suspend", {}, True),
        ("auto", {}, True),
        ("recreate", {"x": "suspend"}, True),
        ("recreate", {"x": "recreate"}, False),
        ("auto", {"*": "recreate"}, True),
    ],
)
def test_whether_any_group_may_be_suspended(name, groups, may):
    """It decides which barriers a job has."""
    assert StrategyPolicy(name, groups=groups).may_suspend is may


@pytest.mark.parametrize(
    "make",
    [
        lambda: StrategyPolicy("wishful"),
        lambda: StrategyPolicy(groups={"x": "wishful"}),
        lambda: StrategyPolicy(min_share=1.1),
        lambda: StrategyPolicy(min_share=-0.1),
        lambda: StrategyPolicy.of(["recreate"]),
        lambda: StrategyPolicy("auto", groups=["a"]),
        lambda: StrategyPolicy("auto", groups={1: "suspend"}),
        lambda: StrategyPolicy("auto", groups=None),
        lambda: StrategyPolicy("auto", min_share="0.5"),
        lambda: StrategyPolicy("auto", min_share=None),
        lambda: StrategyPolicy("auto", min_share=True),
        lambda: StrategyPolicy("auto", fallback="no"),
    ],
)
def test_bad_policies_are_refused(make):
    """An InvalidOptionError, which is a ValueError."""
    with pytest.raises(InvalidOptionError, match="nothing was installed"):
        make()


def test_a_policy_keeps_what_it_was_given():
    """Changing the caller's mapping afterwards changes nothing."""
    groups = {"x": "suspend"}
    policy = StrategyPolicy(groups=groups)
    groups["x"] = "wishful"
    assert policy.wanted("x", "") == "suspend"
