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
from reloadpg import StrategyPolicy
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


def failing(rank: int, size: int, at: str, fallback: bool, action: str) -> dict[str, Any]:
    moments.wait_for_answers()
    job = Job(StrategyPolicy("suspend", fallback=fallback), bound=BOUND)
    if at == "resume":
        reloadpg.offload()
    if rank == FAULTY:
        simulated.inject(simulated.Fault(at, action, group="g2"))  # type: ignore[arg-type]
    begun = time.monotonic()
    seen: dict[str, Any] = {}
    function = reloadpg.offload if at == "suspend" else reloadpg.reload

    def operate() -> None:
        seen["report"] = function()

    error = attempt(operate)
    seconds = time.monotonic() - begun
    report = seen.get("report")
    ended = {
        "error": error,
        "seconds": seconds,
        "chosen": chosen(report) if report else {},
        "reasons": reasons(report) if report else {},
        "warnings": report.warnings if report else (),
        "states": {state for state, _ in job.facts().values()},
        "refused": at == "suspend" and job.refused(),
        "held": simulated.stats().held_bytes,
    }
    simulated.clear_faults()
    reloadpg.reload()
    sums = job.sums()
    after = [chosen(reloadpg.offload()), chosen(reloadpg.reload())]
    return {
        **ended,
        "sums": sums,
        "after": after,
        "sums_after": job.sums(),
        "names": list(job.groups),
    }


@pytest.fixture(
    scope="module",
    params=[(at, fallback) for at in ("suspend", "resume") for fallback in (True, False)],
    ids=lambda param: f"{param[0]}-{'fallback' if param[1] else 'no fallback'}",
)
def failed(request: pytest.FixtureRequest) -> tuple[str, bool, list[dict[str, Any]]]:
    at, fallback = request.param
    return at, fallback, run_ranks(failing, 3, args=(at, fallback, "raise"), timeout=200)


class TestOneCommunicatorFails:
    """Suspending or resuming one group raises on one rank; its peers wait there for it."""

    def test_all_ranks_end_alike(self, failed: Any) -> None:
        """With fallback all recreate and nobody raises; without, all raise and name the rank."""
        at, fallback, results = failed
        for rank, result in enumerate(results):
            kind, text = result["error"]
            if fallback:
                assert kind == ""
                assert set(result["chosen"].values()) == {"recreate"}
                assert any("recreated instead of suspended" in w for w in result["warnings"])
            else:
                own = "ReleaseError" if at == "suspend" else "RebuildError"
                assert kind == (own if rank == FAULTY else "PeerFailedError")
                assert "injected fault" in text
                assert f"rank {FAULTY}" in text

    def test_nobody_waits_for_the_bound(self, failed: Any) -> None:
        """The peers learn of the failure while they hang in the communicator."""
        for result in failed[2]:
            assert result["seconds"] < BOUND

    def test_nothing_half_done_is_used(self, failed: Any) -> None:
        """The groups are offloaded, or live, or failed: alike, without a communicator's memory."""
        at, fallback, results = failed
        for result in results:
            if not fallback:
                assert result["states"] == {"failed"}
                assert result["held"] == 0
            elif at == "suspend":
                assert result["states"] == {"offloaded"}
                assert result["held"] == 0
                assert result["refused"]
            else:
                assert result["states"] == {"live"}

    def test_the_reason_is_in_the_report(self, failed: Any) -> None:
        """Each group says why it was not suspended."""
        _, fallback, results = failed
        for result in results:
            assert bool(result["reasons"]) == fallback
            for reason in result["reasons"].values():
                assert "injected fault" in reason

    def test_the_job_goes_on(self, failed: Any) -> None:
        """The next reload completes, collectives are right, and suspending works again."""
        for result in failed[2]:
            assert result["sums"]
            assert result["sums_after"]
            every = dict.fromkeys(result["names"], "suspend")
            assert result["after"] == [every, every]


def out_of_memory(rank: int, size: int) -> dict[str, Any]:
    moments.wait_for_answers()
    job = Job("suspend", bound=BOUND)
    reloadpg.offload()
    held = simulated.stats().held_bytes
    if rank == FAULTY:
        # There was room when all agreed, and another process took it since.
        memory.free_bytes = lambda: None  # type: ignore[method-assign]
        simulated.configure(capacity_bytes=held + (HELD - STAYS))
    report = reloadpg.reload()
    simulated.configure(capacity_bytes=0)
    return {"chosen": set(chosen(report).values()), "reasons": reasons(report), "sums": job.sums()}


