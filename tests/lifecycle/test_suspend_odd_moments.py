"""Groups that others replay, proposals for other groups, interruptions, callbacks, bad readings."""

from __future__ import annotations

import os
import time
from typing import Any

import moments
import pytest
import torch.distributed as dist
from sampling import sampled
from suspend_job import Job, attempt, chosen

import reloadpg
from reloadpg import StrategyPolicy
from reloadpg.groups.registry import registry
from reloadpg.lifecycle import memory, operation
from reloadpg.testing import run_ranks, simulated


def shared_creation(rank: int, size: int, case: str) -> dict[str, Any]:
    moments.wait_for_answers()
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    job = Job("recreate" if case == "made offloaded" else "suspend", subgroups=((0, 1),), bound=6)
    if case == "fall back" and rank == 1:
        simulated.inject(simulated.Fault("resume", group="g0"))
    reloadpg.offload()
    if case == "made offloaded":
        late = dist.new_group([0, 1], group_desc="late")
        if rank < 2:
            job.groups["late"] = late
    error = attempt(reloadpg.reload)
    return {
        "error": error,
        "states": {state for state, _ in job.facts().values()},
        "sums": job.sums(),
    }


@pytest.mark.parametrize("case", ["suspended", "fall back", "made offloaded"])
def test_others_replay_only_what_members_rebuild(case: str) -> None:
    """Where torch wants all ranks in a creation, a rank that is no member takes part in that of a
    group that was recreated, and not of one that was resumed or lived all along.
    """
    for result in run_ranks(shared_creation, 3, args=(case,), timeout=200):
        assert result == {"error": ("", ""), "states": {"live"}, "sums": True}


def proposal_of_another(rank: int, size: int, fallback: bool) -> list[Any]:
    policy = StrategyPolicy("auto", fallback=fallback, groups={"g1": "suspend"})
    job = Job(policy, subgroups=((0, 1), (1, 2)), suspend_works=rank != 0)
    found = []
    for _ in range(2):
        found.append(chosen(reloadpg.offload()))
        reloadpg.reload()
    assert job.sums()
    return found


@pytest.mark.parametrize("fallback", [True, False])
def test_a_rank_speaks_for_its_own_groups_only(fallback: bool) -> None:
    """Suspending gives rank 0 nothing back: its groups are recreated, and g1, of others, is not."""
    results = run_ranks(proposal_of_another, 3, args=(fallback,), timeout=200)
    for rank, (first, second) in enumerate(results):
        assert set(first.values()) == {"suspend"}
        expected = {"WORLD": "recreate"}
        expected |= {"g0": "recreate"} if rank < 2 else {}
        expected |= {"g1": "suspend"} if rank > 0 else {}
        assert second == expected


def interrupted_in_fall_back(rank: int, size: int) -> dict[str, Any]:
    job = Job("suspend", bound=60)
    if rank == 1:
        simulated.inject(simulated.Fault("suspend", group="g2"))
    if rank == 2:
        original = operation.logger.warning

        def interrupt(*_: Any, **__: Any) -> None:
            operation.logger.warning = original  # type: ignore[method-assign]
            raise KeyboardInterrupt

        operation.logger.warning = interrupt  # type: ignore[method-assign,assignment]
    begun, kind = time.monotonic(), ""
    try:
        reloadpg.offload()
    except BaseException as error:
        kind = type(error).__name__
    seconds = time.monotonic() - begun
    return {"kind": kind, "seconds": seconds, "then": attempt(reloadpg.reload), "sums": job.sums()}


def test_a_rank_interrupted_in_a_fall_back_stays_in_step() -> None:
    """The others hear of it at once, and the next reload finds all ranks in the same round."""
    for rank, result in enumerate(run_ranks(interrupted_in_fall_back, 3, timeout=200)):
        assert result["kind"] == ("KeyboardInterrupt" if rank == 2 else "PeerFailedError")
        assert result["seconds"] < 60
        assert (result["then"], result["sums"]) == (("", ""), True)


def after_a_fall_back(rank: int, size: int, strategy: str, at: str) -> list[Any]:
    moments.wait_for_answers()
    job = Job(strategy, bound=6)
    if rank == 1:
        simulated.inject(simulated.Fault(at, group="g2"))  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        report = reloadpg.offload()
        reasons = {group.reason for group in report.groups}
        found.append((set(chosen(report).values()), "injected" in "".join(reasons)))
        reloadpg.reload()
        simulated.clear_faults()
        assert job.sums()
    return found


CASES = [(strategy, at) for strategy in ("auto", "suspend") for at in ("suspend", "resume")]


@pytest.mark.parametrize("case", sampled(CASES, CASES[0], CASES[3]), ids="-".join)
def test_auto_learns_from_a_fall_back(case: tuple[str, str]) -> None:
    """It costs all ranks a wait: `auto` recreates from then on and says why; `suspend`, which the
    user has asked for, is tried again.
    """
    strategy, at = case
    first = ({"recreate"}, True) if at == "suspend" else ({"suspend"}, False)
    then = ({"recreate"}, True) if strategy == "auto" else ({"suspend"}, False)
    for found in run_ranks(after_a_fall_back, 3, args=case, timeout=200):
        assert found == [first, then, then]


def destroyed_in_callback(rank: int, size: int, strategy: str, when: str) -> dict[str, Any]:
    job = Job(strategy, subgroups=((0, 1),), bound=6)
    group = job.groups.pop("g0")
    if when == "offload":
        reloadpg.on_offload(lambda: dist.destroy_process_group(group))
    else:
        reloadpg.on_reload(lambda: dist.destroy_process_group(group), before=True)
    errors = [attempt(reloadpg.offload), attempt(reloadpg.reload)]
    return {"errors": errors, "state": str(group.state), "sums": job.sums()}


@pytest.mark.parametrize("when", ["offload", "reload"])
@pytest.mark.parametrize("strategy", ["recreate", "suspend"])
def test_a_callback_may_destroy_a_group(strategy: str, when: str) -> None:
    """It is forgotten, and the others go on."""
    for result in run_ranks(destroyed_in_callback, 2, args=(strategy, when), timeout=200):
        assert result == {"errors": [("", "")] * 2, "state": "destroyed", "sums": True}


def broken_reading(rank: int, size: int, what: str) -> dict[str, Any]:
    def broken() -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    job = Job("suspend", subgroups=(), bound=6)
    if what == "source" and rank == 1:
        memory.add_source("mine", memory.Source(broken))
    elif what == "check" and rank == 1:
        memory.add_check(broken)
    elif what == "nobody":
        memory.in_use = dict  # type: ignore[assignment]
    errors = [attempt(reloadpg.offload), attempt(reloadpg.reload)]
    return {"errors": errors, "sums": job.sums(), "busy": registry.busy}


@pytest.mark.parametrize("what", ["source", "check", "nobody"])
def test_a_reading_that_fails_ends_no_operation(what: str) -> None:
    """A source or a check that raises, or no source at all, costs a figure and nothing else."""
    for result in run_ranks(broken_reading, 2, args=(what,), timeout=200):
        assert result == {"errors": [("", "")] * 2, "sums": True, "busy": False}
