"""One rank fails, is interrupted, or is slow: all ranks end alike, and the job goes on."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import moments
import pytest
from recovery_job import (
    ALLOWANCE,
    FAR,
    OFFLOAD_POINTS,
    RELOAD_POINTS,
    Job,
    attempt,
    base_store,
    interfere,
    meet,
    signalling,
    stop_interfering,
)
from sampling import sampled

import reloadpg
from reloadpg.testing import run_ranks

TWELVE = tuple((0, 1, 2) for _ in range(11))
"""With WORLD, twelve groups, of which all ranks are members."""

FAULTY = 1


class Injected(Exception):
    """What the tests make a rank raise."""


def fault() -> None:
    raise Injected("injected")


def interrupt() -> None:
    raise KeyboardInterrupt


def faults_in_every_group(
    rank: int, size: int, operation: str, places: Sequence[int], parallelism: int
) -> list[dict[str, Any]]:
    """For each of these groups: fail there on one rank, see all ranks fail, and retry."""
    moments.wait_for_answers()
    job = Job.start(rank, subgroups=TWELVE, bound=FAR, backend="faulty", parallelism=parallelism)
    found = []
    for count, k in enumerate(places):
        if operation == "reload":
            reloadpg.offload()
        inner = job.inner() if operation == "offload" else []
        if rank == FAULTY:
            interfere(f"{operation}.group{k}", fault)
        seen = attempt(getattr(reloadpg, operation))
        states, refused, status = job.states(), job.refused(), reloadpg.status().state
        gc.collect()
        gone = all(ref() is None for ref in inner)
        again = attempt(getattr(reloadpg, operation))
        if operation == "offload":
            offloaded = job.states()
            reloadpg.reload()
        else:
            offloaded = {"offloaded"}
        found.append(
            {
                "seen": seen,
                "states": states,
                "refused": refused,
                "status": status,
                "gone": gone,
                "again": again,
                "offloaded": offloaded,
                "sums": job.sums(),
                "live": job.states(),
                "generations": job.generations(),
                "keys": base_store().num_keys() - 2 * count,  # two of each meeting here
            }
        )
        meet(f"{operation}{k}", size)
    return found


@pytest.fixture(
    scope="module",
    params=sampled(
        [
            (operation, many, parallelism)
            for operation in ("offload", "reload")
            for many in ("some", "each")
            for parallelism in (1, 8)
        ],
        *(("offload", "some", 1), ("reload", "some", 8)),
    ),
    ids=lambda params: "-".join(map(str, params)),
)
def every_group(request: pytest.FixtureRequest) -> tuple[str, list[list[dict[str, Any]]]]:
    """By rank, what was seen with a fault in each group, or in the first, last, and one between."""
    operation, many, parallelism = request.param
    args = (operation, (0, 5, 11) if many == "some" else range(12), parallelism)
    return operation, run_ranks(faults_in_every_group, 3, args=args, timeout=240)


class TestFaultInEachOfTwelveGroups:
    """One rank cannot release, or rebuild, the k-th group (failures 26 and 27)."""

    def test_all_ranks_raise_long_before_the_bound(self, every_group: Any) -> None:
        """The faulty rank raises its own error with the cause, the others name it."""
        operation, results = every_group
        own = "ReleaseError" if operation == "offload" else "RebuildError"
        for k in range(len(results[0])):
            for rank, result in enumerate(results):
                seen = result[k]["seen"]
                assert seen.kind == (own if rank == FAULTY else "PeerFailedError"), (k, seen)
                assert seen.seconds < ALLOWANCE, (k, rank, seen)
                if rank == FAULTY:
                    assert seen.cause == "Injected('injected')"
                else:
                    assert seen.rank == FAULTY
                    assert "injected" in seen.text

    def test_no_group_is_half_used(self, every_group: Any) -> None:
        """Every group is failed on every rank and refuses a collective; status says so."""
        for result in every_group[1]:
            for found in result:
                assert found["states"] == {"failed"}
                assert found["refused"]
                assert found["status"] == "failed"

    def test_nothing_holds_the_old_groups(self, every_group: Any) -> None:
        """After a failed offload too, the communicators are gone."""
        assert all(found["gone"] for result in every_group[1] for found in result)

    def test_the_retry_completes(self, every_group: Any) -> None:
        """The same call again succeeds, and every group then sums over its own members."""
        for result in every_group[1]:
            for k, found in enumerate(result):
                assert found["again"].kind == "", found["again"]
                assert found["offloaded"] == {"offloaded"}
                assert found["sums"]
                assert found["live"] == {"live"}
                assert found["generations"] == {k + 1}

    def test_the_store_does_not_grow(self, every_group: Any) -> None:
        """Failed attempts leave no keys behind once a later attempt has succeeded."""
        keys = [found["keys"] for found in every_group[1][0]]
        half = len(keys) // 2
        assert max(keys[half:]) <= max(keys[:half]) + 4, keys


def names_the_cause(line: str) -> bool:
    """Whether a rank that waits says for whom, or at which group."""
    return f"missing: rank {FAULTY}" in line or "ReloadableProcessGroup" in line


def delays(rank: int, size: int) -> dict[str, Any]:
    """At every point in turn, a rank is held up until another one has logged that it waits."""
    moments.log_soon()
    job = Job.start(rank, bound=FAR, backend="faulty")
    store = base_store().clone()
    records: list[str] = []
    point = ""

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # On a busy machine the other operation, or a moment between groups, is logged too.
            line = record.getMessage()
            if line.startswith(f"{point.split('.')[0]}, phase "):
                records.append(line)
                if rank == 0 and names_the_cause(line):
                    store.set(f"test/logged/{point}", "1")

    logging.getLogger("reloadpg").addHandler(Recorder(level=logging.WARNING))
    found = {}
    for point in OFFLOAD_POINTS + RELOAD_POINTS:
        if rank == FAULTY:
            key = f"test/logged/{point}"
            interfere(point, lambda key=key: store.wait([key], timedelta(seconds=100)))
        records.clear()
        before = job.generations()
        seen = [attempt(reloadpg.offload), attempt(reloadpg.reload)]
        found[point] = {
            "seen": [call.kind for call in seen],
            "logged": list(records),
            "risen": min(job.generations()) == max(before) + 1,
            "sums": job.sums(),
        }
    return found


@pytest.fixture(scope="module")
def delayed() -> list[dict[str, Any]]:
    return run_ranks(delays, 4, timeout=240)


class TestDelayWithinTheBound:
    """A slow rank delays the others and nothing else."""

    def test_the_operation_succeeds(self, delayed: Any) -> None:
        """Offload and reload complete, and the sums are right."""
        for result in delayed:
            for point, found in result.items():
                assert found["seen"] == ["", ""], point
                assert found["risen"], point
                assert found["sums"], point

    @pytest.mark.parametrize("point", OFFLOAD_POINTS + RELOAD_POINTS)
    def test_the_wait_is_logged_with_phase_and_missing_rank(self, delayed: Any, point: str) -> None:
        """A rank that waits says in which phase, and for whom or at which group."""
        lines = delayed[0][point]["logged"]
        assert any(names_the_cause(line) for line in lines), lines


def retried(rank: int, size: int) -> list[dict[str, Any]]:
    """After a failed offload, and after a failed reload: each operation that may come next."""
    job = Job.start(rank, bound=10, backend="faulty")
    found = []
    programs = [
        ("offload.group1", ["offload", "offload", "reload"]),
        ("offload.group1", ["offload", "reload"]),
        ("offload.quiesced", ["offload", "reload", "offload", "reload"]),
        ("offload.released", ["offload", "offload", "offload", "reload"]),
        ("reload.group1", ["offload", "reload", "reload"]),
        ("reload.group1", ["offload", "reload", "offload", "reload"]),
        ("reload.done", ["offload", "reload", "offload", "offload", "reload"]),
        ("reload.callbacks", ["offload", "reload", "reload", "reload"]),
    ]
    for point, program in programs:
        if rank == FAULTY:
            interfere(point, fault)
        seen = [attempt(getattr(reloadpg, operation)).kind for operation in program]
        stop_interfering()
        found.append(
            {
                "point": point,
                "seen": seen,
                "sums": job.sums(),
                "live": job.states(),
                "cycles": reloadpg.status().cycles,
                "generation": reloadpg.status().generation,
            }
        )
    return found


@pytest.mark.matrix
def test_every_operation_after_a_failure() -> None:
    """After a failed offload or reload either operation can be called, and completes (26, 27)."""
    results = run_ranks(retried, 4, timeout=240)
    for steps in zip(*results, strict=True):
        for found in steps:
            assert sum(kind != "" for kind in found["seen"]) == 1, steps
            assert found["sums"]
            assert found["live"] == {"live"}
        assert len({found["generation"] for found in steps}) == 1
        assert len({found["cycles"] for found in steps}) == 1


AFTER_CREATIONS = {"reload.group1", "reload.group3", "reload.rebuilt", "reload.done"}


class Terminated(SystemExit):
    """What the tests' handler of SIGTERM raises."""


