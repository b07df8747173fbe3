"""A rank fails, is interrupted, is slow, or dies: all ranks get a result, and the job continues.

A scenario injects faults in some ranks at points of one operation; a batch of scenarios is one job.
Each rank derives the expected result from the points and the faults, and checks it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import (
    ALLOWANCE,
    BOUND,
    FAR,
    OFFLOAD_POINTS,
    PARALLELISM,
    RECOVER_POINTS,
    RELOAD_POINTS,
    TRIANGLE,
    Job,
    Seen,
    attempt,
    await_death,
    backend_for,
    base_store,
    die,
    eventually,
    fail,
    interfere,
    meet,
    signalling,
    stop_interfering,
    survivors,
)
from helpers.sampling import sampled

import reloadpg
from reloadpg.testing import simulated

FAULTY = 1
VICTIM = 2
TWELVE = tuple((0, 1, 2) for _ in range(11))
"""With WORLD, twelve groups, of which all ranks are members."""

UNTOUCHED = ("offload.enter", "offload.callbacks", "reload.enter")
"""Points before the first change of a group."""
LAST_BARRIERS = ("offload.released", "reload.done")
NEXT = {"offload": ("offload", "reload"), "reload": ("reload",), "recover": ("recover",)}
"""The calls after a failure, unless the scenario specifies others."""


class Terminated(SystemExit):
    """Raised by the tests' handler of SIGTERM."""


@dataclass(frozen=True)
class Scenario:
    """Faults of one operation.

    Attributes:
        faults: by rank, the point and the kind: ``raise``; ``interrupt`` or ``terminate``, by a
            signal; ``counted``, an interrupt after the rank was counted at that barrier; ``late``,
            until another rank has logged that it waits; ``hang``, until the others have raised.
        then: the operations that are called afterwards, and succeed.
        again: the point at which a second signal interrupts the faulty ranks: while they notify the
            others of the ``failure``, or in the first ``release`` of a simulated communicator.
    """

    faults: Mapping[int, tuple[str, str]]
    then: tuple[str, ...] = ()
    again: Literal["", "failure", "release"] = ""

    @property
    def operation(self) -> str:
        return self.point.partition(".")[0]

    @property
    def kind(self) -> str:
        """The kind of a single fault."""
        if len(self.faults) > 1 or self.again:
            return "several"
        return next(iter(self.faults.values()))[1]

    @property
    def point(self) -> str:
        return next(iter(self.faults.values()))[0]

    @property
    def next(self) -> tuple[str, ...]:
        return self.then or NEXT[self.operation]

    @property
    def end(self) -> Literal["completed", "unchanged", "failed"]:
        """The result for all groups. Unless it is ``completed``, the other ranks get an error."""
        counted = self.kind == "counted"
        if self.kind == "late" or (counted and self.point in LAST_BARRIERS):
            return "completed"
        return "unchanged" if not counted and self.point in UNTOUCHED else "failed"

    @property
    def rise(self) -> int:
        """The increase of the generation, one per reload of released groups."""
        released = self.operation == "reload" or self.end != "unchanged"
        count = 0
        if self.end == "completed" and self.operation == "reload":
            count, released = 1, False
        for name in self.next:
            if name == "reload":
                count, released = count + released, False
            else:
                released = True
        return count


def at(point: str, kind: str = "raise", *then: str, rank: int = FAULTY) -> Scenario:
    return Scenario({rank: (point, kind)}, then)


@dataclass(frozen=True)
class Batch:
    """Scenarios that run one after the other in one job."""

    scenarios: tuple[Scenario, ...]
    size: int = 4
    bound: float = FAR
    job: Mapping[str, Any] = field(default_factory=lambda: {"backend": "faulty"})


def call(operation: str, seconds: float) -> Seen:
    if operation == "recover":
        return attempt(lambda: reloadpg.recovery.recover("test", timeout=seconds))
    return attempt(getattr(reloadpg, operation))


