"""The set that a group belongs to: by the region of its creation, or by the calling module."""

from __future__ import annotations

import sys
import types

import pytest
import torch.distributed as dist
from helpers.worlds import BACKEND, TIMEOUT, init

import reloadpg
from reloadpg.errors import InvalidOptionError
from reloadpg.extend import managed

pytestmark = pytest.mark.matrix


def module_of(name, source):
    """Enter a module of another package into ``sys.modules``."""
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


BY_ENGINE = dict.fromkeys(("direct", "through helper", "subgroups"), "engine")
NAMES = ("world", "mine", "direct", "through helper", "subgroups", "helper")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (None, {}),
        ({"engine": "engine.*"}, BY_ENGINE),
        ({"engine": "engine"}, BY_ENGINE),
        (
            {"engine": ["nothing", "engine.parallel.state"], "other": "helper"},
            {**BY_ENGINE, "through helper": "other", "helper": "other"},
        ),
        (["engine"], {}),
        ({None: "engine.*"}, dict.fromkeys(BY_ENGINE)),
    ],
    ids=str,
)
def test_a_group_belongs_to_the_set_of_the_nearest_caller_that_a_rule_matches(sets, expected):
    """WORLD and all other groups belong to the trainer's set. ``None`` makes groups bypass, without
    a warning.
    """
    engine = packages()
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets=sets)
    init()
    ranks = [0, 1]
    made = [
        *(dist.group.WORLD, dist.new_group(ranks)),
        *(engine.direct(ranks), engine.through_helper(ranks), engine.split(ranks)),
        sys.modules["helper"].make(ranks),
    ]
    expected = {**dict.fromkeys(NAMES, "trainer"), **expected}
    known = [managed(group) for group in made]
    assert dict(zip(NAMES, [one and one.set_name for one in known], strict=True)) == expected
    status = reloadpg.status()
    assert {group.name: group.set for group in status.groups} == {
        one.name: one.set_name for one in known if one is not None
    }
    assert status.unmanaged == {}
    reasons = [group.reason for group in status.bypassed_groups]
    assert len(reasons) == list(expected.values()).count(None)
    assert all("in no set" in reason for reason in reasons)
    assert reloadpg.offload().warnings == ()


@pytest.mark.ranks(2)
def test_a_region_overrides_rules():
    """The innermost region counts. WORLD stays in the trainer's set."""
    engine = packages()
    sets = {"rule": "engine.*", "engine": (), "critic": ()}
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets=sets)
    ranks = [0, 1]
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
    names = [known and known.set_name for known in map(managed, made)]
    regions = ["engine", "critic", "engine", None, "critic"]
    assert names == ["trainer", *regions, "trainer", "rule"]
    assert reloadpg.status().unmanaged == {}


@pytest.mark.parametrize("name", ["", 3, ["engine"]])
def test_the_name_of_a_region_must_be_a_nonempty_string(name):
    with pytest.raises(InvalidOptionError, match="not the name of a set"):
        reloadpg.region(name)


@pytest.mark.ranks(2)
def test_a_registered_group_joins_the_set_of_the_region():
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT, sets="weights")
    init()
    with reloadpg.region(None):
        group = dist.new_group([0, 1])
    with reloadpg.region("weights"):
        group = reloadpg.register_group(group, rebuild=lambda: None)
    assert group._managed.set_name == "weights"