def interrupted(rank: int, size: int) -> list[dict[str, Any]]:
    """A signal reaches one rank at every point: before it arrives, and while it waits."""
    job = Job.start(rank, bound=FAR, backend="faulty")
    found = []
    for index, point in enumerate(OFFLOAD_POINTS + RELOAD_POINTS):
        if point.startswith("reload"):
            reloadpg.offload()
        if rank == FAULTY:
            interfere(
                point,
                signalling(signal.SIGTERM, Terminated(143))
                if index % 2
                else signalling(signal.SIGINT, KeyboardInterrupt()),
            )
        operation = point.split(".")[0]
        seen = attempt(getattr(reloadpg, operation))
        stop_interfering()
        states = job.states()
        again = attempt(getattr(reloadpg, operation))
        last = attempt(reloadpg.reload)
        found.append(
            {
                "point": point,
                "seen": seen,
                "states": states,
                "again": again,
                "last": last,
                "sums": job.sums(),
                "generation": reloadpg.status().generation,
            }
        )
    return found


@pytest.fixture(scope="module")
def signalled() -> list[list[dict[str, Any]]]:
    return run_ranks(interrupted, 4, timeout=240)


@pytest.mark.matrix
class TestOneRankIsInterrupted:
    """KeyboardInterrupt, or the SystemExit of a SIGTERM handler, in the middle of each phase."""

    def test_its_own_exception_comes_out(self, signalled: Any) -> None:
        """The interrupted rank raises what its handler raised."""
        for index, found in enumerate(signalled[FAULTY]):
            kind = ("KeyboardInterrupt", "Terminated")[index % 2]
            assert found["seen"].kind == kind, found

    def test_the_others_hear_of_it_at_once(self, signalled: Any) -> None:
        """They raise an error that names it and its exception, far before the bound.

        Where it has created groups, it goes with its side of them before the others have heard of
        it: one that is still connecting to it fails itself.
        """
        for rank in (0, 2, 3):
            for index, found in enumerate(signalled[rank]):
                seen = found["seen"]
                if seen.kind != "RebuildError" or found["point"] not in AFTER_CREATIONS:
                    assert seen.kind == "PeerFailedError", found
                    assert seen.rank == FAULTY
                assert seen.names(FAULTY), found
                assert ("KeyboardInterrupt", "Terminated")[index % 2] in seen.text
                assert seen.seconds < ALLOWANCE, found

    def test_all_ranks_are_left_in_the_same_state_and_go_on(self, signalled: Any) -> None:
        """The states agree, and both operations complete afterwards."""
        for steps in zip(*signalled, strict=True):
            assert len({frozenset(found["states"]) for found in steps}) == 1, steps
            assert len({found["generation"] for found in steps}) == 1, steps
            for found in steps:
                assert (found["again"].kind, found["last"].kind) == ("", ""), found
                assert found["sums"], found


