"""Strategy ``suspend`` over torch's own NCCL engines: memory, skipped groups, errors, misuse."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import PATIENCE, TRIANGLE, Job, attempt, reasons, strategies
from helpers.nccl_job import CAN_SUSPEND, MIB, on_engines

import reloadpg
from reloadpg.c10d import backends as c10d_backends
from reloadpg.c10d import memory, nccl
from reloadpg.testing import standins
from reloadpg.testing.faults import Fault, InjectedFault, inject

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.skipif(not CAN_SUSPEND, reason="torch before 2.12 cannot suspend"),
]

FAULTY = 1
NESTED = ((0, 1), (0, 1, 2))
"""Subgroups that all have rank 0, as WORLD does."""


def on_three(**env: str) -> Any:
    return on_engines(3, TEST_WORLD="nccl-bound" if worlds.BOUND else "nccl", **env)


def start(**options: Any) -> Job:
    return Job("nccl", **{"strategy": "suspend", "subgroups": TRIANGLE, **options})


def held() -> int:
    """Bytes of communicators on this rank's device."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def interrupt_within(call: str) -> InjectedFault:
    """Interrupt the faulty rank within its next call of this kind, which stalls until then."""
    stall = inject(Fault("nccl", "stall", operation=call, rank=FAULTY))

    def interrupt() -> None:
        assert stall.wait_fired(PATIENCE.total_seconds())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    return stall


@pytest.mark.parametrize("strategy", ["suspend", "recreate"])
@on_three()
def test_three_cycles(engine: str, strategy: str) -> None:
    """The report has the bytes that the device has back; suspend keeps a part, and the backends.

    Collectives raise on offloaded groups, and the same objects sum correctly after the reload. The
    groups overlap: torch's own suspend holds Python's lock and would deadlock.
    """
    job = start(strategy=strategy)
    count, suspends, live = len(job.groups), strategy == "suspend", held()
    backends = [group._get_backend(torch.device("cuda")) for group in job.groups.values()]
    for cycle in range(1, 4):
        report = reloadpg.offload()
        left = held()
        assert (0 < left < live / 10) if suspends else left == 0
        assert job.refused()
        assert job.states() == {"offloaded"}
        status = reloadpg.status()
        assert status.memory_bytes == left
        for group in status.groups:
            assert (group.strategy, group.timeout_s) == (strategy, 120)
        assert not reloadpg.offload().changed
        back = reloadpg.reload(connect="eager")
        assert held() == live
        assert (job.states(), job.generations()) == ({"live"}, {0 if suspends else cycle})
        assert job.sums()
        assert not reloadpg.reload(connect="eager").changed
        assert report.memory_source == back.memory_source
        assert report.released_bytes == back.restored_bytes == live - left
        assert report.pinned_bytes == (report.released_bytes if suspends else 0)
        assert back.pinned_bytes == 0
        assert report.to_dict()["offload/released_bytes"] == report.released_bytes
        assert report.restored_bytes is back.released_bytes is None
        assert sum(group.bytes or 0 for group in report.groups) == live
        assert len(report.groups) == count
        assert {*strategies(report).values(), *strategies(back).values()} == {strategy}
    for group, backend in zip(job.groups.values(), backends, strict=True):
        assert (group._get_backend(torch.device("cuda")) is backend) == suspends


@pytest.mark.parametrize("used", [("WORLD", "g0"), ("g0",)], ids="+".join)
@on_three()
def test_a_communicator_that_was_never_used_is_skipped_on_all_ranks(
    engine: str, rank: int, used: tuple[str, ...]
) -> None:
    """NCCL cannot suspend it. All members skip it, and it works afterwards. Other groups are
    suspended, even if a rank has used none of its groups.
    """
    job = start(used=False)
    job.sums(*used)
    members = {"WORLD": {0, 1, 2}, "g0": {0, 1}, "g1": {1, 2}, "g2": {0, 1, 2}}
    connected = members if engine == "nccl2" or worlds.BOUND else used  # at their creation
    mine = {
        name: "suspend" if name in connected else "skip"
        for name, ranks in members.items()
        if rank in ranks
    }
    for _ in range(2):
        report = reloadpg.offload()
        assert job.refused()
        assert strategies(report) == strategies(reloadpg.reload()) == mine
    assert job.sums()


