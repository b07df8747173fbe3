"""The library over torch's own NCCL engines, on stand-ins for CUDA and NCCL."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_job import (
    CAN_SUSPEND,
    ENGINES,
    LIMIT,
    Held,
    Meetings,
    engine_variables,
    held,
    left_over,
    start,
    summed,
    used,
)

import reloadpg
from reloadpg.testing import run_ranks, standins
from reloadpg.testing.standins import Fault

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

HANG_S = 120.0
SHORT = timedelta(seconds=5)
"""A timeout that is reached."""
BOUND = timedelta(seconds=10)
"""The timeout of an operation that reaches it."""
CYCLES = int(os.environ.get("NCCL_CYCLES", "10"))


@pytest.fixture(params=ENGINES)
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_ranks`` over the stand-ins, with one of torch's engines; 2.15 has two."""
    env = engine_variables(request.param)

    def run(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        return run_ranks(fn, size, args=args, standins=True, env=env, timeout=240.0)

    return run


def _connected(rank: int, world_size: int, bound: bool, how: str) -> list[tuple[int, float]]:
    start(rank, bound=bound)
    group = dist.new_group([0, 1])
    seen = []
    for _ in range(4):
        sums = summed(None, rank) + summed(group, rank)
        seen.append((used(), sums))
        if how == "recover":
            reloadpg.recover("a test")
        else:
            reloadpg.offload()
            reloadpg.reload(connect=how)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("how", ["eager", "canary", "recover"])
@pytest.mark.parametrize("bound", [True, False])
def test_a_connected_group_is_not_connected_again(
    ranks: Callable[..., list[Any]], bound: bool, how: str
) -> None:
    """Torch connects a group that is bound to a device when it creates it: nothing leaks."""
    for seen in ranks(_connected, 2, bound, how):
        assert len(set(seen)) == 1, seen
        assert seen[0][1] == 6.0


def _flat(rank: int, world_size: int, bound: bool, how: str) -> tuple[str, Held]:
    start(rank, bound=bound)
    meetings = Meetings(world_size)
    groups = [None, dist.new_group([0, 1]), dist.new_group([0, 1])]
    for cycle in range(1, CYCLES + 1):
        if how == "recover":
            reloadpg.recover("a test")
        reloadpg.offload()  # each thread that creates groups then has its store client
        reloadpg.reload()
        assert [summed(group, rank) for group in groups] == [3.0] * 3
        meetings.meet()
        if cycle == 5:
            before = held()
            meetings.meet()
    return left_over(before), before


@pytest.mark.parametrize("how", ["reload", "recover"])
@pytest.mark.parametrize("bound", [True, False])
def test_cycles_leave_nothing_over(ranks: Callable[..., list[Any]], bound: bool, how: str) -> None:
    """Communicators, bytes, threads and descriptors are those of the fifth cycle."""
    for rest, before in ranks(_flat, 2, bound, how):
        assert not rest
        assert before.communicators == 3


def _timeouts(rank: int, world_size: int) -> list[float]:
    start(rank)
    group = dist.new_group([0, 1])
    cuda = torch.device("cuda")

    def timeout() -> float:
        return float(group._get_backend(cuda).options._timeout.total_seconds())  # type: ignore[attr-defined]

    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=71), group)
    seen = [timeout()]
    reloadpg.offload()
    reloadpg.reload()
    seen.append(timeout())
    reloadpg.recover("a test")
    seen.append(timeout())
    reloadpg.offload()
    set_timeout(timedelta(seconds=72), group)
    reloadpg.reload()
    seen.append(timeout())
    assert summed(group, rank) == 3.0
    return seen


def test_a_timeout_set_after_the_creation_holds(ranks: Callable[..., list[Any]]) -> None:
    """Set on a live group, and on an offloaded one."""
    assert ranks(_timeouts, 2) == [[71, 71, 71, 72]] * 2


def _keys(rank: int, world_size: int) -> list[int]:
    start(rank)
    group = dist.new_group([0, 1])
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    # A rank that works for long creates this key.
    store.underlying_store.add("reloadpg/1/progress", 0)  # type: ignore[attr-defined]
    seen = []
    for _ in range(4):
        reloadpg.offload()
        reloadpg.reload()
        summed(group, rank)
        summed(None, rank)
        seen.append(store.num_keys())
        summed(None, rank)
    return seen


def test_keys_of_released_communicators_are_deleted(ranks: Callable[..., list[Any]]) -> None:
    """From the second generation on, the number of keys in the store is constant."""
    for seen in ranks(_keys, 2):
        assert len(set(seen[1:])) == 1, seen


def _ended(rank: int, world_size: int) -> None:
    start(rank)
    pair = dist.new_group([0, 1])
    reloadpg.offload()
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    dist.destroy_process_group(pair)
    dist.distributed_c10d._abort_process_group()


def test_offloaded_groups_can_be_destroyed_and_aborted(ranks: Callable[..., list[Any]]) -> None:
    """Torch queries their backends as it destroys or aborts them."""
    assert ranks(_ended, 2) == [None, None]


