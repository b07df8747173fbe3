"""The agreement protocol, explored: what holds in every order, and what a change of it breaks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from explorer import Explorer, Scenario

from reloadpg.rendezvous import protocol
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.protocol import At, Delete, State

OPERATION = ("enter", "released")
MEET = (OPERATION, "recover")
STEP = (("enter",), "recover")
HOSTS = ((0, 1), (2, 3))

SCENARIOS = {
    "two operations": Scenario(2, (OPERATION, OPERATION)),
    "three ranks": Scenario(3, (OPERATION,)),
    "a rank that polls": Scenario(2, (OPERATION, OPERATION), polls=True),
    "agreement": Scenario(2, (OPERATION,), shares=(3, -3), meets=True),
    "disagreement": Scenario(2, (OPERATION,), shares=(3, -4)),
    "work that hangs": Scenario(2, (OPERATION, OPERATION), stuck=True),
    "a crash": Scenario(2, (OPERATION, OPERATION), ("crash",)),
    "a crash that is seen": Scenario(3, (OPERATION,), ("crash",), (1,), waits=False, watches=True),
    "a stall": Scenario(2, (OPERATION, OPERATION), ("stall",)),
    "a stall, and the operation is called again": Scenario(
        2, (("enter",), ("enter",)), ("stall",), (1,), again=True
    ),
    "a failure of one of three": Scenario(3, (("enter",),), ("failure",), (1,)),
    "an interrupt": Scenario(2, MEET, ("interrupt",), meets=True),
    "two interrupts": Scenario(2, (("enter",), "recover"), ("interrupt",) * 2, meets=True),
    "an interrupt in a step": Scenario(2, STEP, ("interrupt",), cancels=True, waits=False),
    "an interrupt while others recover": Scenario(
        2, STEP, ("interrupt",), (1,), cancels=True, waits=False, others=("recover",)
    ),
    "a lost connection": Scenario(2, (("enter",), "recover"), ("silent",), meets=True),
    "a late answer": Scenario(2, (("enter",), "recover"), ("silent",), late=True),
    "a process that is replaced": Scenario(2, (("enter",), "recover"), ("crash", "replace")),
    "a store that is lost": Scenario(2, (OPERATION, OPERATION), ("store lost",)),
    "a job that begins": Scenario(2, (("enter",),), joins=True, waits=False, meets=True),
    "a job that one rank has begun twice": Scenario(
        2, (("enter",),), joins=True, uneven=(0,), waits=False, meets=True
    ),
    "ranks of a host that meet": Scenario(2, (OPERATION, OPERATION), hosts=((0, 1),), waits=False),
    "two hosts": Scenario(4, (OPERATION,), hosts=HOSTS, met=True, waits=False),
    "two hosts that disagree": Scenario(
        4, (("enter",),), hosts=HOSTS, met=True, waits=False, shares=(3, -1, -1, -2)
    ),
    "a crash on one of two hosts": Scenario(
        4, (("enter",),), ("crash",), (0, 1), hosts=HOSTS, met=True
    ),
    "a crash of a leader that is seen": Scenario(
        3, (OPERATION,), ("crash",), (0,), hosts=((0, 1, 2),), met=True, waits=False, watches=True
    ),
    "a stall on one of two hosts": Scenario(
        4, (("enter",),), ("stall",), (0, 1), hosts=HOSTS, met=True
    ),
    "a lost connection on a host": Scenario(
        2, (("enter",), "recover"), ("silent",), hosts=((0, 1),), met=True, meets=True, late=True
    ),
    "a lost connection before ranks of a host meet": Scenario(
        2, (("enter",), ("enter",)), ("silent",), hosts=((0, 1),), again=True
    ),
    "an interrupt on a host": Scenario(
        2, (OPERATION, "recover"), ("interrupt",) * 2, hosts=((0, 1),), met=True, meets=True
    ),
    "a failure on a host": Scenario(
        3, (("enter",),), ("failure",), (0, 1), hosts=((0, 1, 2),), met=True, waits=False
    ),
    "a leader that is replaced": Scenario(
        2, (("enter",), "recover"), ("crash", "replace"), (0,), hosts=((0, 1),), met=True
    ),
    "a rank that cannot reach its leader": Scenario(
        3, (OPERATION,), hosts=((0, 1, 2),), met=True, partial=(1,), waits=False
    ),
}
MOST = 5000
"""Worlds of each scenario, breadth first: all, or those of the first steps."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_must_hold_holds_in_every_order(name: str) -> None:
    """One decision a barrier, and the other invariants of the explorer."""
    assert Explorer(SCENARIOS[name]).explore(MOST) or len(SCENARIOS[name].faults) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_must_hold_holds_deeper(name: str) -> None:
    """All worlds, or as many as ``TEST_WORLDS`` says: a nightly run can afford a million."""
    Explorer(SCENARIOS[name]).explore(int(os.environ.get("TEST_WORLDS", "20000")))


@pytest.mark.parametrize("faults", [("crash", "silent"), ("interrupt", "stall"), ("silent",) * 3])
def test_what_must_hold_holds_on_random_paths_of_larger_jobs(faults: tuple[str, ...]) -> None:
    """Five ranks and several faults; the seed is the number of the path."""
    case = Scenario(5, (OPERATION, "recover", OPERATION), faults, (0, 1, 2, 3, 4))
    for seed in range(12):
        explorer = Explorer(case)
        explorer.walk(seed, 3000)
        assert explorer.ends == 1, seed


