"""``retrying()`` repeats a step on all ranks, or on none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import (
    FAR,
    Injected,
    Job,
    all_reduce,
    attempt,
    fail,
    interfere,
    stop_interfering,
)

import reloadpg
from reloadpg.rendezvous import protocol
from reloadpg.testing.simulated import Fault, inject

FAULTY = 1

Log = list[tuple[int, int]]


def none(number: int, attempt: int) -> None:
    """No fault."""


def raising(at: int, times: int = 1, error: type[BaseException] = Injected) -> Callable[..., None]:
    """Raise in a step, before its collective, or after it if the number is negative."""

    def fault(number: int, attempt: int) -> None:
        if number == at and attempt <= times:
            raise error(f"injected at {at}")

    return fault


def also_in_the_recovery(number: int, attempt: int) -> None:
    if (number, attempt) == (-2, 1):
        interfere("recover.rebuilt", fail)
        fail()


def four(job: Job) -> Iterable[str]:
    return "abcd"


def loader_that_fails(job: Job) -> Iterator[str]:
    """The items of one rank raise between two steps."""
    yield "a"
    if job.rank == FAULTY:
        fail()
    yield "b"


ONCE = [(0, 1), (1, 1), (2, 1), (3, 1)]
TWICE = [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)]


@dataclass(frozen=True)
class Case:
    """A loop with a collective in each step.

    Attributes:
        fault: called on one rank with the step, negated after the collective, and the attempt.
        log: the expected attempts.
        own: the error of the faulty rank, which the errors of the others name.
        options: of ``retrying``.
        items: of the loop.
    """

    fault: Callable[[int, int], None]
    log: Log
    own: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    items: Callable[[Job], Iterable[str]] = four


BOTH = {"on": (Injected, RuntimeError)}
TWO_ATTEMPTS = {"on": lambda error: isinstance(error, Injected), "attempts": 2}
CASES = {
    "no fault": Case(none, ONCE),
    "the others fail in the collective": Case(raising(2), TWICE, options=BOTH),
    "the others have finished the step": Case(
        raising(-2, 2), [*TWICE[:4], (2, 3), (3, 1)], options={"on": Injected}
    ),
    "too many attempts": Case(
        raising(-1, 9), [(0, 1), (1, 1), (1, 2)], "Injected", options=TWO_ATTEMPTS
    ),
    "an error that on does not name": Case(
        raising(1, error=ValueError), ONCE[:2], "ValueError", options=BOTH
    ),
    "a communication error, without on": Case(raising(2, error=dist.DistNetworkError), TWICE),
    "an interrupt does not repeat the step": Case(
        raising(-1, error=KeyboardInterrupt), ONCE[:2], "KeyboardInterrupt"
    ),
    "a recovery that fails is no attempt": Case(also_in_the_recovery, TWICE, options=TWO_ATTEMPTS),
    "a loader": Case(none, ONCE[:2], "Injected", options=BOTH, items=loader_that_fails),
}


@pytest.mark.matrix
@pytest.mark.ranks(4)
def test_all_ranks_make_the_same_attempts(rank: int) -> None:
    """Ranks that had finished the step repeat it as well.

    The faulty rank raises its own error, and the errors of the others name it; the groups are live.
    """
    job = Job("gloo")
    for name, case in CASES.items():
        log: Log = []
        seen = attempt(lambda: run(job, case, log))  # noqa: B023 - called at once
        # A loader that fails ends the loop of its rank.
        own_items = rank == FAULTY and case.items is loader_that_fails
        assert log == (case.log[:-1] if own_items else case.log), (name, seen)
        if rank == FAULTY or not case.own:
            assert seen.kind == case.own, (name, seen)
        else:
            assert (seen.kind, seen.rank) == ("PeerFailedError", FAULTY), (name, seen)
            assert case.own in seen.text
        if case.own == "KeyboardInterrupt":
            reloadpg.recovery.recover("after an interrupt")
        stop_interfering()
        (generation,) = job.generations()
        job.assert_live(generation)
        job.agree(name, generation)
        job.meet(name)


def run(job: Job, case: Case, log: Log) -> None:
    for step in reloadpg.recovery.retrying(case.items(job), **case.options):
        with step as letter:
            assert letter == "abcd"[step.number]
            log.append((step.number, step.attempt))
            if job.rank == FAULTY:
                case.fault(step.number, step.attempt)
            all_reduce(job.ring)
            if job.rank == FAULTY:
                case.fault(-step.number, step.attempt)


def fail_with_work(job: Job) -> None:
    """Raise while a variable refers to a receive without a matching send, as in a pipeline."""
    work = dist.irecv(torch.ones(1), src=2, group=job.ring)
    assert work is not None
    raise Injected("in the middle of a schedule")


@pytest.mark.ranks(4)
def test_a_reference_to_pending_work_delays_no_rank(rank: int) -> None:
    """An exception refers to a frame, and so to a receive. The peers do not wait for timeouts."""
    job = Job("gloo")
    raised = []
    for step in reloadpg.recovery.retrying(range(2), on=(Injected, RuntimeError)):
        with step:
            try:
                if rank == FAULTY and step.attempt == 1 and step.number == 0:
                    try:
                        fail_with_work(job)
                    except Injected as error:
                        raise RuntimeError("of the trainer") from error
                all_reduce(job.ring)
            except RuntimeError as error:
                raised.append(str(error))
                raise
    (text,) = raised
    assert "Timed out" not in text
    assert ("of the trainer" if rank == FAULTY else "onnection") in text  # closed, or reset


@pytest.mark.ranks(2)
def test_a_second_interrupt_does_not_hide_the_first_one(rank: int) -> None:
    """The second one arrives before the other ranks are notified of the first."""
    Job("gloo", subgroups=())

    def interrupt_again(_: object) -> None:
        raise KeyboardInterrupt("again")

    def loop() -> None:
        for step in reloadpg.recovery.retrying(range(1)):
            with step:
                if rank == FAULTY:
                    raise KeyboardInterrupt("first")

    with inject(Fault("failure", "call", rank=FAULTY, call=interrupt_again)) as fault:
        seen = attempt(loop)
    assert fault.fired == (rank == FAULTY)
    assert seen.kind == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError"), seen
    assert "first" in seen.text


@pytest.mark.matrix
@pytest.mark.ranks(3)
def test_a_recovery_after_an_interrupt_that_all_ranks_know_succeeds_at_once(rank: int) -> None:
    """The others request it before the interrupted rank has read whether there is a request."""
    job = Job("gloo", subgroups=())

    def slowly(state: Any, *, see: Callable[[Any], Any] = protocol._see_pending) -> Any:
        time.sleep(1)
        return see(state)

    def loop() -> None:
        for step in reloadpg.recovery.retrying(range(1)):
            with step:
                if rank == FAULTY:
                    raise KeyboardInterrupt("once")

    with patch.object(protocol, "_see_pending", slowly):
        seen = attempt(loop)
    assert seen.kind == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError"), seen
    assert reloadpg.recovery.recover("after an interrupt").generation == 1
    job.agree("after an interrupt", 1)


@pytest.mark.matrix
@pytest.mark.ranks(3)
def test_a_rank_that_has_not_read_of_an_interrupt_leaves_its_loop(rank: int) -> None:
    """It is in its step when the others, which have left their loops, recover: it joins them after.

    If it repeated the step, it would be alone there.
    """
    job = Job("gloo", subgroups=())
    attempts = []

    def loop() -> None:
        for step in reloadpg.recovery.retrying(range(1), on=Injected):
            with step:
                attempts.append(step.attempt)
                if rank == FAULTY:
                    raise KeyboardInterrupt("once")
                if rank == 2:
                    assert attempts == [1]
                    while not reloadpg.recovery.recovery_requested():
                        time.sleep(0.05)
                    fail()

    seen = attempt(loop)
    assert seen.kind == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError"), seen
    assert attempts == [1]
    assert "once" in seen.text
    assert reloadpg.recovery.recover("after an interrupt").generation == 1
    job.agree("after an interrupt", 1)


@pytest.mark.ranks(2)
def test_an_interrupt_before_an_offload_of_the_step_ends_the_loop_at_once(rank: int) -> None:
    """The other rank waits for it in the offload, and not in a recovery afterwards."""
    job = Job("gloo", subgroups=())

    def loop() -> None:
        for step in reloadpg.recovery.retrying(range(1), timeout=3):
            with step:
                if rank == FAULTY:
                    raise KeyboardInterrupt("once")
                reloadpg.offload()

    seen = attempt(loop)
    assert seen.kind == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError"), seen
    assert "once" in seen.text
    job.assert_live(0)


class Interrupting:
    """A part of the state that interrupts the snapshot of the second step."""

    def __init__(self) -> None:
        self.snapshots = 0

    def state_dict(self) -> dict[str, int]:
        self.snapshots += 1
        if self.snapshots == 2:
            raise KeyboardInterrupt
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to restore."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["items", "state", "barrier"])
def test_an_interrupt_outside_of_the_block_is_notified(rank: int, place: str) -> None:
    """While the next item is drawn, the state is copied, or the rank ends the step."""
    job = Job("gloo", subgroups=())

    def interrupt() -> None:
        raise KeyboardInterrupt

    def items() -> Iterator[int]:
        yield 0
        if rank == FAULTY and place == "items":
            interrupt()
        yield 1

    def loop() -> None:
        state = (Interrupting(),) if rank == FAULTY and place == "state" else ()
        for step in reloadpg.recovery.retrying(items(), state=state):
            with step as number:
                if rank == FAULTY and place == "barrier" and number == 1:
                    interfere("step.enter", interrupt)

    seen = attempt(loop)
    if rank == FAULTY:
        assert seen.kind == "KeyboardInterrupt"
    else:
        assert (seen.kind, seen.rank) == ("PeerFailedError", FAULTY), seen
        assert "KeyboardInterrupt" in seen.text
    job.meet("the loop has ended")
    reloadpg.recovery.recover("after an interrupt")
    job.assert_live()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_loop_waits_once_for_a_rank_that_takes_no_part_in_a_recovery(
    rank: int, interrupted: bool
) -> None:
    """Its process may have ended, or was interrupted in the step: the loop raises and names it."""
    os.environ |= worlds.SILENCE
    job = Job("gloo", subgroups=())
    operations: list[str] = []
    reloadpg.on_report(lambda report: operations.append(report.operation))

    def loop() -> None:
        timeout = FAR if interrupted else 1.0
        for step in reloadpg.recovery.retrying(range(1), on=Injected, timeout=timeout):
            with step:
                if rank == FAULTY:
                    raise KeyboardInterrupt
                fail()

    if rank != FAULTY or interrupted:
        seen = attempt(loop)
    if rank != FAULTY:
        expected = "PeerFailedError" if interrupted else "RendezvousTimeoutError"
        assert (seen.kind, seen.names(FAULTY)) == (expected, True), seen
        # It begins no recovery if it has news of the interrupt before.
        assert operations == ["recover"] or (interrupted and not operations)
    job.meet("the loop has ended")


def test_a_step_that_is_not_entered_raises() -> None:
    """Otherwise the end of the step would be unknown."""
    with pytest.raises(reloadpg.ReloadpgError, match="context manager"):
        for step in reloadpg.recovery.retrying(range(2)):
            assert repr(step) == "<Step 0, attempt 1, open>"


@pytest.mark.parametrize("attempts", [0, -1, True, 1.5])
def test_attempts_must_be_a_positive_integer(attempts: Any) -> None:
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="attempts"):
        reloadpg.recovery.retrying(range(2), attempts=attempts)


@pytest.mark.parametrize("replicas", [5, "x", [-1], [0, "1"]])
def test_replicas_must_be_ranks(replicas: Any) -> None:
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="replicas"):
        reloadpg.recovery.retrying(range(2), state=torch.nn.Linear(1, 1), replicas=replicas)
