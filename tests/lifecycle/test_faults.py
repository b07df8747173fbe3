"""A rank fails, is interrupted, slow, or dies: all ranks get a result, and the job continues.

Each scenario is a fault of some ranks at points of one operation; a batch of them is one job.
:func:`check` derives the expected result from the points and the faults.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from recovery_job import (
    ALLOWANCE,
    BOUND,
    FAR,
    OFFLOAD_POINTS,
    PARALLELISM,
    RECOVER_POINTS,
    RELOAD_POINTS,
    Job,
    Seen,
    attempt,
    backend_for,
    base_store,
    interfere,
    meet,
    signalling,
    stop_interfering,
)
from sampling import sampled

import reloadpg
from reloadpg.testing import run_ranks, simulated

FAULTY = 1
VICTIM = 2
TWELVE = tuple((0, 1, 2) for _ in range(11))
"""With WORLD, twelve groups, of which all ranks are members."""

UNTOUCHED = ("offload.enter", "offload.callbacks", "offload.quiesced", "reload.enter")
"""Points before the barrier after which groups are changed."""
LAST_BARRIERS = ("offload.released", "reload.done")
NEXT = {"offload": ("offload", "reload"), "reload": ("reload",), "recover": ("recover",)}
"""What is called after a failure, unless the scenario says otherwise."""


class Injected(Exception):
    """What the tests make a rank raise."""


class Terminated(SystemExit):
    """What the tests' handler of SIGTERM raises."""


@dataclass(frozen=True)
class Scenario:
    """Faults of one operation.

    Attributes:
        faults: by rank, the point and the kind: ``raise``; ``interrupt`` or ``terminate``, by a
            signal; ``counted``, an interrupt once the arrival at that barrier counts; ``late``,
            until another rank has logged that it waits; ``hang``, until the others have raised.
        then: the operations that are called afterwards, and succeed.
    """

    faults: Mapping[int, tuple[str, str]]
    then: tuple[str, ...] = ()

    @property
    def operation(self) -> str:
        return next(iter(self.faults.values()))[0].partition(".")[0]

    @property
    def kind(self) -> str:
        """The kind of a single fault."""
        return next(iter(self.faults.values()))[1] if len(self.faults) == 1 else "several"

    @property
    def point(self) -> str:
        return next(iter(self.faults.values()))[0]

    @property
    def next(self) -> tuple[str, ...]:
        return self.then or NEXT[self.operation]

    @property
    def succeeds(self) -> bool:
        """Whether the operation completes on the ranks that are not at fault."""
        return self.kind == "late" or (self.kind == "counted" and self.point in LAST_BARRIERS)

    @property
    def untouched(self) -> bool:
        """Whether it ends before any rank changes its groups."""
        if self.kind == "counted":
            return self.point == "offload.enter"
        return self.point in UNTOUCHED


def at(point: str, kind: str = "raise", *then: str, rank: int = FAULTY) -> Scenario:
    return Scenario({rank: (point, kind)}, then)


@dataclass(frozen=True)
class Batch:
    """Scenarios of one job, one after the other."""

    scenarios: tuple[Scenario, ...]
    size: int = 4
    bound: float = FAR
    job: Mapping[str, Any] = field(default_factory=lambda: {"backend": "faulty"})


@dataclass
class Result:
    """The result of a scenario on one rank: after the operation, and at the end."""

    seen: Seen
    states: set[str]
    status: str
    untouched: bool
    refused: bool
    gone: bool
    pending: bool
    logged: list[str]
    after: list[Seen]
    sums: bool
    live: set[str]
    same: bool
    generations: set[int]
    rise: int
    cycles: int
    keys: int


def call(operation: str, seconds: float) -> Seen:
    if operation == "recover":
        return attempt(lambda: reloadpg.recover("test", timeout=seconds))
    return attempt(getattr(reloadpg, operation))