def go_through(job: Job, scenario: Scenario, number: int, bound: float) -> None:
    """Run one rank of a scenario; check the groups, and that the next calls succeed."""
    if scenario.operation == "reload":
        reloadpg.offload()
    inner = job.inner() if scenario.operation == "offload" else []
    before, generation = job.snapshot(), reloadpg.status().generation
    if job.rank in scenario.faults:
        bring_about(scenario, *scenario.faults[job.rank], number)
    seen = call(scenario.operation, bound)
    check_error(scenario, job.rank, seen)
    if scenario.end == "completed":
        assert job.states() == {"offloaded" if scenario.operation == "offload" else "live"}
    elif scenario.end == "unchanged":
        assert job.snapshot() == before
    else:
        assert (job.states(), reloadpg.status().state) == ({"failed"}, "failed")
        assert job.refused()
        assert reloadpg.recovery.recovery_requested()
        assert scenario.kind == "hang" or eventually(lambda: is_released(inner))
    if scenario.kind == "hang":
        all_but_one_ended(job, number)
    job.meet(f"ended {number}")
    stop_interfering()
    calls = scenario.operation, *scenario.next
    for name in scenario.next:
        seen = call(name, ALLOWANCE)
        assert seen.kind == "", (name, seen)
    if "recover" not in calls:
        assert reloadpg.status().generation - generation == scenario.rise
    if on_sim() and calls[-1] == "recover":
        job.assert_memory()  # the canary has connected all groups
    job.assert_live()
    if on_sim():
        job.assert_memory()
    assert len(job.generations()) == 1
    job.agree(f"{number}", (job.generations(), reloadpg.status().cycles))


def on_sim() -> bool:
    return dist.get_backend() == "sim"


def is_released(inner: list[weakref.ref[Any]]) -> bool:
    """Whether these communicators are gone, or hold no memory of a simulated accelerator."""
    gc.collect()
    gone = all(ref() is None for ref in inner)
    return gone or (on_sim() and simulated.stats().held_bytes == 0)


def bring_about(scenario: Scenario, point: str, kind: str, number: int) -> None:
    """Inject a fault on this rank."""
    interrupt = signalling(signal.SIGINT, KeyboardInterrupt())
    actions = {
        "raise": fail,
        "interrupt": interrupt,
        "terminate": signalling(signal.SIGTERM, Terminated(143)),
        "counted": interrupt,
        "late": partial(await_key, f"test/logged/{point}"),
        "hang": partial(await_key, f"test/gave up {number}"),
    }
    interfere(point, actions[kind], "after" if kind == "counted" else "before")
    if scenario.again:
        simulated.inject(simulated.Fault(scenario.again, "call", call=lambda _: interrupt()))


def await_key(key: str) -> None:
    base_store().clone().wait([key], timedelta(seconds=FAR))


def all_but_one_ended(job: Job, number: int) -> None:
    store = base_store().clone()
    if job.rank != FAULTY and store.add(f"test/seen {number}", 1) == job.size - 1:
        store.set(f"test/gave up {number}", "1")


class Log(logging.Handler):
    """The warnings of an operation. Rank 0 notifies a late rank once its wait was logged."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.rank, self.store = rank, base_store().clone()
        logging.getLogger("reloadpg").addHandler(self)

    def follow(self, scenario: Scenario) -> None:
        self.scenario, self.names_the_cause = scenario, False

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line that names the missing rank, or the group."""
        line = record.getMessage()
        names = f"missing: rank {FAULTY}" in line or "ReloadableProcessGroup" in line
        if names and line.startswith(f"{self.scenario.operation}, phase "):
            self.names_the_cause = True
            if self.rank == 0:
                self.store.set(f"test/logged/{self.scenario.point}", "1")


# -- errors ---------------------------------------------------------------------------------------


def check_error(scenario: Scenario, rank: int, seen: Seen) -> None:
    """Check that each rank raises an error with the cause, or completes the operation."""
    if scenario.end == "completed" and (rank not in scenario.faults or scenario.kind == "late"):
        assert seen.kind == "", seen
    elif rank in scenario.faults:
        check_own_error(scenario, rank, seen)
    else:
        check_others_error(scenario, seen)
    assert seen.seconds < ALLOWANCE + (BOUND if scenario.kind == "hang" else 0), seen