@on_three()
def test_suspended_groups_can_be_destroyed(engine: str) -> None:
    """First one group, which stays destroyed after the reload, and then all groups.

    By an abort: a shutdown would need the peers. NCCL leaves 4 MiB of each.
    """
    job = start()
    reloadpg.offload()
    group = job.groups.pop("g2")
    dist.destroy_process_group(group)
    reloadpg.reload()
    assert job.sums()
    assert group.state == "destroyed"
    reloadpg.offload()
    dist.destroy_process_group()
    assert standins.communicators() == 0
    assert held() == standins.left_bytes()


@on_three()
def test_what_is_set_while_suspended_holds_after_the_reload(engine: str) -> None:
    job = start()
    group = job.groups["WORLD"]
    reloadpg.offload()
    group._set_group_desc("renamed")
    group._managed.set_timeout(timedelta(seconds=77))
    reloadpg.reload()
    inner = group._managed.communicator
    assert inner.group_desc == "renamed"
    reported = c10d_backends.get_timeouts(inner, tuple(group._managed.construction.devices))
    assert {timeout.total_seconds() for timeout in reported.values()} == {77}
    assert job.sums()


@on_three()
def test_no_rank_resumes_before_all_have_enough_memory(engine: str, rank: int) -> None:
    """If one rank has too little, all raise and none resumes. With just enough, all resume."""
    job = start()
    reloadpg.offload()
    left = held()
    if rank == FAULTY:  # the rollout engine still has the memory
        free, _ = torch.cuda.mem_get_info()
        engines = torch.empty(free - 2 * MIB, dtype=torch.uint8)
    error = reloadpg.errors.InsufficientMemoryError if rank == FAULTY else reloadpg.PeerFailedError
    with pytest.raises(error, match=r"rank 1 has \d MiB free \(device\)"):
        reloadpg.reload()
    assert job.states() == {"offloaded"}
    if rank == FAULTY:
        del engines
        torch.cuda.empty_cache()
    assert held() == left
    assert {*strategies(reloadpg.reload()).values()} == {"suspend"}
    assert job.sums()


@on_three()
def test_a_suspend_that_gave_back_too_little_is_the_last_one(engine: str, rank: int) -> None:
    """The report of the first offload says so, with the reason; one rank decides for all."""
    job = start(subgroups=NESTED)
    total = held()
    copy = inject(Fault("nccl", "stall", operation="copy", rank=rank, times=None))
    pending = reloadpg.offload(wait=False)
    assert copy.wait_fired(PATIENCE.total_seconds())
    taken = torch.empty(total if rank == 0 else 1, dtype=torch.uint8).cuda()  # by another program
    copy.clear()
    first = pending.result()
    del taken
    assert {*strategies(first).values()} == {"suspend"}
    short = [text for text in first.warnings if "gave back" in text]
    assert [rank] * len(short) == [0] * (rank == 0)
    reloadpg.reload()
    assert job.sums()
    second = reloadpg.offload()
    assert strategies(second) == dict.fromkeys(job.groups, "recreate")
    assert all("an earlier suspend gave back" in text for text in reasons(second).values() if text)
    reloadpg.reload()
    assert job.sums()


@pytest.mark.parametrize("variable", ["NCCL_CUMEM_ENABLE=0", "TORCH_NCCL_USE_COMM_NONBLOCKING=1"])
@on_three()
def test_groups_that_a_rank_cannot_suspend_are_recreated(
    engine: str, rank: int, variable: str
) -> None:
    """All members report the reason.

    Without cuMem a suspend would succeed and release nothing. It is off on all ranks: NVIDIA's NCCL
    creates no communicator if the ranks differ in that.
    """
    name, _, value = variable.partition("=")
    if rank == 0 or name == "NCCL_CUMEM_ENABLE":
        os.environ[name] = value
    job = start(subgroups=NESTED)
    report = reloadpg.offload()
    assert held() == 0
    reloadpg.reload()
    assert strategies(report) == dict.fromkeys(job.groups, "recreate")
    assert all(name in reason for reason in reasons(report).values())
    assert job.sums()