def go_through(rank: int, size: int, batch: Batch) -> list[Result]:
    """Each rank's part of a batch."""
    kinds = {scenario.kind for scenario in batch.scenarios}
    if not kinds & {"hang", "late"}:
        os.environ |= worlds.ALL_RESPOND
    job = Job(rank, bound=batch.bound, **batch.job)
    log = None
    if "late" in kinds:
        os.environ["RELOADPG_LOG_WAIT_S"] = "0.6"
        log = Log(rank)
    found = []
    for number, scenario in enumerate(batch.scenarios):
        if scenario.operation == "reload":
            reloadpg.offload()
        inner = job.inner() if scenario.operation == "offload" else []
        before, generation = job.snapshot(), reloadpg.status().generation
        if log is not None:
            log.follow(scenario)
        if rank in scenario.faults:
            bring_about(*scenario.faults[rank], number)
        seen = call(scenario.operation, batch.bound)
        states, status, pending = (
            job.states(),
            reloadpg.status().state,
            reloadpg.recovery_requested(),
        )
        untouched = job.snapshot() == before
        refused = "live" not in states and job.refused()
        gc.collect()
        gone = all(ref() is None for ref in inner) or memory_is_free()
        if scenario.kind == "hang":
            all_but_one_ended(rank, size, number)
        meet(f"ended {number}", size)
        stop_interfering()
        after = [call(name, ALLOWANCE) for name in scenario.next]
        rise = reloadpg.status().generation - generation
        cycles = reloadpg.status().cycles
        found.append(
            Result(
                seen,
                states,
                status,
                untouched,
                refused,
                gone,
                pending,
                [] if log is None else [*log.lines],
                after,
                job.sums(),
                job.states(),
                job.same(),
                job.generations(),
                rise,
                cycles,
                base_store().num_keys() - 4 * (number + 1),  # two of each meeting
            )
        )
        meet(f"continued {number}", size)
    return found


def memory_is_free() -> bool:
    """Whether a simulated accelerator, if there is one, holds no communicator's memory.

    A thread that was abandoned in a suspend may still refer to the aborted communicator.
    """
    return "sim" in dist.Backend.backend_list and simulated.stats().held_bytes == 0


def bring_about(point: str, kind: str, number: int) -> None:
    """Inject a fault on this rank."""
    actions = {
        "raise": fail,
        "interrupt": signalling(signal.SIGINT, KeyboardInterrupt()),
        "terminate": signalling(signal.SIGTERM, Terminated(143)),
        "counted": interrupt,
        "late": partial(await_key, f"test/logged/{point}"),
        "hang": partial(await_key, f"test/gave up {number}"),
    }
    interfere(point, actions[kind], "after" if kind == "counted" else "before")


def fail() -> None:
    raise Injected("injected")


def interrupt() -> None:
    raise KeyboardInterrupt


def await_key(key: str) -> None:
    base_store().clone().wait([key], timedelta(seconds=FAR))


def all_but_one_ended(rank: int, size: int, number: int) -> None:
    store = base_store().clone()
    if rank != FAULTY and store.add(f"test/seen {number}", 1) == size - 1:
        store.set(f"test/gave up {number}", "1")


