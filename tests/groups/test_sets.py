"""The set that a group belongs to: by the place of its creation, or by who creates it."""

from __future__ import annotations

import sys
import types

import pytest
import torch.distributed as dist
from worlds import BACKEND, TIMEOUT, init

import reloadpg
from reloadpg import InvalidOptionError
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix


def module_of(name, source):
    """A module with functions of another package, as if it were installed."""
    module = types.ModuleType(name)
    exec(source, vars(module))
    sys.modules[name] = module
    return module


def packages():
    """An engine that creates groups by itself, through a helper package, and by a callback."""
    module_of("helper", "import torch.distributed as d\ndef make(r): return d.new_group(r)")
    return module_of(
        "engine.parallel.state",
        "import torch.distributed as d, helper\n"
        "def direct(r): return d.new_group(r)\n"
        "def through_helper(r): return helper.make(r)\n"
        "def split(r): return d.new_subgroups_by_enumeration([r])[0]\n",
    )


def _sets_by_rule(rank, world_size, sets):
    engine = packages()
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets=sets)
    init()
    ranks = list(range(world_size))
    made = {
        "world": dist.group.WORLD,
        "mine": dist.new_group(ranks),
        "direct": engine.direct(ranks),
        "through helper": engine.through_helper(ranks),
        "subgroups": engine.split(ranks),
        "helper": sys.modules["helper"].make(ranks),
    }
    status = reloadpg.status()
    return (
        {name: getattr(group, "set_name", None) for name, group in made.items()},
        {group.name: group.set for group in status.groups}
        == {
            group.group_name: group.set_name
            for group in made.values()
            if hasattr(group, "set_name")
        },
        len(status.unmanaged),
        [group.reason for group in status.bypassed_groups],
        status.bypassed,
        reloadpg.offload().warnings,
    )


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (None, {}),
        (
            {"engine": "engine.*"},
            dict.fromkeys(("direct", "through helper", "subgroups"), "engine"),
        ),
        ({"engine": "engine"}, dict.fromkeys(("direct", "through helper", "subgroups"), "engine")),
        (
            {"engine": ["nothing", "engine.parallel.state"], "other": "helper"},
            {
                "direct": "engine",
                "through helper": "other",
                "subgroups": "engine",
                "helper": "other",
            },
        ),
        ({None: "engine.*"}, dict.fromkeys(("direct", "through helper", "subgroups"))),
    ],
)
def test_a_group_belongs_to_the_set_of_the_nearest_caller_that_a_rule_matches(sets, expected):
    """WORLD and all other groups belong to the trainer's; ``None`` leaves groups alone silently."""
    names = ("world", "mine", "direct", "through helper", "subgroups", "helper")
    expected = {**dict.fromkeys(names, "trainer"), **expected}
    for found, same, unmanaged, reasons, bypassed, warnings in run_ranks(
        _sets_by_rule, 2, args=(sets,)
    ):
        assert found == expected
        assert same
        assert unmanaged == 0
        assert len(reasons) == bypassed == list(expected.values()).count(None)
        assert all("in no set" in reason for reason in reasons)
        assert warnings == ()


def _sets_by_region(rank, world_size, sets):
    engine = packages()
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets=sets)
    ranks = list(range(world_size))
    with reloadpg.region("engine"):
        init()
        made = [dist.group.WORLD, dist.new_group(ranks)]
        with reloadpg.region("critic"):
            made.append(engine.direct(ranks))
        made.append(dist.new_group(ranks))
        with reloadpg.region(None):
            made.append(dist.new_group(ranks))
    with pytest.raises(ZeroDivisionError), reloadpg.region("engine"):
        raise ZeroDivisionError
    made.append(reloadpg.region("critic")(dist.new_group)(ranks))
    made += [dist.new_group(ranks), engine.direct(ranks)]
    return [getattr(group, "set_name", None) for group in made], dict(reloadpg.status().unmanaged)


@pytest.mark.parametrize(
    ("sets", "in_region", "by_rule"),
    [({"rule": "engine.*"}, "engine", "rule"), ({"engine": None}, None, "trainer")],
)
def test_a_region_puts_groups_into_a_set_and_wins_over_rules(sets, in_region, by_rule):
    """The innermost region counts; WORLD stays the trainer's; a set without groups takes none."""
    found = ["trainer", in_region, "critic", in_region, None, "critic", "trainer", by_rule]
    for names, unmanaged in run_ranks(_sets_by_region, 2, args=(sets,)):
        assert names == found
        assert unmanaged == {}


@pytest.mark.parametrize(
    "sets", ["vllm.*", {"engine": 3}, {"engine": [""]}, {3: "vllm"}, {"": "vllm"}, {None: None}]
)
def test_rules_that_cannot_be_used_are_refused(sets):
    """With what to pass."""
    with pytest.raises(InvalidOptionError, match=r"sets.*nothing was (installed|changed)"):
        reloadpg.install(sets=sets)
    assert not reloadpg.is_installed()


@pytest.mark.parametrize("name", ["", 3, ["engine"]])
def test_a_region_has_a_name(name):
    with pytest.raises(InvalidOptionError, match="not the name of a set"):
        reloadpg.region(name)


def _handed_over(rank, world_size):
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    init()
    with reloadpg.region(None):
        group = dist.new_group(list(range(world_size)))
    with reloadpg.region("weights"):
        group = reloadpg.register_group(group, rebuild=lambda: None)
    return group.set_name


def test_a_group_that_is_handed_over_joins_the_set_of_the_place():
    assert run_ranks(_handed_over, 2) == ["weights"] * 2
