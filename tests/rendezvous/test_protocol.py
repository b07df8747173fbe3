"""Model checking of the agreement protocol, and mutations of it that must be detected."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from helpers.explorer import OFFLOAD, RELOAD, Explorer, Scenario, Violation, World
from helpers.sampling import sampled

from reloadpg.rendezvous import protocol
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.plan import Proposal
from reloadpg.rendezvous.protocol import State

OPERATION = ("enter", "released")
MEET = (OPERATION, "recover")
STEP = (("enter",), "recover")

SCENARIOS = {
    "two operations": Scenario(2, (OPERATION, OPERATION)),
    "three ranks": Scenario(3, (OPERATION,)),
    "a rank that polls": Scenario(2, (OPERATION, OPERATION), polls=True),
    "agreement": Scenario(2, (OPERATION,), shares=(3, -3), meets=True, waits=False),
    "disagreement": Scenario(2, (OPERATION,), shares=(3, -4), waits=False),
    "two disagreements before an agreement": Scenario(
        2,
        (OPERATION,) * 3,
        shares=(3, -4),
        again=True,
        proposals=((Proposal("g", "skip"),), ()),
        waits=False,
    ),
    "a disagreement and a crash": Scenario(2, (("enter",),), ("crash",), shares=(3, -4)),
    "proposals of which some yield": Scenario(
        2,
        (OPERATION, OPERATION),
        proposals=(
            (Proposal("g", "skip", yields=True), Proposal("h", "skip", yields=True)),
            (Proposal("g", "recreate"),),
        ),
    ),
    "an optional barrier": Scenario(
        2, (("enter", "room", "quiesced"),), optional=("quiesced",), extends=(1,)
    ),
    "an optional barrier that no rank requests": Scenario(
        2, (("enter", "room", "quiesced"),), optional=("quiesced",)
    ),
    "work that hangs": Scenario(2, (OPERATION, OPERATION), stuck=True, waits=False),
    "a crash after progress": Scenario(2, (OPERATION,), ("crash",), polls=True),
    "a crash": Scenario(2, (OPERATION, OPERATION), ("crash",)),
    "a crash that is detected": Scenario(
        3, (OPERATION,), ("crash",), (1,), waits=False, watches=True
    ),
    "a stall": Scenario(2, (OPERATION, OPERATION), ("stall",)),
    "a stall before a retry": Scenario(2, (("enter",), ("enter",)), ("stall",), (1,), again=True),
    "a stall of one of three": Scenario(3, (("enter",),), ("stall",), (1,)),
    "an interrupt before a retry": Scenario(
        2, (OPERATION,) * 2, ("interrupt",), again=True, waits=False
    ),
    "a failure of one of three": Scenario(3, (("enter",),), ("failure",), (1,)),
    "an interrupt": Scenario(2, MEET, ("interrupt",), meets=True),
    "two interrupts": Scenario(2, (("enter",), "recover"), ("interrupt",) * 2, meets=True),
    "an interrupt in a step": Scenario(2, STEP, ("interrupt",), cancels=True, waits=False),
    "three interrupts in a step, and all recover": Scenario(
        2, STEP, ("interrupt",) * 3, cancels=True, again=True, meets=True
    ),
    "a stall, and a failure of a rank that is behind": Scenario(
        2, (("enter",),) * 2, ("stall", "failure"), again=True
    ),
    "an interrupt while others recover": Scenario(
        2, STEP, ("interrupt",), (1,), cancels=True, waits=False, others=("recover",)
    ),
    "an interrupt in a step before all recover": Scenario(
        2, STEP, ("interrupt",), cancels=True, waits=False, again=True, meets=True
    ),
    "a recovery without a fault": Scenario(
        2, (("enter",), "recover", OPERATION), waits=False, meets=True
    ),
    "a recovery that one rank requests": Scenario(
        3,
        (("enter",), "recover", OPERATION),
        victims=(1,),
        others=(OPERATION, "recover", OPERATION),
        waits=False,
        meets=True,
    ),
    "a recovery in place of the next operation": Scenario(
        2, STEP, victims=(1,), others=(("enter",), *STEP), waits=False, meets=True
    ),
    "an interrupt in a recovery that another rank joins late": Scenario(
        2, ("recover",), ("interrupt",), (1,), cancels=True, waits=False
    ),
    "a stall and a failure": Scenario(3, (("enter",),), ("stall", "failure"), (1, 2)),
    "a lost connection of ranks that poll": Scenario(2, MEET, ("silent",), polls=True, meets=True),
    "a lost connection": Scenario(2, (("enter",), "recover"), ("silent",), meets=True),
    "a late reply": Scenario(2, (("enter",), "recover"), ("silent",), late=True),
    "a process that is replaced": Scenario(2, (("enter",), "recover"), ("crash", "replace")),
    "a lost store": Scenario(2, (OPERATION, OPERATION), ("store lost",)),
    "a job that begins": Scenario(2, (("enter",),), joins=True, waits=False, meets=True),
    "a stall in a job that one rank registered twice": Scenario(
        2, (("enter",),), ("stall",), (0,), joins=True, uneven=(0,)
    ),
    "a job that one rank registered twice": Scenario(
        2, (("enter",),), joins=True, uneven=(0,), waits=False, meets=True
    ),
    "a poll in a job that one rank registered twice": Scenario(
        2, (("connected",),), joins=True, uneven=(0,), polls=True, waits=False
    ),
    "a stall in a job that two of three ranks have left": Scenario(
        3, (("enter",),), ("stall",), joins=True, uneven=(0,), hosts=((0, 1, 2),)
    ),
    "two jobs on one store": Scenario(
        2, (OPERATION, "join", ("enter",)), joins=True, uneven=(0,), waits=False, meets=True
    ),
    "ranks of a host in a job that one registered twice": Scenario(
        2, (("enter",),), joins=True, uneven=(0,), hosts=((0, 1),), waits=False
    ),
    "proposals in a job that one rank registered twice": Scenario(
        2,
        (("enter",),),
        joins=True,
        uneven=(0,),
        proposals=((Proposal("g", "skip"),), (Proposal("h", "skip"),)),
        waits=False,
    ),
    "a store without lists": Scenario(2, (OPERATION,), hosts=((0, 1),), lists=False),
    "ranks of a host that begin a job": Scenario(
        2, (OPERATION,), joins=True, uneven=(0,), hosts=((0, 1),), waits=False, meets=True
    ),
    "a crash on a host that begins a job": Scenario(
        3, (OPERATION,), ("crash",), (1,), joins=True, hosts=((0, 1, 2),), watches=True
    ),
    "ranks of a host that meet": Scenario(2, (OPERATION, OPERATION), hosts=((0, 1),), waits=False),
    "an interrupt before the ranks of a host meet": Scenario(
        2, (("enter",),) * 2, ("interrupt",), hosts=((0, 1),), again=True
    ),
    "three ranks of a host that meet": Scenario(
        3, (("enter",),) * 3, hosts=((0, 1, 2),), waits=False
    ),
    "a crash on a host that is detected": Scenario(
        3, (OPERATION,), ("crash",), (0,), hosts=((0, 1, 2),), waits=False, watches=True
    ),
    "a lost connection on a host": Scenario(
        2, (("enter",), "recover"), ("silent",), hosts=((0, 1),), meets=True, late=True
    ),
    "a lost connection before ranks of a host meet": Scenario(
        2, (("enter",), ("enter",)), ("silent",), hosts=((0, 1),), again=True
    ),
    "an interrupt on a host": Scenario(
        2, (OPERATION, "recover"), ("interrupt",) * 2, hosts=((0, 1),), meets=True
    ),
    "a failure while others recover": Scenario(
        2, STEP, ("failure",), (1,), waits=False, others=("recover",)
    ),
    "a recovery of ranks of a host": Scenario(2, (STEP[0], "recover"), hosts=((0, 1),)),
    "a recovery before ranks of a host meet": Scenario(
        2, ("recover",), ("stall",), (1,), hosts=((0, 1),)
    ),
    "a recovery that one rank joins late": Scenario(2, ("recover",), ("stall",), (1,)),
    "a process of a host that is replaced": Scenario(
        2, (("enter",), "recover"), ("crash", "replace"), (0,), hosts=((0, 1),)
    ),
}
MOST = 5000
"""Limit of worlds per scenario, breadth-first."""


LARGE = (
    "a crash on a host that begins a job",
    "a crash on a host that is detected",
    "a crash that is detected",
    "a failure while others recover",
    "a late reply",
    "a lost connection of ranks that poll",
    "a process of a host that is replaced",
    "a recovery before ranks of a host meet",
    "a recovery that one rank requests",
    "a stall and a failure",
    "a stall, and a failure of a rank that is behind",
    "an interrupt",
    "an interrupt in a step before all recover",
    "an interrupt on a host",
    "three interrupts in a step, and all recover",
    "two interrupts",
)
"""Scenarios of two seconds and more: slow. The default run has others of each fault."""


@pytest.mark.parametrize("name", sampled(SCENARIOS, *(n for n in SCENARIOS if n not in LARGE)))
def test_invariants_hold_in_all_interleavings(name: str) -> None:
    """Without a fault, the state space is searched completely."""
    assert Explorer(SCENARIOS[name]).explore(MOST) or len(SCENARIOS[name].faults) > 0


def slow_rank() -> tuple[Explorer, World]:
    """Rank 1 is interrupted in a step, rank 0 waits for it, and rank 2 recovers before it waits."""
    case = Scenario(
        3, STEP, ("interrupt",), (1,), cancels=True, waits=False, again=True, meets=True
    )
    explorer = Explorer(case)
    world = explorer.start()
    last = world.ranks[2]._replace(
        state=State(2, (0, 1, 2), instance=1), command=None, running="", program=("recover",)
    )
    return explorer, world._replace(ranks=(*world.ranks[:2], last))


def test_ranks_that_recover_after_an_interrupt_have_all_read_of_it() -> None:
    """Or none has, and the recovery came first. Random paths."""
    explorer, start = slow_rank()
    for seed in range(300):
        explorer.walk(seed, 3000, start)
    assert explorer.ends == 300


Program = tuple[Any, ...]

ENDS: dict[str, tuple[Program, Program]] = {
    "offload": ((OFFLOAD,), ()),
    "reload": ((OFFLOAD, RELOAD), ()),
    "recover": (("recover",), ()),
    "offload and recover": ((OFFLOAD, "recover"), ()),
    "one recovers": ((OFFLOAD, "recover"), (OFFLOAD,)),
}
"""Programs of the rank with a fault, and of the others if they differ."""

FAULTS = ("silent", "store lost", "interrupt", "stall")

CASES = [
    (program, fault)
    for program in ENDS
    for fault in FAULTS
    # The other rank reads a request of a recovery that has ended without a decision.
    if program != "one recovers" or fault in ("interrupt", "stall")
]


PATHS = 100
"""Number of random paths to ends, for cases of three ranks in which the search reaches none."""


def ends_of(size: int, program: str, fault: str, most: int) -> tuple[Explorer, list[World]]:
    """Return the ways in which a program can end, with all ranks about to reload."""
    mine, others = ENDS[program]
    case = Scenario(size, mine, (fault,), late=size == 2, states=True)
    first = Explorer(replace(case, victims=(0,), others=others) if others else case)
    first.explore(most)
    if not first.last:
        first.last = [first.walk(seed, 3000) for seed in range(PATHS)]
        assert first.ends == PATHS
    then = Explorer(Scenario(size, (RELOAD,), (fault,), meets=True, states=True))
    found = [then.go_on(world) for world in first.last]
    return then, list(dict.fromkeys(found))


LONG = (("recover", "interrupt"), ("recover", "silent"), ("reload", "interrupt"))


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case in LONG))
        for case in CASES
        if " " not in case[0]
    ],
)
def test_one_reload_converges_from_every_end_of_an_operation(program: str, fault: str) -> None:
    """It may have ended differently on the ranks. Then all groups are live on all of them."""
    explorer, starts = ends_of(2, program, fault, 20_000)
    for seed, start in enumerate(starts):
        explorer.walk(seed, 2000, start)
    assert explorer.ends == len(starts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "fault", "size"), [(*case, size) for case in CASES for size in (2, 3)]
)
def test_one_reload_converges_in_every_order(program: str, fault: str, size: int) -> None:
    """``TEST_WORLDS`` is the limit of worlds, of the program and of the reload."""
    most = int(os.environ.get("TEST_WORLDS", "20000"))
    explorer, starts = ends_of(size, program, fault, most)
    walked = starts[: most // 100]
    for seed, start in enumerate(walked):
        explorer.walk(seed, 3000, start)
    assert explorer.ends == len(walked)
    explorer.explore(most, starts)


def test_a_late_reply_changes_nothing() -> None:
    """The request was abandoned. The rank has no request in flight, or another one."""
    arrived, _ = protocol.step(State(0, (0, 1)).open(("enter",)), protocol.Arrive())
    for idle in (arrived.open(("enter",)), protocol.step(arrived, protocol.Lost())[0]):
        assert protocol.step(idle, protocol.Reply(arrived.command_number, 2)) == (idle, None)
    fails, _ = protocol.step(arrived, protocol.Fail(Decision("failed", 0)))
    assert protocol.step(fails, protocol.Reply(arrived.command_number, 2)) == (fails, None)


@pytest.mark.parametrize(("counted", "waits"), [(1, True), (2, False)])
def test_each_counted_rank_waits_except_the_last(counted: int, waits: bool) -> None:
    arrived, _ = protocol.step(State(0, (0, 1)).open(("enter",)), protocol.Arrive())
    assert not arrived.is_waiting
    state, _ = protocol.step(arrived, protocol.Reply(arrived.command_number, counted))
    assert state.is_waiting == waits


def commands_of(state: State, event: Any, *replies: Any) -> list[Any]:
    """Return the requests of a rank after an event and after each reply."""
    state, command = protocol.step(state, event)
    commands = [command]
    for value in replies:
        state, command = protocol.step(state, protocol.Reply(state.command_number, value))
        commands.append(command)
    return commands


def test_ranks_that_read_the_same_request_write_different_decisions() -> None:
    """The rank whose decision is stored deletes the keys, so it must recognise its decision."""
    request = Decision("recover", 1, "fault")
    written = set()
    for rank in (0, 2):
        state = State(rank, (0, 1, 2), instance=1).open(("done",))
        *_, swap = commands_of(state, protocol.Poll(0), None, 0, "1", request.to_json())
        assert swap.key == state.key("decision")
        assert replace(Decision.from_json(swap.value), by=-1) == request
        written.add(swap.value)
    assert len(written) == 2


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("kind", ["failed", "cancelled", "timeout"])
def test_a_recovery_that_failed_is_joined_late_except_by_a_new_process(
    kind: str, replaces: bool
) -> None:
    """A rank that was in the job fails as well. A replacement requests a new recovery."""
    recover = protocol.Recover("fault", "{}", ("enter", "done"), replaces)
    ended = Decision(kind, 0).to_json()
    *_, command = commands_of(State(1, (0, 1), instance=1), recover, None, "1", None, ended)
    joins = kind != "timeout" and not replaces
    requests = protocol.Swap("reloadpg/1/recovery", "1", "2")
    assert command == (protocol.Set("reloadpg/1/recovery/1/1", "{}") if joins else requests)


@pytest.mark.parametrize(
    ("replaces", "ends"), [(False, ["1.4/enter"]), (True, ["1.0/enter", "1.0/done"])]
)
def test_a_request_ends_the_barriers_at_which_others_wait_for_this_rank(
    replaces: bool, ends: list[str]
) -> None:
    """Those of its next operation, or of the recovery in which its predecessor took part."""
    state = State(1, (0, 1), instance=1, epoch=1, sequence=3)
    recover = protocol.Recover("fault", "{}", ("enter", "done"), replaces)
    commands = commands_of(state, recover, None, "1", "2", None, None, *[None] * (1 + len(ends)))
    stored = [one for one in commands if isinstance(one, protocol.Swap)][1:]
    keys = ["recovery/2/request", *(f"{barrier}/decision" for barrier in ends)]
    assert [one.key for one in stored] == [f"reloadpg/1/{key}" for key in keys]
    assert {one.value for one in stored} == {Decision("recover", 1, "fault").to_json()}


JOINED: list[Any] = [None, "1", *[None] * 5]
"""The replies to a rank that joins a recovery, until it reads again whether one was interrupted."""


def test_an_interrupted_rank_that_recovers_withdraws_its_note() -> None:
    """A process that replaces another one need not know of it then: it was in no step."""
    noted = Decision("cancelled", 1, "interrupted").to_json()

    def asked(rank: int, note: str, *, replaces: bool = False) -> list[Any]:
        recover = protocol.Recover("fault", "{}", ("enter",), replaces)
        return commands_of(State(rank, (0, 1, 2), instance=1), recover, *JOINED, note, None)[-2:]

    withdrawn, end = asked(1, noted)
    assert end is None
    assert withdrawn[:2] == ("reloadpg/1/cancelled/0", noted)
    joins = [asked(0, withdrawn.value, replaces=new)[-2] is None for new in (False, True)]
    assert joins == [False, True]
    assert asked(0, noted, replaces=True)[-2] is not None


@pytest.mark.parametrize("replies", [[], JOINED])
@pytest.mark.parametrize("kind", ["cancelled", "withdrawn"])
def test_a_rank_joins_no_recovery_after_an_interrupt_that_is_news(
    kind: str, replies: list[Any]
) -> None:
    """The others have left the loop that it is in. It says that it has read the news, and raises.

    It looks for news before its request and after it, and joins the recovery if it is called again.
    """
    recover = protocol.Recover("fault", "{}", ("enter", "done"), False)
    noted, note = Decision("cancelled", 1, "interrupted"), Decision(kind, 1, "interrupted")
    state, command = State(2, (0, 1, 2), instance=1), None
    for event in (recover, *replies, note.to_json()):
        if event is not recover:
            event = protocol.Reply(state.command_number, event)
        state, command = protocol.step(state, event)
    assert command == protocol.Set("reloadpg/1/0.1/enter/reader/2", "1")
    state, command = protocol.step(state, protocol.Reply(state.command_number, None))
    assert (command, state.epoch, state.joins, state.noted) == (None, 0, False, noted)
    *_, again = commands_of(state, recover, note.to_json(), *JOINED[1:], note.to_json())
    assert again is None


def test_an_interrupt_like_that_of_an_earlier_epoch_is_news() -> None:
    """A rank was interrupted in a step again, with the same message."""
    recover = protocol.Recover("fault", "{}", ("enter", "done"), False)
    noted = Decision("cancelled", 1, "interrupted")
    state = State(0, (0, 1), instance=1, noted=noted)
    for number, joins in (("1", True), ("2", False)):
        state, _ = protocol.step(state, recover)
        for reply in (None, number, *[None] * 5, noted.to_json()):
            state, command = protocol.step(state, protocol.Reply(state.command_number, reply))
        assert (command is None) == joins


def test_a_recovery_that_ended_for_an_interrupt_that_is_known_is_not_joined() -> None:
    """This rank requests the next one."""
    recover = protocol.Recover("fault", "{}", ("enter", "done"), False)
    noted = Decision("cancelled", 1, "interrupted")
    state = State(0, (0, 1), instance=1, noted=noted)
    ended = replace(noted, by=1).to_json()
    *_, command = commands_of(state, recover, noted.to_json(), "1", None, ended)
    assert command == protocol.Swap("reloadpg/1/recovery", "1", "2")


@pytest.mark.parametrize("interrupted", [1, -1, None])
def test_an_interrupt_cancels_the_recovery_of_a_rank_that_may_not_know_of_it(
    interrupted: int | None,
) -> None:
    """For example of a process that replaces another one, and arrives at no barrier of the step.

    A rank that has not made its request yet reads after it whether a rank was interrupted.
    """
    noted = Decision("cancelled", 1, "interrupted")
    request = None
    if interrupted is not None:
        request = Decision("recover", 0, "fault", interrupted=interrupted).to_json()
    state = State(1, (0, 1), instance=1).open(("enter",))
    *_, command = commands_of(state, protocol.Fail(noted), "", noted.to_json(), "1", request)
    cancels = protocol.Swap("reloadpg/1/1.0/enter/decision", "", noted.to_json())
    assert command == (cancels if interrupted == -1 else None)


def test_a_request_says_which_interrupt_its_rank_knows() -> None:
    recover = protocol.Recover("fault", "{}", ("enter", "done"), False)
    noted = Decision("cancelled", 1, "interrupted")
    for known, interrupted in ((noted, 1), (Decision("failed", 1), -1)):
        state = State(0, (0, 1), instance=1, noted=known)
        *_, swap = commands_of(state, recover, None, "1", None, None, None)
        assert Decision.from_json(swap.value) == Decision(
            "recover", 0, "fault", interrupted=interrupted
        )


def test_a_late_rank_follows_the_others_to_another_epoch() -> None:
    """It has missed their operation, and they have begun the next one in a new epoch."""
    state = State(1, (0, 1), instance=1).open(("enter",))
    for number, strayed in (("1", True), ("0", False)):
        after, _ = protocol.step(state, protocol.Next(("enter",)))
        for reply in (None, number):
            after, command = protocol.step(after, protocol.Reply(after.command_number, reply))
        assert (after.strayed, command is None) == (strayed, strayed)


@pytest.mark.parametrize("insists", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_an_operation_waits_for_no_recovery_that_has_ended(ended: bool, insists: bool) -> None:
    """While other ranks wait in a recovery, only a rank that has lost count begins an epoch."""
    align = protocol.Recover("reload", "", ("enter", "done"), False, True, insists)
    request = Decision("recover", 0, "fault").to_json()
    decision = Decision("timeout", 0).to_json() if ended else None
    replies = ["1", request] if insists else ["1", request, decision]
    *_, command = commands_of(State(1, (0, 1), instance=1).open(("enter",)), align, *replies)
    requests = protocol.Swap("reloadpg/1/recovery", "1", "2")
    assert command == (requests if ended or insists else None)


@pytest.mark.parametrize("joined", [False, True])
def test_an_interrupt_of_a_recovery_ends_its_first_barrier(joined: bool) -> None:
    """Whether this rank has joined it or not; the operation before it had failed."""
    recover = protocol.Recover("fault", "{}", ("enter", "done"), False)
    state = State(1, (0, 1), instance=1, decision=Decision("failed", 0), ended=True)
    state, _ = protocol.step(state._replace(phases=("released",)), recover)
    for reply in (None, "1", *[None] * 6) * joined:
        state, _ = protocol.step(state, protocol.Reply(state.command_number, reply))
    cancelled = Decision("cancelled", 1, "interrupted")
    replies = [cancelled.to_json(), *["1"] * (not joined)]
    *_, written = commands_of(state, protocol.Fail(cancelled), *replies)
    assert written == ("reloadpg/1/1.0/enter/decision", "", cancelled.to_json())


def test_a_rank_without_a_store_assumes_that_the_others_pass() -> None:
    """The assumed end is the barrier after the one at which the rank was counted."""
    state = State(0, (0, 1)).open(("enter", "quiesced", "released"), ("quiesced",))
    counted = state._replace(arrived=True)
    assert state.supposed_end == "enter"
    assert counted.supposed_end == "released"
    assert counted._replace(decision=Decision("failed", 1)).supposed_end == "enter"
    assert counted._replace(phases=("released",)).supposed_end == "released"
    assert counted._replace(phases=()).supposed_end is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_invariants_hold_in_longer_runs(name: str) -> None:
    """``TEST_WORLDS`` is the limit of worlds; a nightly run can use a million."""
    Explorer(SCENARIOS[name]).explore(int(os.environ.get("TEST_WORLDS", "20000")))


@pytest.mark.parametrize("faults", [("crash", "silent"), ("interrupt", "stall"), ("silent",) * 3])
def test_invariants_hold_on_random_paths_of_larger_jobs(faults: tuple[str, ...]) -> None:
    """Five ranks and several faults; the seed is the number of the path."""
    case = Scenario(5, (OPERATION, "recover", OPERATION), faults, (0, 1, 2, 3, 4))
    for seed in range(12):
        explorer = Explorer(case)
        explorer.walk(seed, 3000)
        assert explorer.ends == 1, seed


class Counting(Explorer):
    """Counts the requests to the store and within hosts on one path."""

    def path(self, seed: int) -> Counter[str]:
        self.asked: Counter[str] = Counter()
        chance, world = random.Random(seed), self.start()
        while enabled := [
            n for n, one in enumerate(world.ranks) if self._is_enabled(world, n, one)
        ]:
            world = self._act(world, chance.choice(enabled))
            for n in range(len(world.ranks)):
                world = self._settle(world, n)
        self.check_end(world)
        return self.asked

    def _perform(self, world: World, n: int, command: Any, *, live: bool) -> tuple[World, Any]:
        self.asked[type(command).__name__] += 1
        return super()._perform(world, n, command, live=live)


TEN = (OPERATION,) * 5
"""Ten barriers."""


REQUESTS = {
    # Each rank adds one, waits and reads. The last one writes, and deletes count and decision.
    "no host": (Scenario(3, TEN), {"Add": 30, "Await": 20, "Read": 20, "Swap": 10, "Delete": 18}),
    # At the first barrier, each rank publishes itself and reads the list; one of them deletes it.
    "one host": (
        Scenario(2, TEN, hosts=((0, 1),)),
        {"Add": 20, "Await": 10, "Read": 10, "Swap": 10, "Delete": 19, "Publish": 2, "Meet": 2},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_ten_barriers(name: str) -> None:
    """The number of requests does not depend on the interleaving: no rank polls or repeats one."""
    case, expected = REQUESTS[name]
    for seed in range(20):
        assert Counting(case).path(seed) == expected


# -- mutations that must be detected --------------------------------------------------------------


@contextmanager
def changed(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace one function of the protocol."""
    original = getattr(protocol, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, name, function)
        for key, found in protocol.EVENTS.items():
            if found is original:
                patch.setitem(protocol.EVENTS, key, function)
        yield