def check_own_error(scenario: Scenario, rank: int, seen: Seen) -> None:
    """Check that a faulty rank raises its own error, with the cause."""
    point, kind = scenario.faults[rank]
    own = {"interrupt": "KeyboardInterrupt", "counted": "KeyboardInterrupt"}.get(kind, "Injected")
    if scenario.kind == "several":
        assert seen.kind, seen
    elif kind == "hang":
        assert seen.kind == "RendezvousTimeoutError", seen
    elif kind == "terminate":
        assert seen.kind == "Terminated", seen
    elif kind == "raise" and point[-1].isdigit():
        own = "ReleaseError" if scenario.operation == "offload" else "RebuildError"
        assert (seen.kind, seen.cause) == (own, "Injected('injected')"), seen
    elif point.endswith("callbacks") and kind == "raise":
        assert (seen.kind, seen.cause) == ("ReloadpgError", "Injected('injected')")
    else:
        assert seen.kind == own, seen


def check_others_error(scenario: Scenario, seen: Seen) -> None:
    """Check that another rank names a faulty rank and its error.

    An interrupted rank drops its groups before the others have read its error, so a rank that is
    still connecting to it raises RebuildError.
    """
    interrupted = {"interrupt", "terminate", "several"}
    assert any(seen.names(rank) for rank in scenario.faults), seen
    if scenario.kind == "hang":
        assert seen.kind == "RendezvousTimeoutError", seen
    elif scenario.kind not in interrupted or seen.kind != "RebuildError":
        assert seen.kind == "PeerFailedError", seen
        assert seen.rank in scenario.faults, seen
    if scenario.kind in ("raise", "interrupt", "terminate"):
        text = {"raise": "injected", "interrupt": "KeyboardInterrupt", "terminate": "Terminated"}
        assert text[scenario.kind] in seen.text, seen


# -- the table ------------------------------------------------------------------------------------

BARRIERS = (
    "offload.enter",
    "offload.released",
    "reload.enter",
    "reload.done",
)
LATE = {"offload": ("reload",), "reload": ("offload", "reload")}
"""The calls after an operation that a late rank completes."""
RECOVER_TWICE = (
    Scenario({0: ("recover.group1", "raise"), 3: ("recover.group1", "raise")}),
    Scenario({0: ("recover.agreed", "raise"), 3: ("recover.enter", "interrupt")}),
    Scenario({1: ("recover.check2", "raise"), 2: ("recover.done", "raise")}),
)
SIM = {"backend": "sim"}
ON_AN_ACCELERATOR = (
    *(at(f"recover.{p}") for p in ("group2", "group0", "connect1", "check1")),
    at("offload.group1", "raise", "recover"),
)


def every_group(operation: str, groups: Any, parallelism: int = PARALLELISM) -> Batch:
    scenarios = tuple(at(f"{operation}.group{k}") for k in groups)
    job = {"backend": "faulty", "subgroups": TWELVE, "parallelism": parallelism}
    return Batch(scenarios, size=3, job=job)


