"""After a fault, ``recover()`` recreates all communicators behind the same objects."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fault_job import FaultJob, all_reduce, connections, cut, impatient
from recovery_job import BOUND, Seen, attempt, base_store, interfere, stop_interfering
from sampling import sampled
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.testing import run_ranks

FAULTY = 1

Facts = dict[str, Any]

LIVE: Facts = {"same": True, "states": {"live"}, "sums": True, "pending": False}
"""What holds of all groups after a recovery, besides the generation."""


# -- one function per fault: what each rank does before it calls recover() -----------------------


def connections_cut(job: FaultJob) -> Facts:
    """The connections of one group end, without a notification."""
    before = connections()
    group = job.new_group()
    all_reduce(group)
    mine = connections() - before
    ended = cut(mine) if job.rank == FAULTY else 0
    return {"cut": ended, "error": attempt(lambda: all_reduce(group)).text}


def collective_skipped(job: FaultJob) -> Facts:
    """One rank does not take part, and detects the fault by ``recovery_requested`` only."""
    before = reloadpg.recovery_requested()
    job.meet("all have read it")
    if job.rank != FAULTY:
        return {"error": impatient(job.ring, lambda: all_reduce(job.ring))}
    end = time.monotonic() + 120
    while not reloadpg.recovery_requested() and time.monotonic() < end:
        time.sleep(0.01)
    return {"before": before, "called": reloadpg.recovery_requested()}


def work_pending(job: FaultJob) -> Facts:
    """A rank starts a collective that no peer joins."""
    if job.rank == FAULTY:
        job.pending = dist.all_reduce(torch.ones(1), group=job.ring, async_op=True)  # type: ignore[attr-defined]
    return {}


def offloaded(job: FaultJob) -> Facts:
    """The job is offloaded as a whole."""
    reloadpg.offload()
    return {}


def offload_half_way(job: FaultJob) -> Facts:
    """One rank recovers instead of an offload: those that wait there are notified."""
    if job.rank == FAULTY:
        return {}
    seen = attempt(reloadpg.offload)
    return {"kind": seen.kind, "text": seen.text, "states": {str(g.state) for g in job.groups}}


def offload_failed(job: FaultJob) -> Facts:
    """An offload has failed, and left all groups failed."""
    job.new_group("faulty")
    if job.rank == FAULTY:
        interfere("offload.group0", _raise)
    seen = attempt(reloadpg.offload)
    stop_interfering()
    return {"kind": seen.kind, "pending": reloadpg.recovery_requested()}


def epochs_differ(job: FaultJob) -> Facts:
    """One rank has ended epochs that the others have not started."""
    if job.rank == FAULTY:
        job_of_rank = registry.job("test")
        assert job_of_rank is not None
        for _ in range(3):
            job_of_rank.rendezvous.open("offload", ["enter"], 1.0)
    return {}


def coalescing_left_open(job: FaultJob) -> Facts:
    """An error in a coalescing block: torch would coalesce all later operations."""
    seen = attempt(lambda: _in_coalescing_block(job))
    return {"kind": seen.kind}


def stopped(job: FaultJob) -> Facts:
    """A rank is stopped for longer than the timeout of a collective, and then continues."""
    store = base_store().clone()
    store.set(f"test/pid/{job.rank}", str(os.getpid()))
    job.meet("stopped")
    if job.rank == FAULTY:
        signal.pthread_sigmask(signal.SIG_BLOCK, ())  # where the signal finds it
        end = time.monotonic() + 120
        while not reloadpg.recovery_requested() and time.monotonic() < end:
            time.sleep(0.01)
        return {}
    pid = int(store.get(f"test/pid/{FAULTY}"))
    if job.rank == 0:
        os.kill(pid, signal.SIGSTOP)
    store.add("test/stopped/after", 0)
    error = impatient(job.ring, lambda: all_reduce(job.ring))
    if job.rank == 0:
        os.kill(pid, signal.SIGCONT)
    return {"error": error}


def _in_coalescing_block(job: FaultJob) -> None:
    with dist._coalescing_manager(group=job.ring):  # type: ignore[attr-defined]
        raise OSError("in the block")


def _raise() -> None:
    raise OSError("injected")


CORE: tuple[Callable[[FaultJob], Facts], ...] = (
    connections_cut,
    collective_skipped,
    offloaded,
    offload_half_way,
    offload_failed,
)
MORE: tuple[Callable[[FaultJob], Facts], ...] = (
    work_pending,
    epochs_differ,
    coalescing_left_open,
    stopped,
)


# -- the runs ---------------------------------------------------------------------------------


def survive(rank: int, size: int, names: list[str]) -> dict[str, Facts]:
    """One fault after the other in one job; after each, recover, and use all groups."""
    job = FaultJob(rank, size)
    found = {}
    for name in names:
        facts = globals()[name](job)
        report = reloadpg.recover(f"test of {name}" if rank == FAULTY else None)
        found[name] = {
            **facts,
            "report": report,
            "after": job.whole(),
            "keys": base_store().num_keys(),
        }
        job.meet(name)
    reloadpg.offload()
    reloadpg.reload()
    found["cycle"] = {"after": job.whole()}
    return found


@pytest.fixture(
    scope="module",
    params=sampled(["core", "more"], "core"),
)
def survived(request: pytest.FixtureRequest) -> list[dict[str, Facts]]:
    """The results of each rank, by fault."""
    faults = CORE if request.param == "core" else MORE
    return run_ranks(survive, 4, args=([fault.__name__ for fault in faults],), timeout=280)


# Torch 2.8 does not change the timeout of a gloo group that exists, so a skipped collective lasts.
@(pytest.mark.matrix if TorchVersion(torch.__version__) >= "2.13" else pytest.mark.slow)
class TestOneFaultAfterTheOther:
    """Whatever the fault and the state of the ranks, the job continues."""

    def test_all_groups_are_live_again(self, survived: list[dict[str, Facts]]) -> None:
        """The same objects under the same names, one generation on all ranks, and right sums."""
        for rank, found in enumerate(survived):
            for count, (name, facts) in enumerate(found.items()):
                generations = {"generation": count + 1, "generations": {count + 1}}
                assert facts["after"] == LIVE | generations, (rank, name)

    def test_the_report_names_the_rank_and_its_reason(self, survived: Any) -> None:
        """The same on all ranks."""
        for found in survived:
            for name, facts in found.items():
                if name == "cycle":
                    continue
                report = facts["report"]
                assert (report.operation, report.changed, report.error) == ("recover", True, "")
                assert report.faults == survived[0][name]["report"].faults
                reasons = {fault.rank: fault.reason for fault in report.faults}
                assert reasons[FAULTY] == f"test of {name}"

    def test_the_store_does_not_grow(self, survived: Any) -> None:
        """A recovery leaves some keys until the next one, and not more each time."""
        for found in survived:
            keys = [facts["keys"] for name, facts in found.items() if name != "cycle"]
            assert keys[-1] - keys[0] <= 5 * len(keys), keys

    def test_each_rank_observed_the_fault(self, survived: Any) -> None:
        """On the faulty rank, and on the others."""
        for rank, found in enumerate(survived):
            for name, facts in found.items():
                assert _seen(name, facts, rank == FAULTY), (rank, name, facts)


def _seen(name: str, facts: Facts, faulty: bool) -> bool:
    """Whether the fault had the expected effect on a rank."""
    if name == "connections_cut":  # closed, or reset while something was on its way
        found = facts["cut"] == (3 if faulty else 0), "onnection" in facts["error"]
        return all(found) and "Timed out" not in facts["error"]
    if name == "collective_skipped":
        (late,) = [fault.rank for fault in facts["report"].faults if fault.late]
        error = facts.get("error", "")
        flag = not facts.get("before") and facts.get("called")
        return late == FAULTY and (flag if faulty else "Timed out" in error or "onnection" in error)
    if name == "offload_failed":
        return facts["pending"] and facts["kind"] == (
            "ReleaseError" if faulty else "PeerFailedError"
        )
    if faulty:
        return True
    if name == "offload_half_way":
        said = f"rank {FAULTY} has called recover()" in facts["text"]
        return said and (facts["kind"], facts["states"]) == ("PeerFailedError", {"live"})
    return bool(facts["error"]) if name == "stopped" else True


@pytest.mark.ranks(4)
def test_rank_0_warns_of_a_recovery_and_only_reload_callbacks_are_called(
    rank: int, world_size: int
) -> None:
    """The warning has the rank that requested the recovery, its reason, and the duration."""
    job = FaultJob(rank, world_size)
    warnings: list[str] = []
    called: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    reloadpg.on_offload(lambda: called.append("offload"))
    reloadpg.on_reload(lambda: called.append("reload"))
    reloadpg.recover("a link is down" if rank == FAULTY else None)
    assert called == ["reload"]
    assert job.sums()
    assert len(warnings) == (rank == 0), warnings
    for text in warnings:
        assert re.search(r"^recover: 4 groups in [\d.]+ ms, generation 1; rank 1: a link", text)


# -- one recovery after the other -----------------------------------------------------------------


@pytest.mark.ranks(4)
def test_consecutive_recoveries(rank: int, world_size: int) -> None:
    """In a row, while offloaded, and with a rank that called before the others."""
    job = FaultJob(rank, world_size)
    assert [reloadpg.recover(f"number {n}").generation for n in range(3)] == [1, 2, 3]

    def check(name: str, generation: int) -> None:
        found = job.whole()
        assert found["generation"] >= generation, name
        assert found == {**LIVE, "generation": found["generation"]} | {
            "generations": {found["generation"]}
        }, name
        job.meet(name)

    check("at once", 3)
    reloadpg.recover("before")
    reloadpg.offload()
    reloadpg.recover("while offloaded")
    reloadpg.recover("and again")
    check("offloaded", 6)
    reloadpg.recover("together")
    if rank == FAULTY:  # it needs another one before the others have started anything
        seen = attempt(lambda: reloadpg.recover("alone", timeout=0.5))
        assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (0, 2, 3)), seen
    job.meet("one has called")
    assert reloadpg.recovery_requested()
    reloadpg.recover()
    check("once more", 8)
    if rank != FAULTY:  # the work is dropped at once, as gloo needs it
        dist.all_reduce(torch.ones(1), group=job.ring, async_op=True)
    reloadpg.recover("the next collective hangs")
    reloadpg.recover("so does the one after")
    check("end", 10)


def loop_where_one_dies(rank: int, size: int) -> tuple[Seen, list[tuple[int, int]], list[str]]:
    """A loop in whose second step one rank dies."""
    reloadpg.install(backends={worlds.BACKEND}, timeout=BOUND)
    worlds.init(timeout=timedelta(seconds=5))
    recoveries: list[str] = []
    reloadpg.on_report(lambda report: recoveries.append(report.operation))
    attempts = []

    def loop() -> None:
        for step in reloadpg.retrying(range(3)):
            with step:
                attempts.append((step.number, step.attempt))
                if rank == 2 and step.number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1))

    return attempt(loop), attempts, recoveries


@pytest.mark.slow
def test_a_loop_ends_when_a_rank_has_died() -> None:
    """It recovers once, with the timeout of a recovery, and names the rank."""
    outcomes = run_ranks(loop_where_one_dies, 4, timeout=280, check=False)
    assert outcomes[2].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        seen, attempts, recoveries = outcome.result
        assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (2,)), seen
        assert attempts == [(0, 1), (1, 1)]
        assert recoveries == ["recover"]


# -- ranks that do not call, and jobs without groups ----------------------------------------------


@pytest.mark.ranks(4)
def test_a_rank_that_does_not_call_is_named_and_may_call_later(rank: int, world_size: int) -> None:
    """The others wait for ``timeout``; all ranks meet in the next call."""
    job = FaultJob(rank, world_size)
    if rank != FAULTY:
        seen = attempt(lambda: reloadpg.recover(timeout=5))
        assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (FAULTY,))
        assert "recover(timeout=...)" in seen.text
    job.meet("timed out")
    assert reloadpg.recovery_requested()
    reloadpg.recover()
    assert job.sums()
    assert not reloadpg.recovery_requested()


@pytest.mark.ranks(4)
def test_ranks_with_different_groups_cannot_recover(rank: int, world_size: int) -> None:
    """All ranks name the group, and no group is live."""
    os.environ |= worlds.ALL_RESPOND
    job = FaultJob(rank, world_size)
    if rank == FAULTY:
        dist.destroy_process_group(job.ring)
    seen = attempt(reloadpg.recover)
    assert seen.kind == "DisagreementError"
    assert "group '5'" in seen.text
    assert "without a communicator" in seen.text
    assert {str(group.state) for group in job.groups[:-1]} == {"failed"}


@pytest.mark.ranks(1)
def test_recover_without_a_job_changes_nothing() -> None:
    reloadpg.install(backends={"gloo"})
    report = reloadpg.recover("nothing")
    assert not report.changed
    assert "not initialized" in report.note
    assert not reloadpg.recovery_requested()


@pytest.mark.parametrize("given", [0, -1.0, float("nan")])
def test_the_timeout_must_be_positive(given: float) -> None:
    with pytest.raises(reloadpg.InvalidOptionError, match="timeout"):
        reloadpg.recover(timeout=given)


def _second(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@pytest.mark.ranks(2)
def test_all_backends_of_a_mixed_group_are_recreated() -> None:
    """The fault may concern each of them. An offload keeps the one that is not selected."""
    dist.Backend.register_backend("second", _second, devices=["meta"])
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("cpu:gloo,meta:second")
    world: Any = dist.group.WORLD
    meta = torch.device("meta")
    kept = world._get_backend(meta)
    reloadpg.offload()
    assert world._get_backend(meta) is kept
    reloadpg.recover("test")
    assert world._get_backend(meta) is not kept
    tensors = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(tensors[0])
    world._get_backend(meta).allreduce([tensors[1]]).wait()
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
