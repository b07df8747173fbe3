"""The agreement protocol, explored completely: see ``helpers/explorer.py``."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from helpers import explorer
from helpers.explorer import FAULTS, Explorer, Groups, Scenario, Violation

from reloadpg.rendezvous import protocol
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.protocol import Current

CYCLE = ("offload", "reload", "end")
SHORT = ("offload", "end")
OUTCOMES = "failed disagree timeout"
FAILED = Current(2, last=Decision("timeout", 0, barrier=0, operation="offload"))
"""Rank 0 has waited in an old job for a rank that never began it."""

SCENARIOS: dict[str, Scenario] = {
    "two ranks": Scenario((CYCLE,) * 2, looks=True, polls=True),
    "three ranks": Scenario((CYCLE,) * 3),
    "a rank that says something": Scenario((("says", "end"), SHORT, SHORT)),
    "all say something": Scenario((("says", "end"),) * 2, 1, FAULTS, (1,), OUTCOMES),
    "a plan that differs": Scenario((CYCLE, CYCLE, ("reload", "end")), outcomes="disagree"),
    "an interrupt": Scenario(
        (CYCLE,) * 2, 1, ("interrupt",), (1,), "failed disagree", stays_away=True
    ),
    "two interrupts": Scenario((CYCLE,) * 2, 2, ("interrupt",), (0, 1), "failed disagree"),
    "a lost reply": Scenario((CYCLE,) * 2, 1, ("lost",), (1,), "failed disagree", polls=True),
    "two lost replies": Scenario((CYCLE,) * 2, 2, ("lost",), (0, 1), "failed disagree"),
    "a barrier without a plan": Scenario(
        *((("barrier",) * 3 + ("end",),) * 2, 1, ("lost",), (1,), OUTCOMES), most_errors=4
    ),
    "a late request": Scenario((CYCLE,) * 2, 1, ("late",), (1,), "failed disagree"),
    "an early timeout": Scenario((CYCLE,) * 2, 2, ("timeout",), (0, 1), OUTCOMES, stays_away=True),
    "a failure": Scenario(
        (CYCLE,) * 2, 2, ("failure",), (0, 1), "failed", looks=True, stays_away=True
    ),
    "a crash": Scenario((SHORT,) * 2, 1, ("crash",), (1,), "timeout"),
    "a difference and a crash": Scenario(
        (SHORT, SHORT, ("reload", "end")), 1, ("crash",), (1, 2), "disagree timeout"
    ),
    "a recovery": Scenario((CYCLE, ("recover", "end")), outcomes="recover", looks=True),
    "a recovery of both": Scenario(
        *((("offload", "recover", "end"),) * 2, 1, ("interrupt",), (1,)),
        "failed disagree recover",
        stays_away=True,
    ),
    "a recovery and a lost reply": Scenario(
        (CYCLE, ("recover", "end")), 1, ("lost",), (0, 1), "failed disagree recover"
    ),
    "any two faults": Scenario((SHORT,) * 2, 2, FAULTS, (0, 1), OUTCOMES),
    "three ranks, any fault": Scenario((SHORT,) * 3, 1, FAULTS, (1, 2), OUTCOMES),
    "three ranks, a crash": Scenario((SHORT,) * 3, 1, ("crash",), (1,), OUTCOMES),
    "three ranks, a timeout and a failure": Scenario(
        (SHORT,) * 3, 2, ("timeout", "failure"), (1, 2), OUTCOMES
    ),
    "three ranks, names after a timeout": Scenario(
        (("barrier",),) * 3, 1, ("timeout",), (0, 1, 2), OUTCOMES, states=True
    ),
    "three ranks, a recovery": Scenario(
        (SHORT, SHORT, ("recover", "end")), 1, FAULTS, (2,), f"{OUTCOMES} recover"
    ),
    "three ranks, a cycle with any fault": Scenario((CYCLE,) * 3, 1, FAULTS, (2,), OUTCOMES),
    "three ranks, two recoveries": Scenario(
        (SHORT, ("recover", "end"), ("recover", "end")),
        1,
        ("interrupt", "lost"),
        (2,),
        f"{OUTCOMES} recover",
    ),
    "two faults and a recovery": Scenario(
        *((SHORT, ("recover", "end")), 2, FAULTS, (0, 1), f"{OUTCOMES} recover"), most_errors=3
    ),
    "a late request, and any fault": Scenario(
        (SHORT,) * 2, 2, ("late", "interrupt", "timeout"), (0, 1), OUTCOMES
    ),
    "states, and any fault": Scenario((CYCLE,) * 2, 1, FAULTS, (0, 1), OUTCOMES, states=True),
    "states, and a recovery": Scenario(
        *((CYCLE, ("offload", "recover", "end")), 1, FAULTS, (0, 1), f"{OUTCOMES} recover"),
        states=True,
    ),
    "three ranks, names and states": Scenario(
        (SHORT,) * 3, 1, ("interrupt", "failure", "lost"), (1,), OUTCOMES, states=True
    ),
    "a crash that is noticed": Scenario(
        (SHORT,) * 3, 1, ("crash",), (1,), OUTCOMES, patience=2, watches=True
    ),
    "two jobs on one store": Scenario(
        ((*SHORT, "init", *SHORT),) * 2, 1, ("late", "interrupt"), (0, 1), OUTCOMES, (0, 1)
    ),
    "names that two ranks write": Scenario(
        (("barrier",),) * 2, 2, ("timeout",), (0, 1), OUTCOMES, names=True
    ),
    "states that differ": Scenario(
        (("reload", *CYCLE),) * 3,
        states=True,
        groups=(Groups(offloaded=True, generation=1), Groups(generation=2), Groups()),
    ),
    "a repeated request": Scenario((CYCLE,) * 2, 1, ("reset",), (0, 1), "", polls=True),
    "a repeated request, and any fault": Scenario(
        (SHORT,) * 2, 2, ("reset", "lost", "interrupt"), (1,), OUTCOMES
    ),
    "a refusal": Scenario((("refuses", "end"), SHORT, SHORT), outcomes="disagree", names=True),
    "names after any fault": Scenario((CYCLE,) * 2, 1, FAULTS, (1,), OUTCOMES, names=True),
    "three ranks, names after a failure": Scenario(
        (SHORT,) * 3, 1, ("failure",), (1,), OUTCOMES, names=True
    ),
    "names of a difference and a crash": Scenario(
        (SHORT, ("reload", "end")), 1, ("crash",), (0, 1), "disagree timeout", states=True
    ),
    "names of the dead": Scenario(
        (("offload",),) * 3, 1, ("crash",), (1,), OUTCOMES, patience=1, watches=True, names=True
    ),
    "names after a recovery": Scenario(
        *((CYCLE, ("recover", "end")), 1, ("lost",), (0, 1)),
        "failed disagree recover",
        names=True,
    ),
    "a job on the store of a smaller one": Scenario(
        (CYCLE,) * 2, jobs=(2, 0), old=Current(3, passed=2), polls=True
    ),
    "a job after one that has ended at a barrier": Scenario(
        (SHORT,) * 2, jobs=(2, 0), old=Current(3, 1), polls=True
    ),
    "a job after one that failed": Scenario(
        (SHORT,) * 2, outcomes="timeout disagree", jobs=(2, 0), old=FAILED, polls=True
    ),
    "a job number that two ranks write": Scenario((SHORT,) * 2, jobs=(0, 1), newest=0, polls=True),
    "a job that is counted": Scenario((SHORT,) * 2, 1, ("late",), (0, 1), OUTCOMES, (0, 0)),
    "a rank that has counted fewer jobs": Scenario(
        (("says", "end"), SHORT), jobs=(0, 2), polls=True
    ),
    "fewer jobs, and any fault": Scenario(
        (SHORT,) * 2, 1, FAULTS, (0, 1), OUTCOMES, jobs=(0, 2), polls=True
    ),
    "three ranks, of which one has counted fewer jobs": Scenario(
        (SHORT,) * 3, jobs=(1, 0, 1), polls=True
    ),
    "three ranks, fewer jobs and a timeout": Scenario(
        (SHORT,) * 3, 1, ("timeout",), (0, 1), OUTCOMES, jobs=(1, 0, 1), polls=True
    ),
    "a recovery that is left without an end": Scenario(
        (("recover", "end"),) * 2, 2, ("lost",), (1,), "failed disagree recover"
    ),
}

LARGE = {
    "two interrupts",
    "two lost replies",
    "any two faults",
    "three ranks, a timeout and a failure",
    "three ranks, a recovery",
    "three ranks, a cycle with any fault",
    "three ranks, two recoveries",
    "two faults and a recovery",
    "a late request, and any fault",
    "three ranks, names and states",
    "states, and a recovery",
    "fewer jobs, and any fault",
    "three ranks, fewer jobs and a timeout",
}
"""Scenarios of some hundred thousand worlds."""

QUICK = [name for name in SCENARIOS if name not in LARGE and name != "three ranks, any fault"]
"""The other ones, which must find each change of the protocol."""

MOST = 150_000
"""No scenario that must find changes has so many worlds. A changed protocol can have more."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in SCENARIOS],
)
def test_every_world_of_a_scenario_keeps_the_invariants(name: str) -> None:
    """No rank works or returns before all have arrived for the same operation; an operation ends
    equally on all ranks that know it; no rank hangs, nor waits for names that all have given; ranks
    hear of a failure; all end with the same number, and groups in one state; no keys stay; after
    the last fault a rank raises at most twice. Without a limit.
    """
    scenario, found = SCENARIOS[name], Explorer(SCENARIOS[name])
    assert found.explore(ends=name in QUICK) > 100
    assert name not in QUICK or found.worlds < MOST
    assert found.most_errors <= scenario.most_errors
    if scenario.faults and not {"crash", "reset"} & {*scenario.kinds}:
        assert found.seen & {"own", "lost", "timeout"}


