"""Every fault of suspending and resuming, on one rank: all ranks end alike, and the job goes on.

Peers of a rank that fails hang in the communicator, as NCCL's do: only the store ends that.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import moments
import pytest
from suspend_job import HELD, STAYS, Job, attempt, chosen, reasons

import reloadpg
from reloadpg.lifecycle import memory
from reloadpg.lifecycle import offload as offload_module
from reloadpg.testing import run_ranks, simulated

FAULTY = 1
BOUND = 60.0
"""Seconds; no rank reaches it."""
SHORT = 4.0
"""Seconds; every rank reaches it."""
ALLOWANCE = 60.0
"""Seconds past a bound within which every rank must have raised, on the busiest machine."""


def failing(rank: int, size: int, at: str) -> dict[str, Any]:
    moments.wait_for_answers()
    job = Job("suspend", bound=BOUND)
    if at == "resume":
        reloadpg.offload()
    if rank == FAULTY:
        simulated.inject(simulated.Fault(at, "raise", group="g2"))  # type: ignore[arg-type]
    begun = time.monotonic()
    error = attempt(reloadpg.offload if at == "suspend" else reloadpg.reload)
    ended = {
        "error": error,
        "seconds": time.monotonic() - begun,
        "states": {state for state, _ in job.facts().values()},
        "held": simulated.stats().held_bytes,
    }
    simulated.clear_faults()
    reloadpg.reload()
    sums = job.sums()
    then = reloadpg.offload()
    return {
        **ended,
        "sums": sums,
        "then": chosen(then),
        "reasons": reasons(then),
        "warnings": then.warnings,
        "back": chosen(reloadpg.reload()),
        "sums_after": job.sums(),
        "names": list(job.groups),
    }


@pytest.fixture(scope="module", params=["suspend", "resume"])
def failed(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    return request.param, run_ranks(failing, 3, args=(request.param,), timeout=200)


class TestOneCommunicatorFails:
    """Suspending or resuming one group raises on one rank; its peers wait there for it."""

    def test_all_ranks_raise_and_name_the_rank(self, failed: Any) -> None:
        """It is a failed operation like any other."""
        at, results = failed
        for rank, result in enumerate(results):
            kind, text = result["error"]
            own = "ReleaseError" if at == "suspend" else "RebuildError"
            assert kind == (own if rank == FAULTY else "PeerFailedError")
            assert "injected fault" in text
            assert f"rank {FAULTY}" in text

    def test_no_rank_waits_for_the_timeout(self, failed: Any) -> None:
        """The peers learn of the failure while they hang in the communicator."""
        for result in failed[1]:
            assert result["seconds"] < BOUND

    def test_all_groups_are_failed(self, failed: Any) -> None:
        """On all ranks alike, without a communicator's memory."""
        for result in failed[1]:
            assert result["states"] == {"failed"}
            assert result["held"] == 0

    def test_the_job_recreates_from_then_on(self, failed: Any) -> None:
        """The next reload completes; the next offload gives the reason in one warning."""
        at, results = failed
        for result in results:
            every = dict.fromkeys(result["names"], "recreate")
            assert result["sums"]
            assert result["then"] == result["back"] == every
            assert result["sums_after"]
            phase = "'suspended'" if at == "suspend" else "'resumed'"
            assert all(phase in reason for reason in result["reasons"].values())
            count = len(result["names"])
            said = [w for w in result["warnings"] if "recreated, not suspended" in w]
            assert len(said) == 1
            assert said[0].startswith(f"{count} groups are recreated")


def out_of_memory(rank: int, size: int) -> dict[str, Any]:
    moments.wait_for_answers()
    job = Job("suspend", bound=BOUND)
    reloadpg.offload()
    held = simulated.stats().held_bytes
    if rank == FAULTY:
        # There was room when all agreed, and another process took it since.
        memory.free_bytes = lambda: None  # type: ignore[method-assign]
        simulated.configure(capacity_bytes=held + (HELD - STAYS))
    error = attempt(reloadpg.reload)
    simulated.configure(capacity_bytes=0)
    report = reloadpg.reload()
    return {"error": error, "chosen": set(chosen(report).values()), "sums": job.sums()}


def test_a_resume_that_runs_out_of_memory_fails_on_all_ranks() -> None:
    """The failing rank returns and its peers hang: all raise, and the next reload recreates."""
    for result in run_ranks(out_of_memory, 3, timeout=200):
        assert "out of memory" in result["error"][1]
        assert result["chosen"] == {"recreate"}
        assert result["sums"]


def misused(rank: int, size: int, what: str) -> dict[str, Any]:
    import torch

    job = Job("suspend", bound=BOUND)
    backend = job.groups["WORLD"]._get_backend(torch.device("cpu"))
    if what == "suspended before":
        backend.suspend()
        error = attempt(reloadpg.offload)
    else:
        reloadpg.offload()
        backend.resume()  # behind the library's back, on all ranks
        assert job.refused()
        error = attempt(reloadpg.reload)
    reloadpg.reload()
    return {"error": error, "sums": job.sums()}


