"""``retrying()`` repeats a step on all ranks, or on none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_job import FaultJob, all_reduce
from recovery_job import Seen, attempt, interfere, stop_interfering

import reloadpg
from reloadpg.testing import run_ranks

FAULTY = 1

Log = list[tuple[int, int]]


class Injected(Exception):
    """The injected error."""


def steps(job: FaultJob, fault: Callable[[int, int], object], **options: Any) -> tuple[Seen, Log]:
    """Run four steps with a collective each; return the error and the attempts."""
    log: Log = []

    def run() -> None:
        for step in reloadpg.retrying("abcd", **options):
            with step as letter:
                assert letter == "abcd"[step.number]
                log.append((step.number, step.attempt))
                if job.rank == FAULTY:
                    fault(step.number, step.attempt)
                all_reduce(job.ring)
                if job.rank == FAULTY:
                    fault(-step.number, step.attempt)

    return attempt(run), log


def raising(at: int, times: int = 1, error: type[BaseException] = Injected) -> Callable[..., None]:
    """A fault at a step, before its collective; after it if the number is negative."""

    def fault(number: int, attempt: int) -> None:
        if number == at and attempt <= times:
            raise error(f"injected at {at}")

    return fault


def none(number: int, attempt: int) -> None:
    """No fault."""


def fault_before(job: FaultJob) -> tuple[Seen, Log]:
    """The other ranks fail in the collective of the step."""
    return steps(job, raising(2), on=(Injected, RuntimeError))


def fault_after(job: FaultJob) -> tuple[Seen, Log]:
    """The other ranks have finished the step, and wait for this one."""
    return steps(job, raising(-2, 2), on=Injected)


def too_many(job: FaultJob) -> tuple[Seen, Log]:
    """A step that never succeeds."""
    return steps(job, raising(-1, 9), attempts=2, on=lambda error: isinstance(error, Injected))


def own_error(job: FaultJob) -> tuple[Seen, Log]:
    """An error that ``on`` does not name, while the other ranks wait in a collective."""
    return steps(job, raising(1, error=ValueError), on=(Injected, RuntimeError))


def backend_errors(job: FaultJob) -> tuple[Seen, Log]:
    """Without ``on``, communication errors repeat the step."""

    def fault(number: int, attempt: int) -> None:
        if (number, attempt) == (2, 1):
            raise dist.DistNetworkError("injected")

    return steps(job, fault)


def interrupted(job: FaultJob) -> tuple[Seen, Log]:
    """An interrupt does not repeat the step: the other ranks raise at once."""
    seen = steps(job, raising(-1, error=KeyboardInterrupt))
    reloadpg.recover("after an interrupt")
    return seen


def recovery_fails(job: FaultJob) -> tuple[Seen, Log]:
    """A recovery that fails is repeated, and does not count as an attempt."""
    if job.rank == FAULTY:
        interfere("recover.rebuilt", _raise)
    try:
        return steps(job, raising(-2), on=Injected, attempts=2)
    finally:
        stop_interfering()


def items_fail(job: FaultJob) -> tuple[Seen, Log]:
    """The loader of one rank raises between two steps."""
    log: Log = []

    def items() -> Iterator[int]:
        yield 0
        if job.rank == FAULTY:
            raise Injected("in the loader")
        yield 1

    def run() -> None:
        for step in reloadpg.retrying(items(), on=(Injected, RuntimeError)):
            with step:
                log.append((step.number, step.attempt))
                all_reduce(job.ring)

    return attempt(run), log


def no_fault(job: FaultJob) -> tuple[Seen, Log]:
    return steps(job, none)


CASES = (
    no_fault,
    fault_before,
    fault_after,
    too_many,
    own_error,
    backend_errors,
    interrupted,
    recovery_fails,
    items_fail,
)


def _raise() -> None:
    raise Injected("in the recovery")


def every_case(rank: int, size: int) -> dict[str, Any]:
    job = FaultJob(rank, size)
    found: dict[str, Any] = {}
    for case in CASES:
        seen, log = case(job)
        found[case.__name__] = {
            "seen": seen,
            "log": log,
            "generation": job.ring.generation,
            "sums": job.sums(),
        }
    dist.destroy_process_group(job.ring)
    return found


ONCE = [(0, 1), (1, 1), (2, 1), (3, 1)]

EXPECTED: dict[str, tuple[Log, str, str]] = {
    # the attempts, and what the faulty rank and the others raise
    "no_fault": (ONCE, "", ""),
    "fault_before": ([(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)], "", ""),
    "fault_after": ([(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 1)], "", ""),
    "too_many": ([(0, 1), (1, 1), (1, 2)], "Injected", "PeerFailedError"),
    "own_error": ([(0, 1), (1, 1)], "ValueError", "PeerFailedError"),
    "backend_errors": ([(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)], "", ""),
    "interrupted": ([(0, 1), (1, 1)], "KeyboardInterrupt", "PeerFailedError"),
    "recovery_fails": ([(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)], "", ""),
    "items_fail": ([(0, 1), (1, 1)], "Injected", "PeerFailedError"),
}


@pytest.mark.matrix
def test_all_ranks_make_the_same_attempts() -> None:
    """Whatever happens on one rank, also on ranks that had finished the step.

    That rank raises its own error, and the errors of the others name it; the groups are live.
    """
    cases = run_ranks(every_case, 4, timeout=280)
    for case, (log, own, others) in EXPECTED.items():
        for rank, found in enumerate(result[case] for result in cases):
            seen, faulty = found["seen"], rank == FAULTY
            # A loader that fails ends its own loop.
            assert found["log"] == (log[:-1] if case == "items_fail" and faulty else log), seen
            assert seen.kind == (own if faulty else others), (case, rank, seen)
            if others and not faulty:
                assert seen.rank == FAULTY
                assert own in seen.text
            assert found["sums"], case
            assert found["generation"] == cases[0][case]["generation"]


def fail_with_work(job: FaultJob) -> None:
    """Raise while a variable refers to a receive that no peer serves, as in a pipeline."""
    work = dist.irecv(torch.ones(1), src=2, group=job.ring)
    assert work is not None
    raise Injected("in the middle of a schedule")


@pytest.mark.ranks(4)
def test_a_reference_to_pending_work_delays_no_rank(rank: int, world_size: int) -> None:
    """An exception refers to the function's variables, and so to a receive that the function began.
    The peers do not wait for their timeouts.
    """
    job = FaultJob(rank, world_size)
    raised = []
    for step in reloadpg.retrying(range(2), on=(Injected, RuntimeError)):
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


def test_a_step_that_is_not_entered_raises() -> None:
    """Its end would be unknown."""
    with pytest.raises(reloadpg.ReloadpgError, match="context manager"):
        for step in reloadpg.retrying(range(2)):
            assert repr(step) == "<Step 0, attempt 1, open>"


@pytest.mark.parametrize("attempts", [0, -1, True, 1.5])
def test_attempts_must_be_a_positive_integer(attempts: Any) -> None:
    with pytest.raises(reloadpg.InvalidOptionError, match="attempts"):
        reloadpg.retrying(range(2), attempts=attempts)
