"""Plans: the sum that shows a difference, and the message that describes it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reloadpg.rendezvous.plan import Entry, Plan, differences, reconciled

SIZE = 6


@st.composite
def jobs(draw: st.DrawFn) -> dict[int, Plan]:
    """The plans of a job whose ranks agree."""
    size = draw(st.integers(2, SIZE))
    call = Entry("install()", (), {"timeout_s": str(draw(st.integers(1, 99)))})
    state = Entry("", (), {}, {"generation": "3"})
    groups = []
    for index in range(draw(st.integers(0, 5))):
        members = draw(st.permutations(range(size)))[: draw(st.integers(2, size))]
        generation = {"generation": str(draw(st.integers(0, 3)))}
        groups.append(Entry(f"group '{index}'", tuple(members), {"set": "trainer"}, generation))
    return {
        rank: Plan("offload", (call, state, *(g for g in groups if rank in g.members)))
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
    changed = [replace(plan, operation="reload")]
    for index, entry in enumerate(plan.entries):
        without = plan.entries[:index] + plan.entries[index + 1 :]
        others = [
            replace(entry, fixed={**entry.fixed, "set": "engine"}),
            replace(entry, state={**entry.state, "generation": "4"}),
        ]
        if entry.members:
            changed.append(replace(plan, entries=without))
            others.append(replace(entry, subject=entry.subject + "'"))
        if len(entry.members) > 1:
            others.append(replace(entry, members=entry.members[::-1]))
        changed += [replace(plan, entries=(*without, other)) for other in others]
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
def test_the_order_of_entries_in_a_plan_does_not_matter(
    plans: dict[int, Plan], data: st.DataObject
) -> None:
    shuffled = {
        rank: replace(plan, entries=tuple(data.draw(st.permutations(plan.entries))))
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
    groups = tuple(Entry(str(i), everyone, {}) for i in range(128))
    plan = Plan("offload", groups)
    assert abs(plan.contribution(0, 2**14)) < 2**63
    assert abs(plan.contribution(1, 2**14)) < 2**63


OPTIONS = Entry("install()", (), {"min_size": "2", "timeout_s": "9"})
CALL = Entry("", (), {"connect": "none"}, {"generation": "3"})
STATE = {"generation": "3", "strategy": "recreate"}
GROUP = Entry("group '7'", (0, 1, 2), {"backend": "cuda:nccl"}, STATE, "cuda:nccl 'tp'")
OTHER = replace(GROUP, subject="group '8'")
AGREED = Plan("offload", (OPTIONS, CALL, GROUP, OTHER))


def with_entries(*entries: Entry, without: tuple[Entry, ...] = ()) -> Plan:
    """The plan with other entries in place of those with the same subjects."""
    new = {entry.subject: entry for entry in (*AGREED.entries, *entries)}
    return replace(AGREED, entries=tuple(e for e in new.values() if e not in without))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            replace(AGREED, operation="reload"),
            "offload() on ranks 0, 2 and reload() on rank 1; call the same operation on all ranks",
        ),
        (
            with_entries(replace(OPTIONS, fixed={"timeout_s": "8"}), without=(GROUP,)),
            "install(): min_size is 2 on ranks 0, 2 and unset on rank 1; timeout_s is 9 on ranks "
            "0, 2 and 8 on rank 1; give the same arguments on all ranks",
        ),
        (
            with_entries(replace(CALL, fixed={"connect": "eager"})),
            "connect is none on ranks 0, 2 and eager on rank 1; give the same arguments on all "
            "ranks",
        ),
        (
            with_entries(replace(CALL, state={"generation": "4"})),
            "generation is 3 on ranks 0, 2 and 4 on rank 1; reload() on all ranks rebuilds the "
            "groups",
        ),
        (
            with_entries(replace(GROUP, state={**STATE, "generation": "2"})),
            "group '7' (cuda:nccl 'tp') of ranks 0-2: generation is 3 on ranks 0, 2 and 2 on rank "
            "1; reload() on all ranks rebuilds the groups",
        ),
        (
            with_entries(without=(GROUP,)),
            "group '7' (cuda:nccl 'tp') of ranks 0-2 exists on ranks 0, 2 and not on rank 1 "
            "(destroyed there, in another set, or created before install)",
        ),
        (
            with_entries(replace(GROUP, fixed={"backend": "cpu:gloo"}, detail="cpu:gloo")),
            "group '7' (cuda:nccl 'tp') of ranks 0-2: backend is cuda:nccl on ranks 0, 2 and "
            "cpu:gloo on rank 1",
        ),
    ],
)
def test_message_for_different_plans(other: Plan, text: str) -> None:
    """The message names all differences, with the value on each rank."""
    assert differences({0: AGREED, 1: other, 2: AGREED}) == text


def test_details_are_not_compared() -> None:
    """Descriptions of a group may differ between its members."""
    plans = {0: AGREED, 1: with_entries(replace(GROUP, detail="of rank 1")), 2: AGREED}
    assert total(plans) == 0


def test_a_reload_replaces_the_state_alone() -> None:
    """With a generation above that of any rank."""
    reload_ = replace(AGREED, operation="reload")
    state = replace(
        with_entries(replace(GROUP, state={**STATE, "generation": "5"})), operation="reload"
    )
    assert reconciled({0: reload_, 1: state, 2: reload_}) == 6
    assert reconciled({0: reload_, 1: AGREED, 2: reload_}) == 0
    without = replace(with_entries(without=(OTHER,)), operation="reload")
    assert reconciled({0: state, 1: without, 2: reload_}) == 0


def test_message_for_many_groups_is_short() -> None:
    """The message names three groups and counts the others."""
    groups = tuple(replace(GROUP, subject=f"group '{i}'") for i in range(9))
    text = differences({0: replace(AGREED, entries=groups), 1: replace(AGREED, entries=())})
    assert text.count("group '") == 3
    assert text.endswith("; 6 more groups differ")
