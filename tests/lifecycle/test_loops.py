"""Several loops of ``retrying()`` in one program, and loops that end early."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers.fault_job import Injected, Job, all_reduce, attempt
from helpers.replacing import RANKS, VICTIM, die, incarnation, run_replaced

import reloadpg

FAULTY = 1

Log = list[str]


class Body:
    """The body of each step: record its name, and run a collective. One step fails once."""

    def __init__(self, job: Any, fails_at: str = "") -> None:
        self.job = job
        self.log: Log = []
        self._fails_at = fails_at

    def __call__(self, where: str) -> None:
        self.log.append(where)
        if self.job.rank == FAULTY and self._fails_at == where:
            self._fails_at = ""
            raise Injected(where)
        all_reduce(self.job.ring)


def steps(items: Any, **options: Any) -> Iterator[Any]:
    """Yield the steps of a loop that repeats after an injected error."""
    return reloadpg.recovery.retrying(items, on=(Injected, RuntimeError), **options)


def evaluation_between_steps(body: Body) -> None:
    """A loop between the steps of another one, such as an evaluation."""
    for step in steps(range(4)):
        with step as number:
            body(f"train{number}")
        if number % 2 and body.log[-1] == f"train{number}":
            for inner in steps(range(2)):
                with inner as batch:
                    body(f"eval{number}.{batch}")


def evaluation_in_a_step(body: Body) -> None:
    """A loop in a step of another one: its steps are parts of that step."""
    for step in steps(range(3)):
        with step as number:
            body(f"train{number}")
            for inner in steps(range(2)):
                with inner as batch:
                    body(f"eval{number}.{batch}")


def in_turn(body: Body) -> None:
    """Two loops that are advanced in turn."""
    first, second = steps(range(3)), steps(range(3))
    for number in range(3):
        for name, loop in (("a", first), ("b", second)):
            while True:
                step = next(loop)
                with step:
                    body(f"{name}{number}")
                if body.log[-1] == f"{name}{number}" and step.complete:
                    break


BETWEEN = ["train0", "train1", "eval1.0", "eval1.1", "train2", "train3", "eval3.0", "eval3.1"]
INSIDE = [f"{part}" for n in range(3) for part in (f"train{n}", f"eval{n}.0", f"eval{n}.1")]
TURNS = ["a0", "b0", "a1", "b1", "a2", "b2"]

PROGRAMS: dict[Callable[[Body], None], list[tuple[str, Log]]] = {
    evaluation_between_steps: [
        ("", BETWEEN),
        ("eval1.1", [*BETWEEN[:4], *BETWEEN[3:]]),
        ("train2", [*BETWEEN[:5], *BETWEEN[4:]]),
    ],
    evaluation_in_a_step: [
        ("", INSIDE),
        ("eval1.1", [*INSIDE[:6], *INSIDE[3:]]),
    ],
    in_turn: [
        ("", TURNS),
        ("b1", [*TURNS[:4], *TURNS[3:]]),
    ],
}
CASES = [(program, *case) for program, cases in PROGRAMS.items() for case in cases]


@pytest.mark.matrix
@pytest.mark.ranks(4)
def test_several_loops() -> None:
    """Each step of each loop is completed; after a fault all ranks repeat the failed step."""
    job = Job("gloo")
    for program, fails_at, expected in CASES:
        body = Body(job, fails_at)
        program(body)
        assert body.log == expected, (program.__name__, fails_at)


@pytest.mark.ranks(2)
def test_steps_that_a_fault_could_not_repeat_raise() -> None:
    """Steps of two loops that overlap, and a step that is entered again. The groups are live."""
    job = Job("gloo", subgroups=())

    def overlap() -> None:
        for first, second in zip(steps("ab"), steps("ab"), strict=True):
            with first, second:
                pytest.fail("the second step was entered")

    def again() -> None:
        for step in steps("ab"):
            with step:
                pass
            with step:
                pytest.fail("the step was entered again")

    for program, message in ((overlap, "in a step of another loop"), (again, "a second time")):
        seen = attempt(program)
        assert (seen.kind, message in seen.text) == ("ReloadpgError", True), seen
        assert job.sums()


# -- loops that end early --------------------------------------------------------------------------


def leaves(body: Body, way: str) -> str:
    """One rank raises at the end of a step; the others leave the loop, in the step or after it."""
    for step in steps("ab"):
        with step:
            body("step")
            if body.job.rank == FAULTY:
                raise Injected("at the end of the step")
            if way == "break in the step":
                break
            if way == "return in the step":
                return "left"
        if body.job.rank != FAULTY:
            if way == "break after the step":
                break
            raise ValueError("of the program")
    return "done"


def returns_in_a_function(body: Body) -> str:
    """Return from a function within the step, but not from the loop, which is valid."""

    def one(step: Any) -> str:
        with step:
            body("step")
            if step.attempt == 1 and body.job.rank == FAULTY:
                raise Injected("at the end of the step")
            return "left"
        return "failed"

    return [one(step) for step in steps("a")][-1]


def all_leave(body: Body) -> str:
    """All ranks leave in a step that is complete."""
    for step in steps(itertools.count()):
        with step as number:
            body("step")
            if number == 2:
                return "left"
    return "done"


LEAVING: dict[Callable[[Body], str], tuple[str, str]] = {
    # what the ranks that leave raise, and the one that goes on and detects that they have left
    **{
        partial(leaves, way=f"{way} the step"): ("ReloadpgError", "PeerFailedError")
        for way in ("break in", "return in", "break after")
    },
    partial(leaves, way="raise after the step"): ("ValueError", "PeerFailedError"),
    returns_in_a_function: ("", ""),
    all_leave: ("", ""),
}


@pytest.mark.ranks(4)
def test_leaving_an_incomplete_step_raises_on_all_ranks(rank: int) -> None:
    """Leaving a complete step is valid."""
    job = Job("gloo")
    for program, (leaver, faulty) in LEAVING.items():
        body = Body(job)
        seen = attempt(lambda: program(body))  # noqa: B023 - called at once
        assert seen.kind == (faulty if rank == FAULTY else leaver), (program, seen)
        assert job.sums()
        if seen.kind == "ReloadpgError":
            assert "left" in seen.text
            assert "step 0" in seen.text


# -- replaced processes ----------------------------------------------------------------------------


def earlier_loops(rank: int, size: int) -> Log:
    """Rank 2 dies in a loop that follows an endless one and nested ones; its step fails again."""
    reloadpg.install(backends={"gloo"}, recoverable=True, timeout=120)
    dist.init_process_group("gloo")
    reloadpg.recovery.rejoin()
    log: Log = []

    def body(where: str, step: Any) -> None:
        log.append(f"{where}.{step.attempt}")
        if (where, rank, incarnation()) == ("third2", VICTIM, 0):
            die()
        if (log[-1], rank) == ("third2.2", FAULTY):
            raise Injected
        all_reduce(dist.group.WORLD)

    for step in reloadpg.recovery.retrying(itertools.count()):
        with step as number:
            body(f"first{number}", step)
        if step.complete and number == 2:
            break
    for step in reloadpg.recovery.retrying(range(2)):
        with step as number:
            body(f"second{number}", step)
        for inner in reloadpg.recovery.retrying(range(2)):
            with inner as batch:
                body(f"inner{batch}", inner)
    for step in steps(range(4)):
        with step as number:
            body(f"third{number}", step)
    return log


def test_a_new_process_skips_completed_loops() -> None:
    """No item is drawn from them, even if they are endless or nested; attempts agree afterwards."""
    found = run_replaced(earlier_loops)
    assert found[RANKS] == ["third2.1", "third2.3", "third3.1"]
    for rank in {*range(RANKS)} - {VICTIM}:
        assert found[rank][-4:] == ["third2.1", "third2.2", "third2.3", "third3.1"]


def in_two_loops(rank: int, size: int) -> Any:
    """Rank 2 dies in a nested loop."""
    reloadpg.install(backends={"gloo"}, recoverable=True, timeout=120)
    dist.init_process_group("gloo")
    seen = attempt(reloadpg.recovery.rejoin)
    if seen.kind:
        return seen

    def run() -> None:
        for step in reloadpg.recovery.retrying(range(2)):
            with step:
                all_reduce(dist.group.WORLD)
            for inner in reloadpg.recovery.retrying(range(2)):
                with inner:
                    if (rank, step.number, incarnation()) == (VICTIM, 1, 0):
                        die()
                    all_reduce(dist.group.WORLD)

    return attempt(run)


def test_a_process_cannot_be_replaced_in_a_nested_loop() -> None:
    """It would have to repeat the body of the outer step, so all ranks raise."""
    found = run_replaced(in_two_loops)
    for rank in (0, 1, 3, RANKS):
        assert found[rank].kind in ("ReloadpgError", "PeerFailedError"), (rank, found[rank])
        assert "another loop" in found[rank].text


def fewer_items(rank: int, size: int) -> Any:
    """Rank 2 dies in its third step; the process that replaces it has one item."""
    reloadpg.install(backends={"gloo"}, recoverable=True, timeout=120)
    dist.init_process_group("gloo")
    reloadpg.recovery.rejoin()

    def run() -> None:
        for step in reloadpg.recovery.retrying(range(1 if incarnation() else 4)):
            with step as number:
                if (rank, number) == (VICTIM, 2):
                    die()
                all_reduce(dist.group.WORLD)

    return attempt(run)


def test_a_new_process_with_too_few_items_raises_on_all_ranks() -> None:
    """The error is not a bare StopIteration."""
    found = run_replaced(fewer_items)
    for rank in (0, 1, 3, RANKS):
        assert found[rank].kind == ("ReloadpgError" if rank == RANKS else "PeerFailedError")
        assert "its items end at 1, and the other ranks are at step 2" in found[rank].text


# -- errors that repeat a step --------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_an_error_that_follows_a_recovery_repeats_the_step(rank: int) -> None:
    """``on`` does not need to name it: the abort of the recovering rank has caused it."""
    job = Job("gloo")
    log = []
    for step in reloadpg.recovery.retrying("ab", on=[Injected]):
        with step as letter:
            log.append(letter)
            if rank == FAULTY and step.attempt == 1:
                raise Injected
            try:
                all_reduce(job.ring)
            except RuntimeError as error:
                raise ValueError("of a trainer") from error
    assert log == ["a", "a", "b", "b"]


def test_without_install_no_step_is_repeated() -> None:
    begun = []
    with pytest.raises(Injected):
        for step in reloadpg.recovery.retrying("ab", on=Injected):
            with step as letter:
                begun.append(letter)
                raise Injected
    assert begun == ["a"]
