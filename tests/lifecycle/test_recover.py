"""After a fault, ``recover()`` recreates all communicators behind the same objects."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import (
    BOUND,
    HELD,
    IMPATIENCE,
    PATIENCE,
    Injected,
    Job,
    all_reduce,
    attempt,
    base_store,
    eventually,
)
from helpers.sampling import sampled
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg.testing import faults, simulated
from reloadpg.testing.faults import Fault

FAULTY = 1


def connections() -> set[int]:
    """The descriptors of this process's connections, except those to the store."""
    port, found = int(os.environ["MASTER_PORT"]), psutil.Process().net_connections("tcp")
    return {one.fd for one in found if one.raddr and port not in (one.laddr.port, one.raddr.port)}


def cut(descriptors: set[int]) -> int:
    """Shut down connections of another component; return their number."""
    count = 0
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


@contextmanager
def impatience(*groups: Any) -> Iterator[None]:
    """Give collectives of these groups a short timeout within the block."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(IMPATIENCE, group)
    try:
        yield
    finally:
        for group in groups:
            with suppress(RuntimeError):
                dist.distributed_c10d._set_pg_timeout(PATIENCE, group)


# -- faults before recover() -----------------------------------------------------------------------


def connections_cut(job: Job) -> None:
    """The connections of one group are closed without a notification."""
    before = connections()
    group = job.new_group()
    all_reduce(group)
    mine = connections() - before
    job.meet("all have used it")
    assert job.rank != FAULTY or cut(mine) == 3
    error = attempt(lambda: all_reduce(group)).text
    assert "onnection" in error  # closed, or reset while data was in flight
    assert "Timed out" not in error


def collective_skipped(job: Job) -> None:
    """One rank does not take part, and detects the fault by ``recovery_requested`` only."""
    before = reloadpg.recovery.recovery_requested()
    job.meet("all have read it")
    if job.rank == FAULTY:
        assert not before
        assert eventually(reloadpg.recovery.recovery_requested)
    else:
        with impatience(job.ring):
            error = attempt(lambda: all_reduce(job.ring)).text
        assert "Timed out" in error or "onnection" in error


def groups_aborted(job: Job) -> None:
    """The program aborts the default group and another one on one rank."""
    if job.rank == FAULTY:
        for group in (dist.group.WORLD, job.ring):
            group.abort()


def offloaded(job: Job) -> None:
    """All groups are offloaded."""
    reloadpg.offload()


def offload_half_way(job: Job) -> None:
    """One rank calls recover() instead of offload(): the ranks that wait there are notified."""
    if job.rank != FAULTY:
        with pytest.raises(reloadpg.PeerFailedError, match=f"rank {FAULTY} has called recover"):
            reloadpg.offload()
        assert job.states() == {"live"}


def coalescing_left_open(job: Job) -> None:
    """An error in a coalescing block: torch would coalesce all later operations."""
    with pytest.raises(OSError, match="in the block"), dist._coalescing_manager(group=job.ring):  # type: ignore[attr-defined]
        raise OSError("in the block")


def stopped(job: Job) -> None:
    """A rank is stopped for longer than the timeout of a collective, and then continues."""
    store = base_store().clone()
    store.set(f"test/pid/{job.rank}", str(os.getpid()))
    job.meet("stopped")
    if job.rank == FAULTY:
        signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert eventually(reloadpg.recovery.recovery_requested)
        return
    pid = int(store.get(f"test/pid/{FAULTY}"))
    if job.rank == 0:
        os.kill(pid, signal.SIGSTOP)
    store.add("test/stopped/after", 0)
    with impatience(job.ring):
        assert attempt(lambda: all_reduce(job.ring)).text
    if job.rank == 0:
        os.kill(pid, signal.SIGCONT)


def collective_raises(job: Job) -> None:
    """A collective raises on one rank, while the others wait in it."""
    with faults.inject(Fault("collective", rank=FAULTY, operation="allreduce")):
        error = attempt(lambda: all_reduce(job.ring)).text
    assert job.rank != FAULTY or "injected fault" in error


def collective_stalls(job: Job) -> None:
    """A rank stalls in a collective until another one requests a recovery."""

    def stall(_: object) -> None:
        assert eventually(reloadpg.recovery.recovery_requested)

    fault = Fault("collective", "call", rank=FAULTY, operation="allreduce", call=stall)
    dist.distributed_c10d._set_pg_timeout(PATIENCE if job.rank == FAULTY else IMPATIENCE, job.ring)
    with faults.inject(fault):
        assert attempt(lambda: all_reduce(job.ring)).text
    dist.distributed_c10d._set_pg_timeout(PATIENCE, job.ring)


def abort_raises(job: Job) -> None:
    """Aborts fail on one rank: its communicators are dropped."""
    faults.inject(Fault("release", rank=FAULTY, operation="abort", times=None))
    collective_raises(job)


FAULTS: dict[str, tuple[Callable[[Job], None], ...]] = {
    "core": (connections_cut, groups_aborted, collective_skipped, offloaded, offload_half_way),
    "more": (coalescing_left_open, stopped),
    "sim": (collective_raises, collective_stalls, abort_raises),
}


# Torch 2.8 does not change the timeout of a gloo group that exists, so a skipped collective lasts.
@(pytest.mark.matrix if TorchVersion(torch.__version__) >= "2.13" else pytest.mark.slow)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("chain", sampled(FAULTS, "core"))
def test_the_job_continues_after_each_of_several_faults(rank: int, chain: str) -> None:
    """All groups are live after each recovery.

    The report names the rank and its reason and is the same on all ranks. Neither keys of the store
    nor memory of a simulated accelerator accumulate.
    """
    job = Job("sim" if chain == "sim" else "gloo")
    keys = []
    for number, fault in enumerate(FAULTS[chain]):
        fault(job)
        reason = f"test of {fault.__name__}"
        report = reloadpg.recovery.recover(reason if rank == FAULTY else None)
        assert (report.operation, report.changed, report.error) == ("recover", True, "")
        assert {one.rank: one.reason for one in report.faults}[FAULTY] == reason
        if fault is collective_skipped:
            assert [one.rank for one in report.faults if one.late] == [FAULTY]
        job.agree(reason, report.faults)
        if chain == "sim":
            job.assert_memory()  # the canary has connected each group
        faults.clear_faults()
        job.assert_live(number + 1)
        keys.append(base_store().num_keys())
        job.meet(reason)
    assert keys[-1] - keys[0] <= 6 * len(keys), keys  # also those of the test
    reloadpg.offload()
    assert faults != "sim" or simulated.stats().held_bytes == 0
    reloadpg.reload()
    job.assert_live(len(keys) + 1)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("parallelism", [1, 8])
def test_an_abort_that_stalls_is_named_and_releases_its_memory_at_its_end(
    rank: int, parallelism: int
) -> None:
    """The job continues, and the memory stays in use until then; the report has a warning."""
    job = Job("sim", parallelism=parallelism)
    first = job.ring.group_name
    stall = faults.inject(Fault("release", "stall", rank=FAULTY, operation="abort", group=first))
    # The peers of a rank that does not abort have to wait for the timeout of the collective.
    dist.distributed_c10d._set_pg_timeout(IMPATIENCE, job.ring)
    collective_raises(job)
    dist.distributed_c10d._set_pg_timeout(PATIENCE, job.ring)
    report = reloadpg.recovery.recover("test")
    stalled = rank == FAULTY
    assert any("its memory is not free" in text for text in report.warnings) == stalled
    assert simulated.stats().held_bytes == HELD * (len(job.groups) + stalled)
    assert (first in {group.name for group in simulated.groups()}) == stalled
    job.assert_live(1)
    job.meet("live")
    stall.clear()
    reloadpg.recovery.recover("again")
    job.assert_memory()
    assert reloadpg.status().unfinished == ()
    job.assert_live(2)


@pytest.mark.ranks(4)
def test_rank_0_warns_of_a_recovery_and_only_reload_callbacks_are_called(rank: int) -> None:
    """The warning has the rank that requested the recovery, its reason, and the duration.

    Callbacks before a reload are called only if the job was offloaded.
    """
    job = Job("gloo")
    warnings: list[str] = []
    called: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg").addHandler(handler)
    reloadpg.on_offload(lambda: called.append("offload"))
    reloadpg.on_reload(lambda: called.append("reload"))
    reloadpg.on_reload(lambda: called.append("before"), before=True)
    reloadpg.recovery.recover("a link is down" if rank == FAULTY else None)
    assert called == ["reload"]
    assert job.sums()
    assert len(warnings) == (rank == 0), warnings
    for text in warnings:
        assert re.search(r"^recover: 4 groups in [\d.]+ ms, generation 1; rank 1: a link", text)
    reloadpg.offload()
    called.clear()
    reloadpg.recovery.recover()
    assert called == ["before", "reload"]
    job.assert_live()


# -- consecutive recoveries -----------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_fault_names_the_line_of_the_program_and_its_collective(rank: int) -> None:
    """Frames within torch are omitted, and so is the collective if the program itself raises."""
    Job("gloo", subgroups=())

    def step() -> None:
        if rank == FAULTY:
            raise Injected("of the program")
        dist.all_reduce(None)  # type: ignore[arg-type]

    try:
        step()
    except (Injected, TypeError):
        report = reloadpg.recovery.recover()
    first = step.__code__.co_firstlineno
    own, of_torch = (f"test_recover.py:{first + line} (step)" for line in (2, 3))
    assert [one.where for one in report.faults] == [f"all_reduce at {of_torch}", own]


# -- missing ranks, and jobs without groups -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_rank_that_does_not_call_is_named_and_may_call_later(rank: int) -> None:
    """The others wait for ``timeout``; all ranks meet in the next call."""
    os.environ |= worlds.SILENCE
    job = Job("gloo")
    if rank != FAULTY:
        seen = attempt(lambda: reloadpg.recovery.recover(timeout=BOUND))
        assert (seen.kind, seen.missing) == ("RendezvousTimeoutError", (FAULTY,))
        assert "recover(timeout=...)" in seen.text
    job.meet("timed out")
    assert reloadpg.recovery.recovery_requested()
    reloadpg.recovery.recover()
    job.assert_live()


@pytest.mark.ranks(4)
def test_ranks_with_different_groups_cannot_recover(rank: int) -> None:
    """All ranks name the group, and no group is live."""
    job = Job("gloo")
    ring = job.groups.pop("g4")
    if rank == FAULTY:
        dist.destroy_process_group(ring)
    with pytest.raises(reloadpg.DisagreementError, match=r"group '5'.*without a communicator"):
        reloadpg.recovery.recover()
    assert job.states() == {"failed"}


@pytest.mark.ranks(1)
def test_recover_without_a_job_changes_nothing() -> None:
    reloadpg.install(backends={"gloo"})
    report = reloadpg.recovery.recover("nothing")
    assert not report.changed
    assert "not initialized" in report.note
    assert not reloadpg.recovery.recovery_requested()


@pytest.mark.parametrize("given", [0, -1.0, float("nan")])
def test_the_timeout_must_be_positive(given: float) -> None:
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="timeout="):
        reloadpg.recovery.recover(timeout=given)


def _second(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


@pytest.mark.ranks(2)
def test_all_backends_of_a_mixed_group_are_recreated() -> None:
    """Any of them may be faulty. An offload keeps the backend that is not selected."""
    dist.Backend.register_backend("second", _second, devices=["meta"])
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("cpu:gloo,meta:second")
    world: Any = dist.group.WORLD
    meta = torch.device("meta")
    kept = world._get_backend(meta)
    reloadpg.offload()
    assert world._get_backend(meta) is kept
    reloadpg.recovery.recover("test")
    assert world._get_backend(meta) is not kept
    tensors = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(tensors[0])
    world._get_backend(meta).allreduce([tensors[1]]).wait()
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