def _training(rank: int, world_size: int, fault: str) -> tuple[list[float], list[int]]:
    start(rank, recoverable=True)
    group: Any = dist.group.WORLD
    summed(None, rank)
    done: dict[int, float] = {}
    attempts = {}
    for step in reloadpg.retrying(range(4)):
        with step as number:
            if rank == 0:
                group.set_timeout(LIMIT)
            if (number, step.attempt) == (2, 1):
                _go_wrong(rank, group, fault)
            tensor = torch.tensor([float(number + rank)]).cuda()
            dist.all_reduce(tensor)
        attempts[number] = step.attempt
        if tensor.is_cuda:
            done[number] = tensor.item()
    return list(done.values()), list(attempts.values())


def _go_wrong(rank: int, group: Any, fault: str) -> None:
    if fault == "late" and rank == 1:
        waited = threading.Event()
        for _ in range(int(HANG_S * 10)):
            if reloadpg.recovery_requested():
                return
            waited.wait(0.1)
        raise AssertionError("rank 0 did not detect that rank 1 is late")
    if rank == 0:
        group.set_timeout(SHORT)
        if fault != "late":
            action: Any = fault
            standins.inject(Fault(action, "collective", rank=0, times=1))


@pytest.mark.parametrize("fault", ["late", "async", "fail"])
def test_a_step_is_repeated_whose_collective_was_aborted(
    ranks: Callable[..., list[Any]], fault: str
) -> None:
    """After a late rank, an asynchronous error, and a failed call.

    The aborted collective leaves wrong values and raises nothing: the step is not complete.
    """
    for values, attempts in ranks(_training, 2, fault):
        assert values == [1.0, 3.0, 5.0, 7.0]
        assert attempts == [1, 1, 2, 1]