def interrupted_while_counted(rank: int, size: int) -> list[dict[str, Any]]:
    """One rank is interrupted just after it was counted at a barrier; the others pass it."""
    job = Job.start(rank, bound=15, subgroups=((0, 1), (1, 2), (0, 1, 2)))
    if rank == FAULTY:  # then all barriers are there
        reloadpg.on_offload(lambda: None)
        reloadpg.on_reload(lambda: None)
    found = []
    for operation, phases in (
        ("offload", ("enter", "quiesced", "released")),
        ("reload", ("enter", "rebuilt", "done")),
    ):
        for phase in phases:
            if operation == "reload":
                reloadpg.offload()
            if rank == FAULTY:
                moments.at("counted", interrupt, barrier=f"{operation}.{phase}")
            seen = attempt(getattr(reloadpg, operation))
            moments.restore()
            states = job.states()
            after = [attempt(reloadpg.offload), attempt(reloadpg.reload)]
            found.append(
                {
                    "at": (operation, phase),
                    "seen": seen.kind,
                    "states": states,
                    "after": after,
                    "sums": job.sums(),
                    "status": reloadpg.status().generation,
                    "cycles": reloadpg.status().cycles,
                }
            )
    return found


@pytest.fixture(scope="module")
def counted() -> list[list[dict[str, Any]]]:
    return run_ranks(interrupted_while_counted, 3, timeout=240)


class TestInterruptedAtTheMomentTheOthersPass:
    """The outcome on the store, not what the interrupted rank has seen, says what happened."""

    def test_all_ranks_end_in_the_same_state(self, counted: Any) -> None:
        """Untouched, failed, or, at the last barrier, complete on all ranks."""
        for steps in zip(*counted, strict=True):
            assert len({frozenset(found["states"]) for found in steps}) == 1, steps
            _, phase = steps[0]["at"]
            others = "" if phase in ("released", "done") else "PeerFailedError"
            assert [found["seen"] for found in steps] == [others, "KeyboardInterrupt", others]
            if phase == "done":
                assert steps[0]["states"] == {"live"}
            elif phase == "released":
                assert steps[0]["states"] == {"offloaded"}

    def test_the_job_goes_on(self, counted: Any) -> None:
        """The next offload and reload agree and complete."""
        for steps in zip(*counted, strict=True):
            assert len({(found["status"], found["cycles"]) for found in steps}) == 1, steps
            for found in steps:
                assert [call.kind for call in found["after"]] == ["", ""], found
                assert found["sums"]