# -- changes of the protocol that must be found ---------------------------------------------------

Step = tuple[State, Any]


def late_replies_count(state: State, event: Any) -> Step:
    """Finding 1: a question that was given up is answered late, and changes what the rank knows."""
    if isinstance(event, protocol.Reply) and state.at in protocol.REPLIES:
        return protocol.REPLIES[state.at](state, event.value)
    return original_step(state, event)


def keys_go_early(state: State, decision: Decision) -> Step:
    """Finding 1: a decision is deleted before the other rank reads it."""
    state, command = original_pass(state, decision)
    return state._replace(spent=()), Delete(state.spent[0]) if state.spent else command


def no_time_to_answer(state: State, text: str | None) -> Step:
    """Finding 3: a rank that waits for the others' answers gives up before they come."""
    return original_roll(state, text) if text else protocol._collect(state)


def interrupts_are_only_told_at_the_barrier(state: State, event: protocol.Fail) -> Step:
    """Finding 5: the peers are on their way to a recovery, and never look there."""
    return original_fail(state, event._replace(decision=replace(event.decision, kind="failed")))


def jobs_are_counted_by_each_rank(state: State, text: str | None) -> Step:
    """Finding 7: one rank's initialisation fails, and the retry never meets again."""
    return protocol._idle(state) if state.at is At.INSTANCE else protocol._pause(state)


def a_rank_trusts_itself(state: State, text: str) -> Step:
    """It acts on the decision that it wanted to write, and not on the one that was written."""
    return protocol._known(state, state.wanted)


def answers_are_counted_twice(state: State) -> Step:
    """After a second interrupt."""
    return original_answer(state._replace(answered=False))


def a_leader_counts_itself_again(state: State, found: tuple[int, bool]) -> Step:
    """Each time that it takes what others have handed it."""
    return original_gathered(state._replace(counted=False), found)


def a_rank_is_handed_and_counted(state: State, _: bool) -> Step:
    """It adds what its leader adds as well."""
    return protocol._add(state, 1)


def the_list_of_a_host_stays(state: State, local: tuple[int, ...]) -> Step:
    """No rank deletes it."""
    return protocol._idle(state._replace(local=local))


original_gathered = protocol._gathered
original_step = protocol.step
original_pass = protocol._pass
original_roll = protocol._roll_read
original_fail = protocol._fail
original_answer = protocol._count_answer


@contextmanager
def changed(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """The protocol with another function in the place of one of its own."""
    original = getattr(protocol, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, name, function)
        for table in (protocol.REPLIES, protocol.EVENTS):
            for key, found in table.items():
                if found is original:
                    patch.setitem(table, key, function)  # type: ignore[arg-type]
        yield


def is_caught(names: tuple[str, ...], most: int = MOST) -> bool:
    """Whether one of these scenarios shows it."""
    for name in names:
        try:
            Explorer(SCENARIOS[name]).explore(most)
        except Exception:  # a violation, or what the changed code raises
            return True
    return False


@pytest.mark.parametrize(
    ("name", "function", "scenario"),
    [
        ("step", late_replies_count, "a late answer"),
        ("_pass", keys_go_early, "two operations"),
        ("_roll_read", no_time_to_answer, "a failure of one of three"),
        ("_fail", interrupts_are_only_told_at_the_barrier, "an interrupt while others recover"),
        ("_instance_read", jobs_are_counted_by_each_rank, "a job that one rank has begun twice"),
        ("_decided", a_rank_trusts_itself, "a stall"),
        ("_count_answer", answers_are_counted_twice, "two interrupts"),
        ("_gathered", a_leader_counts_itself_again, "a crash on one of two hosts"),
        ("_handed", a_rank_is_handed_and_counted, "two hosts"),
        ("_met", the_list_of_a_host_stays, "ranks of a host that meet"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_of_the_protocol_is_found(
    name: str, function: Callable[..., Any], scenario: str
) -> None:
    """Those that the protocol had before it was explored, and others."""
    with changed(name, function):
        assert is_caught((scenario,), 40_000)


SHOWN_IN = {
    "two operations": "SEND COUNT DECIDE BLOCK READ",
    "a crash": "PROGRESS REQUESTED NEWER PAUSE ROLL ROLL_PAUSE STUCK",
    "agreement": "NOTES",
    "disagreement": "ANSWER ABSENT PLANS ROLLED LEAVE",
    "work that hangs": "DOING",
    "a failure of one of three": "TELL LEAVE_PAUSE",
    "a stall, and the operation is called again": "NEXT NEXT_PAUSE",
    "an interrupt while others recover": "PENDING",
    "a lost connection": "REQUEST NUMBER ENTERED BUMP CANCELLED",
    "two hosts": "HAND GATHER HEAR",
    "ranks of a host that meet": "PUBLISH",
    "a job that begins": "COUNT_JOB",
    "a job that one rank has begun twice": "INSTANCE",
}
"""The scenario that shows that a transition is missing: all of them are shown."""


@pytest.mark.parametrize(
    ("at", "scenario"),
    [(At[name], scenario) for scenario, names in SHOWN_IN.items() for name in names.split()],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_transition_that_does_nothing_is_found(
    at: At, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank gets its reply, and stops there."""
    monkeypatch.setitem(protocol.REPLIES, at, lambda state, _: protocol._idle(state))
    assert is_caught((scenario,))