def _failed_batch(rank: int, world_size: int) -> float:
    start(rank, recoverable=True)
    group: Any = dist.group.WORLD
    summed(None, rank)
    total = 0.0
    for step in reloadpg.retrying(range(1)):
        with step:
            group.set_timeout(SHORT if step.attempt == 1 else LIMIT)
            if step.attempt == 1 and rank == 1:
                standins.inject(Fault("fail", "send", rank=1, times=1))
            mine, received = torch.tensor([float(rank)]).cuda(), torch.empty(1).cuda()
            operations = [
                dist.P2POp(dist.isend, mine, 1 - rank),
                dist.P2POp(dist.irecv, received, 1 - rank),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            total = summed(None, rank) + received.item()
    reloadpg.offload()
    reloadpg.reload()
    assert summed(None, rank) == 3.0  # by a communicator that this thread creates
    return total


def test_a_batch_that_fails_does_not_stop_later_collectives(
    ranks: Callable[..., list[Any]],
) -> None:
    """Torch leaves NCCL's group call open, which then collects the thread's calls."""
    assert ranks(_failed_batch, 2) == [4.0, 3.0]


def _recovery_that_fails(rank: int, world_size: int) -> tuple[bool, float, float, str]:
    start(rank, bound=True, backend="cpu:gloo,cuda:nccl", timeout=BOUND)
    group: Any = dist.new_group([0, 1])
    summed(group, rank)
    failed = False
    if rank == 0:
        standins.inject(Fault("fail", "init", rank=0, times=1))
    try:
        reloadpg.recover("a test")
    except reloadpg.ReloadpgError:
        failed = True
    reloadpg.reload()
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return failed, value.item(), summed(group, rank), group.state


def test_a_reload_after_a_failed_recovery_rebuilds_all_backends_of_mixed_groups(
    ranks: Callable[..., list[Any]],
) -> None:
    """A recovery aborts the backends of the CPU, too."""
    assert ranks(_recovery_that_fails, 2) == [(True, 2.0, 3.0, "live")] * 2


def _in_background(rank: int, world_size: int) -> tuple[str, float, bool, float]:
    start(rank, backend="cpu:gloo,cuda:nccl")
    group: Any = dist.new_group([0, 1])
    summed(group, rank)
    backend = group._get_backend(torch.device("cpu"))
    reloadpg.offload(wait=False).result()
    raised = ""
    try:
        summed(group, rank)
    except reloadpg.GroupOffloadedError as error:
        raised = type(error).__name__
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    freed = standins.communicators() == 0
    reloadpg.reload(wait=False).result()
    same = group._get_backend(torch.device("cpu")) is backend
    return raised, value.item(), same and freed, summed(group, rank)


def test_the_cpu_backend_of_a_mixed_group_works_while_it_is_offloaded(
    ranks: Callable[..., list[Any]],
) -> None:
    """Only NCCL's communicators are released and rebuilt."""
    assert ranks(_in_background, 2) == [("GroupOffloadedError", 2.0, True, 3.0)] * 2


def _wrong_values(rank: int, world_size: int) -> tuple[str, float]:
    start(rank, recoverable=True)
    group: Any = dist.group.WORLD
    raised = ""
    summed(None, rank)
    if rank == 0:
        group.set_timeout(SHORT)
        dist.all_reduce(torch.ones(1).cuda())  # rank 1 does not take part
    try:
        reloadpg.offload()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        assert group.state == "live"
    if rank == 0:
        group.set_timeout(LIMIT)
    reloadpg.recover()
    reloadpg.offload()
    reloadpg.reload()
    return raised, summed(None, rank)


def test_an_offload_does_not_hide_an_aborted_collective(ranks: Callable[..., list[Any]]) -> None:
    """Its communicator holds the error: it is raised, and nothing is released."""
    (here, total), (there, other) = ranks(_wrong_values, 2)
    assert here.startswith("DistBackendError: a collective was aborted on this rank")
    assert there.startswith("PeerFailedError")
    assert total == other == 3.0


ENDS = (
    *(reloadpg.RendezvousTimeoutError, reloadpg.PeerFailedError),
    *(reloadpg.ReleaseError, reloadpg.RebuildError),
)


def _overlapping(rank: int, world_size: int, fault: Fault | None) -> dict[str, Any]:
    hangs = fault is not None and fault.action == "hang"
    start(rank, strategy="suspend", **({"timeout": BOUND} if hangs else {}))
    groups: list[tuple[Any, tuple[int, ...]]] = [(None, tuple(range(world_size)))]
    for size in (2, 3):
        for members in itertools.combinations(range(world_size), size):
            group = dist.new_group(list(members), timeout=LIMIT)
            if rank in members:
                groups.append((group, members))

    def right() -> bool:
        return all(summed(g, rank) == sum(m + 1 for m in members) for g, members in groups)

    seen: dict[str, Any] = {"right": [right()], "live": [used()], "offloaded": [], "errors": []}
    for cycle in range(3):
        injected = None
        if cycle == 1 and fault is not None and rank == 0:
            injected = standins.inject(fault)
        for operation in (reloadpg.offload, reloadpg.reload):
            try:
                operation()
            except ENDS as error:
                seen["errors"].append(type(error).__name__)
                if injected is not None:
                    injected.clear()
                operation()
            if operation is reloadpg.offload:
                seen["offloaded"].append(used())
        if injected is not None:
            injected.clear()
        seen["right"].append(right())
        seen["live"].append(used())
    return seen


@pytest.mark.skipif(not CAN_SUSPEND, reason="torch before 2.12 cannot suspend")
def test_overlapping_groups_are_suspended(ranks: Callable[..., list[Any]]) -> None:
    """At the default parallelism; torch's own suspend holds Python's lock and would deadlock."""
    for seen in ranks(_overlapping, 4, None):
        assert seen["right"] == [True] * 4
        assert seen["errors"] == []
        assert len(set(seen["live"])) == 1
        assert all(left < seen["live"][0] / 10 for left in seen["offloaded"])


@pytest.mark.skipif(not CAN_SUSPEND, reason="torch before 2.12 cannot suspend")
@pytest.mark.parametrize("call", ["suspend", "resume"])
@pytest.mark.parametrize("action", ["fail", "hang"])
def test_a_suspend_or_resume_that_fails_or_hangs_on_one_rank_raises_on_all(
    ranks: Callable[..., list[Any]], action: Any, call: Any
) -> None:
    """The operation fails on all ranks, or reaches the timeout; the next cycles are right."""
    fault = Fault(action, call, rank=0, times=1 if action == "fail" else None)
    results = ranks(_overlapping, 3, fault)
    for seen in results:
        assert seen["right"] == [True] * 4
        assert len(seen["errors"]) == 1
        assert len(set(seen["live"])) == 1
    if action == "fail":
        error = "ReleaseError" if call == "suspend" else "RebuildError"
        assert [seen["errors"] for seen in results] == [[error], *[["PeerFailedError"]] * 2]


def _shrunk(rank: int, world_size: int, whole: bool) -> Any:
    start(rank, bound=True)  # else torch gives the shrunk group to the CPU
    group = None if whole else dist.new_group([0, 1, 2])
    summed(group, rank)
    torch.cuda.synchronize()  # torch refuses to shrink while work is pending
    if rank == 2:
        return None
    shrunk = dist.distributed_c10d.shrink_group([2], group=group)
    named = dict(reloadpg.status().unmanaged)
    return shrunk.group_name, named, summed(shrunk, rank), len(reloadpg.status().groups)


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "shrink_group"), reason="this torch cannot shrink groups"
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_shrunk_group_is_named(ranks: Callable[..., list[Any]], whole: bool) -> None:
    """``shrink_group`` is not patched: its group works, and ``status().unmanaged`` has it."""
    *survivors, excluded = ranks(_shrunk, 3, whole)
    assert excluded is None
    for name, named, total, managed in survivors:
        assert list(named) == [name]
        assert "does not patch" in named[name]
        assert total == 3.0
        assert managed == (0 if whole else 1)
