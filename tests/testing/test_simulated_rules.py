"""The simulated accelerator: connecting, releasing, and faults."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers import worlds
from helpers.fault_job import meet
from torch.distributed import distributed_c10d

import reloadpg
from reloadpg.testing import faults, simulated
from reloadpg.testing.faults import Fault, FaultMoment, InjectedFaultError

MIB = 1 << 20
HELD = 8 * MIB
CPU = torch.device("cpu")


def start(**configuration: Any) -> Any:
    """Begin a job on the simulated accelerator; return the backend of the default group."""
    simulated.register()
    simulated.configure(bytes_per_communicator=HELD, **configuration)
    dist.init_process_group("sim")
    world: Any = dist.group.WORLD
    return world._get_backend(CPU)


def alone(desc: str = "") -> Any:
    """A group of this rank, created locally."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=desc)


def use(group: Any = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def drop(group: Any) -> None:
    """Forget a group without destroying it; the caller's reference must go too."""
    name = group.group_name
    world: Any = distributed_c10d._world
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
    for table in (getattr(world, name) for name in tables):
        table.pop(group, None)
    for groups in distributed_c10d._world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    distributed_c10d._unregister_process_group(name)


def held() -> int:
    return simulated.stats().held_bytes


def dist_error(match: str) -> Any:
    return pytest.raises(dist.DistBackendError, match=match)


# ---------------------------------------------------------------------------------------------
# rules


@pytest.mark.ranks(1)
def test_a_released_group_raises_on_every_path() -> None:
    """By group, ``torch.distributed``, functional collectives and a kept backend, as with NCCL."""
    start()
    group = alone()
    use(group)
    backend = group._get_backend(CPU)
    group.shutdown()
    group.shutdown()
    group.abort()
    for call in (
        lambda: group.allreduce([torch.ones(1)]),
        lambda: use(group),
        lambda: funcol.all_reduce(torch.ones(1), "sum", group),
        lambda: group._get_backend(CPU),
        lambda: backend.allreduce([torch.ones(1)]),
        lambda: backend.eager_connect_single_device(CPU),
    ):
        with dist_error("its communicator was released"):
            call()
    dist.destroy_process_group(group)
    assert simulated.stats().released == 1
    unused = alone()
    unused.abort()
    with dist_error("its communicator was released"):
        unused.barrier()


@pytest.mark.ranks(1)
def test_the_memory_of_a_group_that_is_dropped_is_freed() -> None:
    """Also without a release, or after one that failed."""
    start()
    for release_fails in (False, True):
        group = alone()
        use(group)
        assert held() == HELD
        if release_fails:
            with faults.inject(Fault("release")), pytest.raises(InjectedFaultError):
                group.shutdown()
        drop(group)
        del group
        gc.collect()
        assert (simulated.stats().live, held()) == (1, 0)


# ---------------------------------------------------------------------------------------------
# connecting: lazy, eager, and its timeouts


@pytest.mark.ranks(2)
def test_an_eager_group_connects_at_creation(rank: int) -> None:
    """Without its peer, the creation raises at its timeout, and no group is left."""
    start()
    lazy: Any = dist.new_group()
    lazy._get_backend(CPU).eager_connect_single_device(CPU)
    assert simulated.groups()[-1].state == "connected"
    simulated.configure(eager=True)
    eager = dist.new_group()
    info = simulated.groups()[-1]
    assert (info.state, info.held_bytes, info.collectives) == ("connected", HELD, 0)
    dist.barrier(group=eager)
    if rank == 0:
        before = simulated.stats()
        with pytest.raises((RuntimeError, dist.DistStoreError)):
            dist.new_group([0, 1], timedelta(seconds=1), use_local_synchronization=True)
        after = simulated.stats()
        assert (after.live, after.held_bytes) == (before.live, before.held_bytes)
    meet("end", 2)


# ---------------------------------------------------------------------------------------------
# faults


LIFE: tuple[tuple[Any, str, int], ...] = (
    ("connect", "connected", HELD),
    ("release", "released", 0),
)
"""The steps of a group after its creation, each with its state and held bytes afterwards."""


@pytest.mark.ranks(1)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_step_with_a_fault_is_undone_or_complete(moment: Any) -> None:
    """After a fault before the step, the step can be repeated."""
    start()
    group = alone()
    info = simulated.groups()[-1]
    before = ("created", 0)
    steps = {"connect": lambda: use(group), "release": group.shutdown}
    for at, *after in LIFE:
        with faults.inject(Fault(at, moment=moment, message="on purpose")):
            with pytest.raises(InjectedFaultError, match="on purpose"):
                steps[at]()
            assert (info.state, held()) == (before if moment == "before" else tuple(after)), at
            if moment == "before":
                steps[at]()
        before = tuple(after)


@pytest.mark.ranks(2)
def test_a_creation_that_fails_leaves_no_group(rank: int) -> None:
    """Neither before nor after the step. Here it fails at its second event, or on rank 1."""
    start()
    for fault in (Fault("create", nth=2), Fault("create", nth=2, moment="after")):
        with faults.inject(fault):
            alone()
            live, known = simulated.stats().live, len(distributed_c10d._world.pg_map)
            with pytest.raises(InjectedFaultError):
                alone()
            assert simulated.stats().live == live
            assert len(distributed_c10d._world.pg_map) == known
            alone()
    with (
        faults.inject(Fault("create", rank=1)) as on_rank_1,
        pytest.raises(InjectedFaultError) if rank == 1 else nullcontext(),
    ):
        alone()
    assert on_rank_1.fired == rank


@pytest.mark.ranks(1)
def test_a_fault_selects_operations_and_groups(rank: int) -> None:
    """By operation, number of the event, and name or description of the group."""
    start()
    first, other = alone(), alone("other")

    def failed(operation: Any, group: Any) -> bool:
        try:
            operation(group)
        except InjectedFaultError:
            return True
        return False

    def broadcast(group: Any) -> None:
        dist.broadcast(torch.ones(1), rank, group)

    with faults.inject(Fault("collective", operation="broadcast", nth=2, times=2)):
        assert [failed(broadcast, first) for _ in range(5)] == [False, True, True, False, False]
        assert not failed(use, first)
    with faults.inject(Fault("collective", group="oth*", times=None)):
        assert [failed(use, g) for g in (first, other) * 2] == [False, True] * 2
    with faults.inject(Fault("collective", group=first.group_name)):
        assert [failed(use, g) for g in (other, first)] == [False, True]


@pytest.mark.ranks(1)
def test_a_stall_blocks_until_it_is_cleared_or_its_time_is_over() -> None:
    """By its handle or by ``clear_faults``. An abort ends a stalled connection."""
    start()
    group = alone()
    with ThreadPoolExecutor(1) as pool:
        for by_handle in (True, False):
            fault = faults.inject(Fault("collective", "stall"))
            using = pool.submit(use, group)
            assert fault.wait_fired(200)
            assert not using.done()
            fault.clear() if by_handle else faults.clear_faults()
            assert using.result(200) == use(group) == 1
        begun = time.monotonic()
        with faults.inject(Fault("create", "stall", seconds=0.3)):
            fresh = alone("fresh")
        assert 0.3 <= time.monotonic() - begun < 200
        before = held()
        fault = faults.inject(Fault("connect", "stall", group="fresh"))
        using = pool.submit(use, fresh)
        assert fault.wait_fired(200)
        fresh.abort()
        fault.clear()
        with dist_error("was released"):
            using.result(200)
        assert held() == before


@pytest.mark.ranks(2)
def test_a_fault_can_be_at_a_barrier(rank: int) -> None:
    """On any backend, on the named rank, at the named barrier; before it, after it or waiting."""
    reloadpg.install(backends={worlds.BACKEND})
    worlds.init()
    seen: dict[str, list[str]] = {moment: [] for moment in get_args(FaultMoment)}
    for moment in get_args(FaultMoment):
        note = seen[moment].append
        faults.inject(Fault("barrier", "call", moment=moment, times=None, call=note))
    with reloadpg.offloaded():
        pass
    barriers = ["offload.enter", "offload.released", "reload.enter", "reload.done"]
    assert seen["before"] == seen["after"] == barriers
    waited = seen["waiting"]  # where this rank was not the last one
    assert waited == [name for name in barriers if name in waited]
    fault = faults.inject(Fault("barrier", rank=1, operation="offload.released"))
    with pytest.raises((InjectedFaultError, reloadpg.PeerFailedError)) as caught:
        reloadpg.offload()
    assert (fault.fired, isinstance(caught.value, InjectedFaultError)) == (rank, rank == 1)
    assert "before barrier offload.released" in str(caught.value)
    reloadpg.reload()


# ---------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": "destroy"},
        {"at": "create", "action": "explode"},
        {"at": "create", "moment": "during"},
        {"at": "create", "action": "call"},
        {"at": "create", "call": print},
        {"at": "create", "action": "async"},
        {"at": "create", "nth": 0},
        {"at": "nccl"},
        {"at": "nccl", "operation": "allreduce"},
        {"at": "nccl", "operation": "init", "moment": "after"},
        {"at": "nccl", "operation": "monitor", "action": "stall"},  # a wait of torch, which can
        {"at": "nccl", "operation": "monitor", "seconds": 1.0},  # only take longer
    ],
)
def test_an_invalid_fault_raises(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Fault(**arguments)