def late(*points: str) -> Batch:
    return Batch(tuple(at(p, "late", *LATE[p.partition(".")[0]]) for p in points))


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
        )
    ),
    "late ranks": late("offload.enter", "offload.group3", "reload.group0"),
    "late ranks at every point": late(
        *(p for p in OFFLOAD_POINTS + RELOAD_POINTS if p != "reload.done")
    ),
    "signals": signals(),
    "interrupts after the arrival": Batch(
        tuple(at(p, "counted", "offload", "reload") for p in BARRIERS), job={}
    ),
    "second interrupts": Batch(
        (
            Scenario({FAULTY: ("reload.group1", "raise")}, again="failure"),
            Scenario({FAULTY: ("reload.group1", "raise")}, again="release"),
        ),
        size=3,
        job={**SIM, "subgroups": TRIANGLE},
    ),
    "a hang": Batch((at("reload.group1", "hang"),), bound=BOUND, job={}),
    "hangs in a recovery": Batch(
        tuple(at(f"recover.{p}", "hang") for p in ("enter", "group2", "done")), bound=BOUND
    ),
    "a recovery": Batch((at("recover.group2"), at("offload.group0", "raise", "recover"))),
    "recoveries": Batch(tuple(at(p) for p in RECOVER_POINTS)),
    "interrupts of recoveries": Batch(tuple(at(p, "interrupt") for p in RECOVER_POINTS)),
    "two ranks": Batch((Scenario({1: ("recover.group2", "raise"), 2: ("recover.done", "raise")}),)),
    "two ranks again": Batch(RECOVER_TWICE),
    "an accelerator": Batch(ON_AN_ACCELERATOR[:1], job={**SIM, "parallelism": 8}),
    "all of an accelerator": Batch(ON_AN_ACCELERATOR, job={**SIM, "parallelism": 1}),
    "all of an accelerator, in parallel": Batch(ON_AN_ACCELERATOR, job={**SIM, "parallelism": 8}),
}
SLOW = (
    "some",
    "each",
    "late rank",
    "a hang",
    "hangs",
    "recoveries",
    "interrupts of",
    "two ranks again",
    "all of",
)
MATRIX = ("either", "signals", "interrupts after")


def _param(name: str, batch: Batch) -> Any:
    marks = [pytest.mark.ranks(batch.size)]
    marks += [pytest.mark.slow] * name.startswith(SLOW)
    marks += [pytest.mark.matrix] * name.startswith(MATRIX)
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [_param(*item) for item in BATCHES.items()])
def test_all_ranks_get_a_consistent_result_and_the_job_continues(rank: int, name: str) -> None:
    """The fault may be of any kind, at any point of an operation (failures 26 and 27)."""
    batch = BATCHES[name]
    kinds = {scenario.kind for scenario in batch.scenarios}
    if "hang" in kinds:
        os.environ |= worlds.SILENCE
    if "late" in kinds:
        os.environ["RELOADPG_LOG_WAIT_S"] = "0.6"
    job = Job(timeout=batch.bound, **{"parallelism": PARALLELISM, **batch.job})
    log, keys = Log(rank), []
    for number, scenario in enumerate(batch.scenarios):
        log.follow(scenario)
        go_through(job, scenario, number, batch.bound)
        assert scenario.kind != "late" or rank > 0 or log.names_the_cause
        keys.append(base_store().num_keys() - 5 * number)  # the test itself writes five keys
        job.meet(f"continued {number}")
    if len(keys) > 2 and name.startswith(("some", "each")):  # keys do not accumulate
        half = len(keys) // 2
        assert max(keys[half:]) <= max(keys[:half]) + 4, keys


@pytest.mark.ranks(4)
def test_a_group_that_connects_after_a_failure_stays_until_the_others_are_notified(
    rank: int,
) -> None:
    """Otherwise a peer that connects to it raises that, and not the error of the rank that failed.

    Rank 1 fails in one creation, and connects another group while it notifies the others.
    """
    job = Job("sim", parallelism=8)
    connecting, failing, connected = threading.Event(), threading.Event(), threading.Event()
    released: list[int] = []

    def count() -> int:
        return simulated.stats().released

    def fail_while_another_connects(_: object) -> None:
        assert connecting.wait(ALLOWANCE)
        fail()

    def connect_late(_: object) -> None:
        connecting.set()
        assert failing.wait(ALLOWANCE)

    def notify_late(_: object) -> None:
        before = count()
        failing.set()
        assert connected.wait(ALLOWANCE)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            released.append(count() - before)
            time.sleep(0.01)

    if rank == FAULTY:
        for fault in (
            simulated.Fault("create", "call", nth=3, call=fail_while_another_connects),
            simulated.Fault("connect", "call", nth=2, times=2, call=connect_late),
            simulated.Fault(
                "connect", "call", nth=2, moment="after", call=lambda _: connected.set()
            ),
            simulated.Fault("failure", "call", call=notify_late),
        ):
            simulated.inject(fault)
    seen = attempt(lambda: reloadpg.recovery.recover("test", timeout=FAR))
    assert seen.kind == ("RebuildError" if rank == FAULTY else "PeerFailedError"), seen
    assert "injected" in seen.text
    assert set(released) == ({0} if rank == FAULTY else set())
    job.meet("ended")
    stop_interfering()
    reloadpg.recovery.recover("test", timeout=ALLOWANCE)
    job.assert_live()
    job.assert_memory()