def test_a_resume_that_runs_out_of_memory_falls_back_on_all_ranks() -> None:
    """The failing rank returns and its peers hang: all recreate."""
    for result in run_ranks(out_of_memory, 3, timeout=200):
        assert result["chosen"] == {"recreate"}
        assert "out of memory" in " ".join(result["reasons"].values())
        assert result["sums"]


def misused(rank: int, size: int, what: str) -> dict[str, Any]:
    import torch

    job = Job("suspend", bound=BOUND)
    backend = job.groups["WORLD"]._get_backend(torch.device("cpu"))
    if what == "suspended before":
        backend.suspend()
        ended = reloadpg.offload()
        reloadpg.reload()
    else:
        reloadpg.offload()
        backend.resume()  # behind the library's back, on all ranks
        refused = job.refused()
        assert refused
        ended = reloadpg.reload()
    return {"chosen": set(chosen(ended).values()), "reasons": reasons(ended), "sums": job.sums()}


@pytest.mark.parametrize("what", ["suspended before", "resumed behind our back"])
def test_misuse_of_a_backend_falls_back(what: str) -> None:
    """Suspended twice, or resumed when live: invalid usage; all ranks recreate."""
    for result in run_ranks(misused, 3, args=(what,), timeout=200):
        assert result["chosen"] == {"recreate"}
        assert "invalid usage" in " ".join(result["reasons"].values())
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
    """SIGKILL in the middle: the survivors raise at the bound; none falls back alone."""
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


def test_ranks_do_not_fall_back_without_one_that_died() -> None:
    """A rank's communicator fails since another rank is gone: all raise at once and name both."""
    outcomes = run_ranks(killed_and_failing, 3, timeout=200, check=False)
    for outcome in outcomes[:2]:
        (kind, text), states = outcome.result
        assert kind == ("ReleaseError" if outcome.rank == 1 else "PeerFailedError")
        assert "No sign of life since then from rank 2" in text
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


def test_a_rank_that_is_interrupted_leaves_nobody_falling_back() -> None:
    """Ctrl-C is no failure of a communicator: that rank leaves, so the others raise."""
    for rank, result in enumerate(run_ranks(interrupted, 3, timeout=200)):
        assert result["kind"] == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError")
        assert result["states"] == {"failed"}


def without_cumem(rank: int, size: int, strategy: str) -> dict[str, Any]:
    if rank == FAULTY:
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
    job = Job(strategy)
    report = reloadpg.offload()
    held = simulated.stats().held_bytes
    reloadpg.reload()
    return {"chosen": chosen(report), "reasons": reasons(report), "held": held, "sums": job.sums()}


@pytest.mark.parametrize("strategy", ["suspend", "auto"])
def test_cumem_off_on_one_rank(strategy: str) -> None:
    """A suspend would succeed and give nothing back: all members recreate, and say why."""
    for rank, result in enumerate(run_ranks(without_cumem, 3, args=(strategy,), timeout=200)):
        with_faulty = {"WORLD", "g0", "g1", "g2"}
        for name, how in result["chosen"].items():
            assert how == ("recreate" if name in with_faulty else "suspend"), (rank, name)
            assert "NCCL_CUMEM_ENABLE=0" in result["reasons"][name]
        assert result["held"] == 0
        assert result["sums"]


def gives_nothing_back(rank: int, size: int) -> dict[str, Any]:
    job = Job("auto", suspend_works=rank != FAULTY)
    first = reloadpg.offload()
    reloadpg.reload()
    second = reloadpg.offload()
    reloadpg.reload()
    return {
        "chosen": (chosen(first), chosen(second)),
        "released": (first.released_bytes, second.released_bytes),
        "warnings": first.warnings,
        "reasons": reasons(second),
        "names": list(job.groups),
        "sums": job.sums(),
    }


def test_auto_believes_the_device() -> None:
    """A suspend that gives nothing back on one rank, though the backend says otherwise: from the
    next offload on every group recreates, on all ranks.
    """
    for rank, result in enumerate(run_ranks(gives_nothing_back, 3, timeout=200)):
        count = len(result["names"])
        assert result["chosen"][0] == dict.fromkeys(result["names"], "suspend")
        assert result["chosen"][1] == dict.fromkeys(result["names"], "recreate")
        assert result["released"] == (0 if rank == FAULTY else (HELD - STAYS) * count, HELD * count)
        assert any("gave back 0%" in text for text in result["warnings"]) == (rank == FAULTY)
        assert all("measured by simulated" in reason for reason in result["reasons"].values())
        assert result["sums"]
