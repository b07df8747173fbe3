"""Plans: the sum that shows a difference, and the words for the first one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reloadpg.rendezvous.plan import GroupPlan, Plan, first_difference

SIZE = 6


@st.composite
def jobs(draw: st.DrawFn) -> dict[int, Plan]:
    """The plans of a job whose ranks agree."""
    size = draw(st.integers(2, SIZE))
    options = {"timeout_s": str(draw(st.integers(1, 99))), "state": "live"}
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
        rank: Plan("offload", options, tuple(g for g in groups if rank in g.members))
        for rank in range(size)
    }


def total(plans: dict[int, Plan]) -> int:
    return sum(plan.contribution(rank, len(plans)) for rank, plan in plans.items())


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_plans_that_agree_sum_to_zero(plans: dict[int, Plan]) -> None:
    """Whatever the groups, and whoever is a member of them."""
    assert total(plans) == 0


def changes(plan: Plan) -> list[Plan]:
    """The plan with one thing changed, in each way that there is."""
    changed = [
        replace(plan, operation="reload"),
        replace(plan, settings={**plan.settings, "state": "offloaded"}),
        replace(plan, settings={**plan.settings, "another": "1"}),
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


@given(jobs(), st.data())
@settings(max_examples=200, deadline=None)
def test_one_change_on_one_rank_is_seen_and_said(
    plans: dict[int, Plan], data: st.DataObject
) -> None:
    """The sum is not zero, and the difference is found and names that rank (failure 12)."""
    rank = data.draw(st.sampled_from(sorted(plans)))
    different = {**plans, rank: data.draw(st.sampled_from(changes(plans[rank])))}
    assert total(different) != 0
    text = first_difference(different)
    assert "in nothing that they list" not in text
    assert f"rank {rank}" in text or f"{rank}" in text.split("rank", 1)[1]


@given(jobs(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_groups_in_a_plan_does_not_matter(
    plans: dict[int, Plan], data: st.DataObject
) -> None:
    """Their order of creation is in their digests; the list itself is a set."""
    shuffled = {
        rank: replace(plan, groups=tuple(data.draw(st.permutations(plan.groups))))
        for rank, plan in plans.items()
    }
    assert total(shuffled) == 0


@given(jobs())
@settings(max_examples=50, deadline=None)
def test_plans_survive_the_store(plans: dict[int, Plan]) -> None:
    """Written and read back, a plan is the same."""
    for rank, plan in plans.items():
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert again.contribution(rank, SIZE) == plan.contribution(rank, SIZE)


def test_the_sum_fits_the_stores_integers() -> None:
    """16,384 ranks with 128 groups each of all ranks stay inside 64 bits."""
    everyone = tuple(range(2**14))
    groups = tuple(GroupPlan(str(i), everyone, 0, "recreate", 2**40 - 1) for i in range(128))
    plan = Plan("offload", {}, groups)
    assert abs(plan.contribution(0, 2**14)) < 2**63
    assert abs(plan.contribution(1, 2**14)) < 2**63