# -- dead ranks -----------------------------------------------------------------------------------


def one_dies(rank: int, size: int, point: str, victim: int) -> None:
    """One rank dies; the others raise in the operation and in later recoveries, and name it."""
    os.environ |= worlds.SILENCE
    operation = point.partition(".")[0]
    backend = backend_for(point)
    job = Job(backend, timeout=BOUND, parallelism=PARALLELISM)
    if operation == "reload":
        reloadpg.offload()
    before = job.snapshot()
    if operation == "step":
        seen = attempt(lambda: all_reduce_where_one_dies(job, victim))
    else:
        if rank == victim:
            interfere(point, die)
        seen = call(operation, BOUND)
        assert seen.kind in {"RendezvousTimeoutError", "PeerFailedError", "RebuildError"}, seen
        assert seen.names(victim), seen
        untouched = point in UNTOUCHED
        assert job.snapshot() == before if untouched else job.states() == {"failed"}
        began = "offloaded" if point == "reload.enter" else "live"
        assert reloadpg.status().state == (began if untouched else "failed")
    assert seen.seconds < BOUND + ALLOWANCE
    for number in range(2 if operation in ("recover", "step") else 1):
        if number or operation != "step":  # a collective may end only when others recover
            meet(f"survivors {number}", size - 1)
        seen = call("recover", BOUND)
        assert seen.seconds < BOUND + ALLOWANCE
    assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (victim,)), seen
    assert job.refused()
    assert reloadpg.recovery.recovery_requested()


def all_reduce_where_one_dies(job: Job, victim: int) -> None:
    """A collective of a training step, during which one rank is killed."""
    if job.rank == victim:
        dist.all_reduce(torch.ones(1), group=job.ring, async_op=True)
        die()
    dist.all_reduce(torch.ones(1), group=job.ring)


DEATHS = (
    ("step", VICTIM),
    *((point, VICTIM) for point in OFFLOAD_POINTS + RELOAD_POINTS + RECOVER_POINTS),
    ("recover.agreed", 0),  # the rank that reads the reports of the others
)
DEFAULT_DEATHS = [("offload.released", VICTIM)]


@pytest.mark.parametrize(
    "death", sampled(DEATHS, *DEFAULT_DEATHS), ids=lambda death: f"{death[0]}-{death[1]}"
)
def test_a_rank_that_dies_is_named_within_the_timeout(death: tuple[str, int]) -> None:
    """It may die at any point; later recoveries name it as well (failures 14, 26, 27)."""
    survivors(one_dies, 4, *death, dead=death[1])


def one_dies_and_one_fails(rank: int, size: int) -> None:
    """While all ranks rebuild the last group, rank 2 dies, and then rank 1 fails."""
    Job("faulty", parallelism=PARALLELISM)
    reloadpg.offload()
    store = base_store().clone()
    if rank == VICTIM:
        store.set("test/victim", str(os.getpid()))
    actions = {
        VICTIM: lambda: (store.wait(["test/0", "test/3"]), die()),
        FAULTY: lambda: (await_death(int(store.get("test/victim"))), fail()),
    }
    interfere("reload.group3", actions.get(rank, lambda: store.set(f"test/{rank}", "here")))
    seen = attempt(reloadpg.reload)
    # With several groups at a time, others may still connect to rank 2 when it dies.
    others = {"PeerFailedError"} | ({"RebuildError"} if PARALLELISM > 1 else set())
    assert seen.kind in ({"RebuildError"} if rank == FAULTY else others), seen
    assert rank != FAULTY or PARALLELISM > 1 or "injected" in seen.cause
    assert seen.seconds < FAR
    assert seen.names(VICTIM), seen


def test_a_death_that_makes_another_rank_fail() -> None:
    """That failure ends the wait before the timeout, and the errors name the dead rank."""
    survivors(one_dies_and_one_fails, 4, dead=VICTIM)