@pytest.mark.parametrize("what", ["suspended before", "resumed behind our back"])
def test_misuse_of_a_backend_fails(what: str) -> None:
    """Suspended twice, or resumed when live: all ranks raise; a reload recreates the groups."""
    for result in run_ranks(misused, 3, args=(what,), timeout=200):
        assert "invalid usage" in result["error"][1]
        assert result["sums"]


def stalled(rank: int, size: int, at: str) -> dict[str, Any]:
    job = Job("suspend", bound=SHORT)
    if at == "resume":
        reloadpg.offload()
    if rank == FAULTY:
        simulated.inject(simulated.Fault(at, "stall", group="g2"))  # type: ignore[arg-type]
    begun = time.monotonic()
    error = attempt(reloadpg.offload if at == "suspend" else reloadpg.reload)
    seconds = time.monotonic() - begun
    states = {state for state, _ in job.facts().values()}
    simulated.clear_faults()
    reloadpg.reload()
    return {"error": error, "seconds": seconds, "states": states, "sums": job.sums()}


@pytest.mark.parametrize("at", ["suspend", "resume"])
def test_a_rank_that_stalls_ends_all_at_the_bound(at: str) -> None:
    """No time bound inside NCCL: ours ends it, all ranks raise alike, and a reload completes."""
    for result in run_ranks(stalled, 3, args=(at,), timeout=200):
        assert result["error"][0] == "RendezvousTimeoutError", result
        assert result["seconds"] < SHORT + ALLOWANCE
        assert result["states"] == {"failed"}
        assert result["sums"]


def killed(rank: int, size: int, at: str) -> Any:
    job = Job("suspend", bound=SHORT)
    if at == "resume":
        reloadpg.offload()
    if rank == 2:
        simulated.inject(simulated.Fault(at, "kill", group="g2"))  # type: ignore[arg-type]
    begun = time.monotonic()
    error = attempt(reloadpg.offload if at == "suspend" else reloadpg.reload)
    return error, time.monotonic() - begun, {state for state, _ in job.facts().values()}


@pytest.mark.parametrize("at", ["suspend", "resume"])
def test_a_rank_that_dies_is_named_within_the_bound(at: str) -> None:
    """SIGKILL in the middle: the survivors raise at the bound; all leave their groups failed."""
    outcomes = run_ranks(killed, 3, args=(at,), timeout=200, check=False)
    assert outcomes[2].signal == signal.SIGKILL
    for outcome in outcomes[:2]:
        (kind, text), seconds, states = outcome.result
        assert kind in {"RendezvousTimeoutError", "PeerFailedError"}
        assert "rank 2" in text
        assert seconds < SHORT + ALLOWANCE
        assert states == {"failed"}


def killed_and_failing(rank: int, size: int) -> Any:
    job = Job("suspend", bound=BOUND)
    if rank > 0:
        action = "kill" if rank == 2 else "raise"
        simulated.inject(simulated.Fault("suspend", action, group="g2"))  # type: ignore[arg-type]
    error = attempt(reloadpg.offload)
    return error, {state for state, _ in job.facts().values()}


def test_a_failure_names_the_rank_that_died_too() -> None:
    """A rank's communicator fails since another rank is gone: all raise at once and name both."""
    outcomes = run_ranks(killed_and_failing, 3, timeout=200, check=False)
    for outcome in outcomes[:2]:
        (kind, text), states = outcome.result
        assert kind == ("ReleaseError" if outcome.rank == 1 else "PeerFailedError")
        assert "Rank 2 died" in text or "No response since then from rank 2" in text
        assert states == {"failed"}


def interrupted(rank: int, size: int) -> dict[str, Any]:
    job = Job("suspend", bound=BOUND)
    if rank == FAULTY:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        offload_module.suspend = interrupt  # type: ignore[attr-defined]
    kind = ""
    try:
        reloadpg.offload()
    except BaseException as error:
        kind = type(error).__name__
    return {"kind": kind, "states": {state for state, _ in job.facts().values()}}


def test_a_rank_that_is_interrupted_fails_the_operation() -> None:
    """Ctrl-C in a suspend: that rank leaves, so the others raise."""
    for rank, result in enumerate(run_ranks(interrupted, 3, timeout=200)):
        assert result["kind"] == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError")
        assert result["states"] == {"failed"}


def without_cumem(rank: int, size: int) -> dict[str, Any]:
    if rank == FAULTY:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    job = Job("suspend")
    report = reloadpg.offload()
    held = simulated.stats().held_bytes
    reloadpg.reload()
    return {"chosen": chosen(report), "reasons": reasons(report), "held": held, "sums": job.sums()}


def test_cumem_off_on_one_rank() -> None:
    """A suspend would succeed and give nothing back: all members recreate, and say why."""
    for rank, result in enumerate(run_ranks(without_cumem, 3, timeout=200)):
        with_faulty = {"WORLD", "g0", "g1", "g2"}
        for name, how in result["chosen"].items():
            assert how == ("recreate" if name in with_faulty else "suspend"), (rank, name)
            assert "NCCL_CUMEM_ENABLE=0" in result["reasons"][name]
        assert result["held"] == 0
        assert result["sums"]
