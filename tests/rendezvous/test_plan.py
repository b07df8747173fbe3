"""Plans: the sum that shows a difference, and the message that describes it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reloadpg.rendezvous.plan import GroupPlan, Plan, differences

SIZE = 6


@st.composite
def jobs(draw: st.DrawFn) -> dict[int, Plan]:
    """The plans of a job whose ranks agree."""
    size = draw(st.integers(2, SIZE))
    options = {"timeout_s": str(draw(st.integers(1, 99)))}
    groups = []
    for index in range(draw(st.integers(0, 5))):
        members = draw(st.permutations(range(size)))[: draw(st.integers(2, size))]
        groups.append(
            GroupPlan(
                str(index),
                tuple(members),
                draw(st.integers(0, 3)),
                "recreate",
                draw(st.integers(0, 2**40 - 1)),
            )
        )
    return {
        rank: Plan(
            "offload", {"state": "live"}, tuple(g for g in groups if rank in g.members), options
        )
        for rank in range(size)
    }


def total(plans: dict[int, Plan]) -> int:
    return sum(plan.contribution(rank, len(plans)) for rank, plan in plans.items())


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_plans_that_agree_sum_to_zero(plans: dict[int, Plan]) -> None:
    assert total(plans) == 0


def changes(plan: Plan) -> list[Plan]:
    """All plans that differ from this one in one field."""
    changed = [
        replace(plan, operation="reload"),
        replace(plan, settings={**plan.settings, "state": "offloaded"}),
        replace(plan, settings={**plan.settings, "another": "1"}),
        replace(plan, options={**plan.options, "timeout_s": "100"}),
    ]
    for index, group in enumerate(plan.groups):
        without = plan.groups[:index] + plan.groups[index + 1 :]
        changed.append(replace(plan, groups=without))
        for other in (
            replace(group, generation=group.generation + 1),
            replace(group, strategy="suspend"),
            replace(group, set="engine"),
            replace(group, digest=group.digest ^ 1),
            replace(group, name=group.name + "'"),
        ):
            changed.append(replace(plan, groups=(*without, other)))
    return changed


def named(text: str) -> set[int]:
    """The ranks that a text names, singly or in ranges."""
    found = set()
    for shown in re.findall(r"\branks? ([-0-9, ]*[0-9])", text):
        for run in shown.split(", "):
            first, _, last = run.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


@given(jobs(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_change_on_one_rank_is_detected_and_named(
    plans: dict[int, Plan], data: st.DataObject
) -> None:
    """The sum is not zero, and the message names that rank (failure 12)."""
    rank = data.draw(st.sampled_from(sorted(plans)))
    different = {**plans, rank: data.draw(st.sampled_from(changes(plans[rank])))}
    assert total(different) != 0
    text = differences(different)
    assert "in their digests only" not in text
    assert rank in named(text), text


@given(jobs(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_groups_in_a_plan_does_not_matter(
    plans: dict[int, Plan], data: st.DataObject
) -> None:
    """The digests of groups contain the order of creation."""
    shuffled = {
        rank: replace(plan, groups=tuple(data.draw(st.permutations(plan.groups))))
        for rank, plan in plans.items()
    }
    assert total(shuffled) == 0


@given(jobs())
@settings(max_examples=50, deadline=None)
def test_plans_can_be_stored_as_json(plans: dict[int, Plan]) -> None:
    for rank, plan in plans.items():
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert again.contribution(rank, SIZE) == plan.contribution(rank, SIZE)


def test_the_sum_fits_the_stores_integers() -> None:
    """The sum of 16,384 ranks with 128 groups of all ranks fits in 64 bits."""
    everyone = tuple(range(2**14))
    groups = tuple(GroupPlan(str(i), everyone, 0, "recreate", 2**40 - 1) for i in range(128))
    plan = Plan("offload", {}, groups)
    assert abs(plan.contribution(0, 2**14)) < 2**63
    assert abs(plan.contribution(1, 2**14)) < 2**63


GROUP = GroupPlan("7", (0, 1, 2), 3, "recreate", 5, "trainer", "cuda:nccl 'tp'")
OTHER = replace(GROUP, name="8")
AGREED = Plan("offload", {"state": "live"}, (GROUP, OTHER), {"min_size": "2", "timeout_s": "9"})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"operation": "reload"},
            "offload() on ranks 0, 2 and reload() on rank 1; call the same operation on all ranks",
        ),
        (
            {"options": {"timeout_s": "8"}},
            "min_size is 2 on ranks 0, 2 and unset on rank 1; timeout_s is 9 on ranks 0, 2 and 8 "
            "on rank 1; give install() the same options on all ranks",
        ),
        ({"settings": {"state": "failed"}}, "state is live on ranks 0, 2 and failed on rank 1"),
        (
            {"groups": (OTHER,)},
            "group '7' (cuda:nccl 'tp') of ranks 0-2 exists on ranks 0, 2 and not on rank 1 "
            "(destroyed there, in another set, or created before install)",
        ),
        (
            {"groups": (replace(GROUP, digest=6, detail="cpu:gloo"), OTHER)},
            "group '7': created as cuda:nccl 'tp' on ranks 0, 2 and cpu:gloo on rank 1",
        ),
        (
            {"groups": (replace(GROUP, digest=6), OTHER)},
            "group '7' (cuda:nccl 'tp'): its creation differs between ranks 0-2",
        ),
    ],
)
def test_message_for_different_plans(other: dict[str, Any], text: str) -> None:
    """The message names all differences, with the value on each rank."""
    assert differences({0: AGREED, 1: replace(AGREED, **other), 2: AGREED}) == text


def test_message_for_many_groups_is_short() -> None:
    """The message names three groups and counts the others."""
    groups = tuple(replace(GROUP, name=str(i)) for i in range(9))
    text = differences({0: replace(AGREED, groups=groups), 1: replace(AGREED, groups=())})
    assert text.count("group '") == 3
    assert text.endswith("; 6 more groups differ")