@pytest.mark.parametrize("name", ["two ranks", "a recovery", "a crash"])
def test_merging_equal_ranks_changes_no_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, each history of replies is a separate world."""
    scenario = SCENARIOS[name]._replace(polls=False)  # histories of polls have no end
    merged, separate = Explorer(scenario), Explorer(scenario)
    merged.explore()
    monkeypatch.setattr(explorer, "signature", lambda steps, one, seat: seat)
    separate.explore()
    assert separate.worlds > merged.worlds
    assert (separate.seen, separate.most_errors) == (merged.seen, merged.most_errors)


MUTATIONS = {
    "passes a barrier alone": (
        "if self.place == self.size:",
        "if self.place >= self.size - 1:",
    ),
    "does not compare plans": ("if speakers != len(texts):", "if False:"),
    "does not record that it has entered": (
        "now, now.number, now.number + 1",
        "now, now.number, self.next",
    ),
    "enters again what it has left": (
        "known = now.recovery == now.number, now.number >= self.next",
        "known = now.recovery == now.number, True",
    ),
    "wakes no rank": ('yield Set(self.key("go", *old.at))', "yield Delete(())"),
    "a long wait does not read": (
        '(self.key("go"))\n            now = yield from self.read()',
        '(self.key("go"))\n            now = now',
    ),
    "an end is written twice": (
        "while now.number == number:\n",
        "while now.number <= number + 1:\n",
    ),
    "a failure is not told": (
        "while now.number == number:\n",
        "while False:\n",
    ),
    "a failure before it has entered is not told": (
        "ended = yield from self.end(decision)",
        "return decision",
    ),
    "a repair passes over a failure": (
        'now.last.kind == "failed" and now.last.operation == operation',
        "False",
    ),
    "a recovery passes over a failure": (
        "yield from self._raise_missed(now, operation)\n                decision",
        "decision",
    ),
    "ignores a requested recovery": ("elif recovers:", "elif False:"),
    "each recovery is a new one": ("if recovers and known:", "if False:"),
    "joins a recovery that it has left": ("if recovers and known:", "if recovers:"),
    "does not know that an operation has passed": ("or now.passed == number:", ":"),
    "an end forgets what has passed": (
        "recovery, self.passed, last, spent)",
        "recovery, 0, last, spent)",
    ),
    "keeps its keys": ("        if spent:\n", "        if False:\n"),
    "loses what a rank says": ("text=summary(texts)", "text=''"),
    "counts no speaker": ("share + bool(said)", "share"),
    "a rank that does not wait is never the last": (
        "if left >= self.size",
        "if waits and left >= self.size",
    ),
    "a reload does not replace the state": (", generation=reconciled(plans)", ""),
    "does not follow to a newer job": (
        "if (yield from self._newest()) <= self.job:\n            return",
        "if True:\n            return",
    ),
    "does not count the job that it joins": ("newest - counted)", "0)"),
    "returns a later operation's decision": (
        "now.last if now.number <= number + 1 else OK",
        "now.last",
    ),
    "raises its own failure again": ("max(self.next, now.number + 1)", "self.next"),
    "requests a recovery too few": (
        "recovery = number if recovers",
        "recovery = number - 1 if recovers",
    ),
    "forgets a requested recovery": ("recovery >= self.next", "recovery > self.next"),
    "forgets the recovery at an end": ("else self.recovery\n", "else 0\n"),
    "forgets the recovery at a barrier": ("barrier, self.recovery, passed,", "barrier, 0, passed,"),
    "raises later failures again": ("        self.next = now.number  #", "        #"),
    "counts the dead": ("count < self.size - len(decision.dead)", "count < self.size"),
    "writes a second result": (
        'Swap(key("result"), "",',
        'Swap(key("result"), (yield Read(key("result"))) or "",',
    ),
    "rank 0 does not leave last": ("elif self.rank == 0 and waits:", "elif False:"),
    "works on after the end": ("        if now.at != self.at.at:\n", "        if False:\n"),
    "loses the race for the job's number": ("while newest < counted:", "if newest < counted:"),
    "does not answer for what it has left": ("if now == new:", "if False:"),
    "requests a recovery for another rank": (
        'Decision("recover", self.rank,',
        'Decision("recover", 0,',
    ),
    "has left in another rank's name": (
        'Decision("failed", self.rank, left)',
        'Decision("failed", 0, left)',
    ),
    "lists the dead as missing": (" and r not in decision.dead)", ")"),
    "takes waiting ranks for stuck ones": (
        "in answers.items() if doing)",
        "in answers.items() if not doing)",
    ),
    "loses the text of a refusal": ('decision.kind == "disagree" and decision.text:', "False:"),
    "an end is at the first barrier": ("barrier=self.barrier, operation", "barrier=0, operation"),
    "ignores missing plans": ("        if missing:\n", "        if False:\n"),
    "takes late ranks for those that waited": ('"" if in_time else None', '""'),
    "does not read how many have arrived": (
        "arrived = self._arrived(total, now)",
        "arrived = self.size",
    ),
    "joins an old job": ("met = now.passed or now.barrier", "met = False"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_of_the_protocol_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line that a guarantee depends on is changed, and a scenario finds it."""
    text, (old, new) = Path(protocol.__file__).read_text("utf-8"), MUTATIONS[name]
    assert text.count(old) == 1, name
    mutant = types.ModuleType(f"{protocol.__package__}.mutant")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(text.replace(old, new), mutant.__name__, "exec"), vars(mutant))
    for shared, value in list(vars(explorer).items()):
        if getattr(value, "__module__", "") == protocol.__name__:
            monkeypatch.setattr(explorer, shared, getattr(mutant, shared))
    with pytest.raises((Violation, RecursionError, IndexError)):
        for scenario in QUICK:
            Explorer(SCENARIOS[scenario]).explore(most=MOST, ends=True)