class Log(logging.Handler):
    """The warnings of one operation; rank 0 notifies a late rank that the wait was logged."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.rank, self.store = rank, base_store().clone()
        self.lines: list[str] = []
        logging.getLogger("reloadpg").addHandler(self)

    def follow(self, scenario: Scenario) -> None:
        self.lines.clear()
        self.scenario = scenario

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith(f"{self.scenario.operation}, phase "):
            self.lines.append(line)
            if self.rank == 0 and names_the_cause(line):
                self.store.set(f"test/logged/{self.scenario.point}", "1")


def names_the_cause(line: str) -> bool:
    """Whether a line names the missing rank, or the group."""
    return f"missing: rank {FAULTY}" in line or "ReloadableProcessGroup" in line


# -- what must hold -------------------------------------------------------------------------------


def check(scenario: Scenario, results: list[Result]) -> None:
    """All ranks end the operation consistently, with the cause, and the next ones complete."""
    for rank, found in enumerate(results):
        if scenario.succeeds and (rank not in scenario.faults or scenario.kind == "late"):
            assert found.seen.kind == "", found
        elif rank in scenario.faults:
            check_own_error(scenario, rank, found)
        else:
            check_others_error(scenario, found)
        assert found.seen.seconds < ALLOWANCE + (BOUND if scenario.kind == "hang" else 0), found
        check_state(scenario, found)
        assert [seen.kind for seen in found.after] == [""] * len(scenario.next), found
        assert found.sums, found
        assert found.same, found
        assert found.live == {"live"}, found
        assert len(found.generations) == 1, found
    if scenario.kind == "late":
        assert any(map(names_the_cause, results[0].logged)), results[0]
    if scenario.operation != "recover":
        assert {found.rise for found in results} == {rise(scenario)}, scenario
    assert len({(*found.generations, found.cycles) for found in results}) == 1, scenario


def check_own_error(scenario: Scenario, rank: int, found: Result) -> None:
    """A faulty rank raises its own error, with the cause."""
    point, kind = scenario.faults[rank]
    own = {"interrupt": "KeyboardInterrupt", "counted": "KeyboardInterrupt"}.get(kind, "Injected")
    if scenario.kind == "several":
        assert found.seen.kind, found
    elif kind == "hang":
        assert found.seen.kind == "RendezvousTimeoutError", found
    elif kind == "terminate":
        assert found.seen.kind == "Terminated", found
    elif kind == "raise" and point[-1].isdigit():
        own = "ReleaseError" if scenario.operation == "offload" else "RebuildError"
        assert (found.seen.kind, found.seen.cause) == (own, "Injected('injected')"), found
    elif point.endswith("callbacks") and kind == "raise":
        assert (found.seen.kind, found.seen.cause) == ("ReloadpgError", "Injected('injected')")
    else:
        assert found.seen.kind == own, found


def check_others_error(scenario: Scenario, found: Result) -> None:
    """The others name a faulty rank and its error, without waiting for the timeout.

    An interrupted rank drops its groups before the others have read its error: a rank that is still
    connecting to it raises RebuildError.
    """
    seen, interrupted = found.seen, {"interrupt", "terminate", "several"}
    assert any(seen.names(rank) for rank in scenario.faults), found
    if scenario.kind == "hang":
        assert seen.kind == "RendezvousTimeoutError", found
    elif scenario.kind not in interrupted or seen.kind != "RebuildError":
        assert seen.kind == "PeerFailedError", found
        assert seen.rank in scenario.faults, found
    if scenario.kind in ("raise", "interrupt", "terminate"):
        text = {"raise": "injected", "interrupt": "KeyboardInterrupt", "terminate": "Terminated"}
        assert text[scenario.kind] in seen.text, found


def check_state(scenario: Scenario, found: Result) -> None:
    """All groups are unchanged, complete, or failed, on all ranks."""
    if scenario.succeeds:
        assert found.states == {"offloaded" if scenario.operation == "offload" else "live"}, found
    elif scenario.untouched:
        assert found.untouched, found
    else:
        assert (found.states, found.status) == ({"failed"}, "failed"), found
        assert found.refused, found
        assert found.gone or scenario.kind == "hang", found
        assert found.pending, found


def rise(scenario: Scenario) -> int:
    """The increase of the generation: one for each reload of released groups."""
    released = scenario.operation == "reload" or not scenario.untouched
    released |= scenario.succeeds
    count = 0
    if scenario.succeeds and scenario.operation == "reload":
        count, released = 1, False
    for name in scenario.next:
        if name == "reload":
            count, released = count + released, False
        else:
            released = True
    return count


# -- the table ------------------------------------------------------------------------------------

BARRIERS = (
    "offload.enter",
    "offload.quiesced",
    "offload.released",
    "reload.enter",
    "reload.rebuilt",
    "reload.done",
)
RECOVER_TWICE = (
    Scenario({0: ("recover.group1", "raise"), 3: ("recover.group1", "raise")}),
    Scenario({0: ("recover.agreed", "raise"), 3: ("recover.enter", "interrupt")}),
    Scenario({1: ("recover.check2", "raise"), 2: ("recover.done", "raise")}),
)
SUSPENDS = {"backend": "sim", "strategy": "suspend", "subgroups": ((0, 1), (1, 2), (0, 1, 2))}


def every_group(operation: str, groups: Any, parallelism: int = PARALLELISM) -> Batch:
    scenarios = tuple(at(f"{operation}.group{k}") for k in groups)
    job = {"backend": "faulty", "subgroups": TWELVE, "parallelism": parallelism}
    return Batch(scenarios, size=3, job=job)


def signals() -> Batch:
    kinds = ("interrupt", "terminate")
    points = enumerate(OFFLOAD_POINTS + RELOAD_POINTS)
    return Batch(tuple(at(point, kinds[index % 2]) for index, point in points))


BATCHES = {
    "some groups of an offload": every_group("offload", (0, 5, 11)),
    "some groups of an offload, in parallel": every_group("offload", (0, 7), 8),
    "some groups of a reload": every_group("reload", (0, 5, 11), 8),
    "each group of an offload": every_group("offload", range(12), 1),
    "each group of an offload, in parallel": every_group("offload", range(12), 8),
    "each group of a reload": every_group("reload", range(12), 1),
    "each group of a reload, in parallel": every_group("reload", range(12), 8),
    "either operation after a failure": Batch(
        (
            at("offload.group1", "raise", "reload"),
            at("offload.callbacks", "raise", "reload", "offload", "reload"),
            at("offload.released", "raise", "offload", "offload", "reload"),
            at("reload.group1", "raise", "offload", "reload"),
            at("reload.done", "raise", "offload", "offload", "reload"),
            at("reload.callbacks", "raise", "reload", "reload"),
        )
    ),
    "late ranks": Batch(
        tuple(at(p, "late", "reload") for p in OFFLOAD_POINTS if p != "offload.quiesced")
        + tuple(at(p, "late", "offload", "reload") for p in RELOAD_POINTS if p != "reload.done")
    ),
    "signals": signals(),
    "interrupts after the arrival": Batch(
        tuple(at(p, "counted", "offload", "reload") for p in BARRIERS), job={}
    ),
    "a hang": Batch((at("reload.callbacks", "hang"),), bound=BOUND, job={}),
    "hangs in a recovery": Batch(
        tuple(at(f"recover.{p}", "hang") for p in ("enter", "group2", "rebuilt")), bound=BOUND
    ),
    "a recovery": Batch((at("recover.group2"),)),
    "recoveries": Batch(tuple(at(p) for p in RECOVER_POINTS)),
    "interrupts of recoveries": Batch(
        tuple(at(p, "interrupt") for p in RECOVER_POINTS if "callbacks" not in p)
    ),
    "two ranks": Batch(
        (Scenario({1: ("recover.group2", "raise"), 2: ("recover.rebuilt", "raise")}),)
    ),
    "two ranks again": Batch(RECOVER_TWICE),
    "suspends": Batch((at("offload.suspend2"),), size=3, job=SUSPENDS),
    "resumes": Batch((at("reload.resume2"),), size=3, job=SUSPENDS),
    "an interrupt of a suspend": Batch((at("offload.suspend2", "interrupt"),), 3, job=SUSPENDS),
    "a suspend that hangs": Batch((at("offload.suspend2", "hang"),), 3, BOUND, SUSPENDS),
    "a resume that hangs": Batch((at("reload.resume2", "hang"),), 3, BOUND, SUSPENDS),
}
SLOW = ("each", "a hang", "hangs", "recoveries", "interrupts of", "two ranks again")
MATRIX = ("either", "signals", "interrupts after")


def _param(name: str) -> Any:
    marks = [pytest.mark.slow] * name.startswith(SLOW) + [pytest.mark.matrix] * name.startswith(
        MATRIX
    )
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [*map(_param, BATCHES)])
def test_all_ranks_get_a_consistent_result_and_the_job_continues(name: str) -> None:
    """Whatever happens to a rank, at any point of an operation (failures 26 and 27)."""
    batch = BATCHES[name]
    results = run_ranks(go_through, batch.size, args=(batch,), timeout=280)
    for scenario, found in zip(batch.scenarios, zip(*results, strict=True), strict=True):
        check(scenario, [*found])
    keys = [found.keys for found in results[0]]
    if len(keys) > 2 and name.startswith(("some", "each")):  # attempts leave no keys behind
        half = len(keys) // 2
        assert max(keys[half:]) <= max(keys[:half]) + 4, keys


# -- a rank that dies -----------------------------------------------------------------------------


@dataclass
class Survived:
    """The results of a survivor: of the operation, and of each recovery afterwards."""

    seen: Seen
    states: set[str]
    untouched: bool
    status: str
    recoveries: list[Seen]
    refused: bool
    pending: bool


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def all_reduce_where_one_dies(job: Job, victim: int) -> None:
    """A collective of a training step, during which one rank is killed."""
    if job.rank == victim:
        dist.all_reduce(torch.ones(1), group=job.groups[-1], async_op=True)
        die()
    dist.all_reduce(torch.ones(1), group=job.groups[-1])


def one_dies(rank: int, size: int, point: str, victim: int) -> Survived:
    operation = point.partition(".")[0]
    suspends = {"strategy": "suspend"} if point[:-1].endswith(("suspend", "resume")) else {}
    job = Job(rank, backend="sim" if suspends else backend_for(point), **suspends)
    if operation == "reload":
        reloadpg.offload()
    before = job.snapshot()
    if rank == victim and operation != "step":
        interfere(point, die)
    if operation == "step":
        seen = attempt(lambda: all_reduce_where_one_dies(job, victim))
    else:
        seen = call(operation, BOUND)
    states, untouched = job.states(), job.snapshot() == before
    status = reloadpg.status().state
    count = 0 if suspends else 2 if operation == "recover" else 1
    recoveries = [call("recover", BOUND) for _ in range(count)]
    refused = bool(recoveries) and job.refused()
    return Survived(
        seen, states, untouched, status, recoveries, refused, reloadpg.recovery_requested()
    )


DEATHS = (
    ("step", VICTIM),
    *((point, VICTIM) for point in OFFLOAD_POINTS + RELOAD_POINTS + RECOVER_POINTS),
    *((point, VICTIM) for point in ("offload.suspend2", "reload.resume2")),
    ("recover.agreed", 0),  # the rank that reads what the others report
)
DEATH_POINTS = (
    "offload.quiesced",
    "offload.released",
    "offload.suspend2",
    "reload.enter",
    "reload.group1",
    "reload.resume2",
    "recover.group3",
)
DEFAULT_DEATHS = [(point, VICTIM) for point in DEATH_POINTS]


@pytest.mark.parametrize(
    "death", sampled(DEATHS, *DEFAULT_DEATHS), ids=lambda death: f"{death[0]}-{death[1]}"
)
def test_a_rank_that_dies_is_named_within_the_timeout(death: tuple[str, int]) -> None:
    """At any point, and again by the recoveries that follow (failures 14, 26, 27)."""
    point, victim = death
    outcomes = run_ranks(one_dies, 4, args=death, timeout=280, check=False)
    assert outcomes[victim].signal == signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.exception is None
        found: Survived = outcome.result
        if point != "step":
            kinds = {"RendezvousTimeoutError", "PeerFailedError", "RebuildError"}
            assert found.seen.kind in kinds, found
            assert found.seen.names(victim), found
            untouched = point in UNTOUCHED
            assert found.untouched if untouched else found.states == {"failed"}, found
            began = "offloaded" if point == "reload.enter" else "live"
            assert found.status == (began if untouched else "failed"), found
        for last in found.recoveries[-1:]:
            assert (last.kind, last.missing) == ("RendezvousTimeoutError", (victim,)), found
            assert found.refused
            assert found.pending
        assert max(s.seconds for s in (found.seen, *found.recoveries)) < BOUND + ALLOWANCE


def one_dies_and_one_fails(rank: int, size: int) -> Seen:
    """All ranks rebuild the last group: rank 2 dies there, and then rank 1 fails."""
    Job(rank, bound=FAR, backend="faulty")
    reloadpg.offload()
    store = base_store().clone()
    if rank == VICTIM:
        store.set("test/victim", str(os.getpid()))
    actions = {
        VICTIM: lambda: (store.wait(["test/0", "test/3"]), die()),
        FAULTY: lambda: (wait_for_death(int(store.get("test/victim"))), fail()),
    }
    interfere("reload.group3", actions.get(rank, lambda: store.set(f"test/{rank}", "here")))
    return attempt(reloadpg.reload)


def wait_for_death(pid: int) -> None:
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        assert select.select([process], [], [], FAR)[0]
        os.close(process)


def test_a_death_that_makes_another_rank_fail() -> None:
    """That failure ends the wait before the timeout, and the errors name the dead rank."""
    outcomes = run_ranks(one_dies_and_one_fails, 4, timeout=120, check=False)
    assert outcomes[VICTIM].signal == signal.SIGKILL
    for rank in (0, 1, 3):
        seen = outcomes[rank].result
        assert seen.kind == ("RebuildError" if rank == FAULTY else "PeerFailedError")
        assert seen.seconds < FAR
        assert seen.names(VICTIM), seen
    assert "injected" in outcomes[FAULTY].result.cause