@pytest.mark.parametrize("at", ["suspend", "resume", "no memory"])
@on_three()
def test_the_job_recreates_after_a_failure(engine: str, rank: int, at: str) -> None:
    """All groups are failed; the next offload warns once, with the reason."""
    job = start()
    taken: list[Any] = []

    measured = memory.free_bytes

    def take_memory() -> None:
        """Leave too little, after the ranks have agreed that there was enough."""
        memory.free_bytes = measured
        free, _ = torch.cuda.mem_get_info()
        taken.append(torch.empty(free - 2 * MIB, dtype=torch.uint8, device=f"cuda:{rank}"))

    if at != "suspend":
        reloadpg.offload()
    if rank == FAULTY and at == "no memory":
        memory.free_bytes = take_memory  # type: ignore[assignment]
    elif rank == FAULTY:
        inject(Fault("nccl", operation=at, rank=FAULTY))
    with pytest.raises(reloadpg.ReloadpgError):
        (reloadpg.offload if at == "suspend" else reloadpg.reload)()
    assert job.states() == {"failed"}
    taken.clear()
    torch.cuda.empty_cache()
    reloadpg.reload()
    assert job.sums()
    then = reloadpg.offload()
    again = reloadpg.reload()
    assert strategies(then) == strategies(again) == dict.fromkeys(job.groups, "recreate")
    assert job.sums()
    phase = "'suspended'" if at == "suspend" else "'resumed'"
    assert all(phase in reason for reason in reasons(then).values())
    (warning,) = [text for text in then.warnings if "recreated, not suspended" in text]
    assert warning.startswith(f"{len(job.groups)} groups are recreated")


@on_three()
def test_an_interrupt_within_a_suspend(engine: str, rank: int) -> None:
    """It is raised on that rank, and all others are notified; the next reload works."""
    job = start()
    if rank == FAULTY:
        interrupt_within("suspend")
    seen = attempt(reloadpg.offload)
    assert seen.kind == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError"), seen
    assert job.states() == {"failed"}
    reloadpg.reload()
    assert job.sums()


@pytest.mark.parametrize("operation", ["offload", "reload"])
@on_three()
def test_an_abort_waits_for_the_copies_of_a_suspend_or_resume(
    engine: str, rank: int, operation: str
) -> None:
    """NCCL's does not, and frees what another thread copies (failure 48).

    The stand-in records that, which fails this test.
    """
    job = start()
    if operation == "reload":
        reloadpg.offload()
    if rank == FAULTY:
        copy = interrupt_within("copy")
    seen = attempt(getattr(reloadpg, operation))
    assert seen.kind == ("KeyboardInterrupt" if rank == FAULTY else "PeerFailedError"), seen
    assert job.states() == {"failed"}
    if rank == FAULTY:
        assert standins.communicators() >= 1
        copy.clear()
    reloadpg.reload()
    assert job.sums()
    reloadpg.offload()
    assert standins.communicators() == 0


@pytest.mark.parametrize("operation", ["offload", "reload"])
@on_three()
def test_a_backend_that_the_program_has_suspended_or_resumed(engine: str, operation: str) -> None:
    """A second suspend or resume raises on all ranks; a reload recreates the groups.

    By default a backend object refuses to resume a suspended group.
    """
    job = start(borrowed="ignore", parallelism=1)
    backend = job.groups["WORLD"]._get_backend(torch.device("cuda"))
    if operation == "offload":
        nccl.suspend_backend(backend)
    else:
        reloadpg.offload()
        nccl.resume_backend(backend)
        assert job.refused()
    with pytest.raises(reloadpg.ReloadpgError):
        getattr(reloadpg, operation)()
    reloadpg.reload()
    assert job.sums()


@pytest.mark.parametrize("when", ["offload", "reload"])
@on_three()
def test_a_callback_can_destroy_a_suspended_group(engine: str, when: str) -> None:
    job = start(subgroups=((0, 1, 2),))
    group = job.groups.pop("g0")
    if when == "offload":
        reloadpg.on_offload(lambda: dist.destroy_process_group(group))
    else:
        reloadpg.on_reload(lambda: dist.destroy_process_group(group), before=True)
    reloadpg.offload()
    reloadpg.reload()
    assert group.state == "destroyed"
    assert job.sums()