def is_caught(names: tuple[str, ...], most: int = MOST) -> bool:
    """Whether one of these scenarios detects the mutation."""
    for name in names:
        try:
            Explorer(SCENARIOS[name]).explore(most)
        except Exception:  # a violation, or an error of the mutated code
            return True
    return False


ORIGINAL = {name: value for name, value in vars(protocol).items() if callable(value)}
MUTATIONS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a late reply to an abandoned request counts": (
        "step",
        lambda state, event: (
            state.at(state, event.value)
            if isinstance(event, protocol.Reply) and state.at is not None
            else ORIGINAL["step"](state, event)
        ),
        "a late reply",
    ),
    "a decision is deleted before the other rank reads it": (
        "_act",
        lambda state, text: ORIGINAL["_act"](
            state._replace(spent=state.spent + state.owned, owned=()), text
        ),
        "two operations",
    ),
    "a rank does not wait for the responses of others": (
        "_roll_read",
        lambda state, text: (
            ORIGINAL["_roll_read"](state, text) if text else protocol._collect(state)
        ),
        "a failure of one of three",
    ),
    "an interrupt is not written where recoveries read it": (
        "_on_fail",
        lambda state, event: ORIGINAL["_on_fail"](
            state, event._replace(decision=replace(event.decision, kind="failed"))
        ),
        "an interrupt while others recover",
    ),
    "an interrupt cancels a recovery of ranks that know of it": (
        "_pending_request_read",
        lambda state, text: protocol._cancel(state),
        "an interrupt in a step before all recover",
    ),
    "each rank counts its jobs alone": (
        "_instance_read",
        lambda state, text: protocol._idle(state),
        "a job that one rank registered twice",
    ),
    "a rank acts on the decision that it proposed": (
        "_decided",
        lambda state, text: protocol._act(state, state.text),
        "a stall",
    ),
    "a rank responds twice": (
        "_count_answer",
        lambda state: ORIGINAL["_count_answer"](state._replace(answered=False)),
        "two interrupts",
    ),
    "no rank deletes the list of a host": (
        "_met",
        lambda state, local: protocol._continue(state._replace(watches=True)),
        "ranks of a host that meet",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_of_the_protocol_is_detected(mutation: str) -> None:
    """Defects that the protocol once had, and others."""
    name, function, scenario = MUTATIONS[mutation]
    with changed(name, function):
        assert is_caught((scenario,), 40_000)


def test_a_rank_that_ignores_news_of_an_interrupt_is_detected() -> None:
    explorer, start = slow_rank()
    with changed("_news", lambda state, text: None), pytest.raises(Violation):
        for seed in range(300):
            explorer.walk(seed, 3000, start)


DETECTS = {
    "two operations": "sent counted decided woken decision_read",
    "a crash": "progress_read number_read newer_read paused roll_read roll_paused stuck_found",
    "agreement": "notes_read",
    "disagreement": "answered absent_found plans_read roll_written readers_found",
    "work that hangs": "doing_read",
    "a failure of one of three": "leave_paused",
    "a stall before a retry": "next_read next_paused",
    "an interrupt while others recover": "pending_read",
    "a lost connection": "request_read recovery_read requested_read entered_read cancelled_read"
    " note_read",
    "ranks of a host that meet": "published met",
    "a job that begins": "job_counted",
    "a job that one rank registered twice": "instance_read",
}
"""For each scenario, the transitions whose absence it detects. All transitions are listed."""


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, scenario) for scenario, names in DETECTS.items() for name in names.split()],
)
def test_a_missing_transition_is_detected(name: str, scenario: str) -> None:
    """The rank receives its reply and stops."""
    with changed(f"_{name}", lambda state, _: protocol._idle(state)):
        assert is_caught((scenario,))
