"""The simulated accelerator: its results, its memory, its counters, and what replays pass to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reloadpg
from reloadpg.testing import run_ranks, simulated
from reloadpg.testing.simulated import SimOptions

MIB = 1 << 20
CPU = torch.device("cpu")
LIMIT = 280.0  # seconds


def start(*, installed: bool, bytes_per_communicator: int = MIB) -> None:
    """A job on the simulated accelerator, its groups bare or behind proxies."""
    simulated.register()
    simulated.configure(bytes_per_communicator=bytes_per_communicator)
    if installed:
        reloadpg.install(timeout=timedelta(seconds=20))
    dist.init_process_group("sim")


# ---------------------------------------------------------------------------------------------
# values


def ramp(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 100 * rank


def total(size: int, count: int) -> list[float]:
    return sum(ramp(r, count) for r in range(size)).tolist()  # type: ignore[union-attr]


def _all_reduce(g: Any, rank: int, size: int) -> Any:
    tensor = ramp(rank, 4)
    dist.all_reduce(tensor, group=g)
    return tensor.tolist(), total(size, 4)


def _all_reduce_async_max(g: Any, rank: int, size: int) -> Any:
    tensor = ramp(rank, 4)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=g, async_op=True)
    work.wait()
    return tensor.tolist(), ramp(size - 1, 4).tolist()


def _broadcast(g: Any, rank: int, size: int) -> Any:
    tensor = ramp(rank, 3)
    dist.broadcast(tensor, src=1, group=g)
    return tensor.tolist(), ramp(1, 3).tolist()


def _reduce(g: Any, rank: int, size: int) -> Any:
    tensor = ramp(rank, 3)
    dist.reduce(tensor, dst=1, group=g)
    return (tensor.tolist(), total(size, 3)) if rank == 1 else (0, 0)


def _all_gather(g: Any, rank: int, size: int) -> Any:
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(parts, ramp(rank, 3), group=g)
    return [p.tolist() for p in parts], [ramp(r, 3).tolist() for r in range(size)]


def _all_gather_into_tensor(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(size * 3)
    dist.all_gather_into_tensor(out, ramp(rank, 3), group=g)
    return out.tolist(), torch.cat([ramp(r, 3) for r in range(size)]).tolist()


def _gather(g: Any, rank: int, size: int) -> Any:
    parts = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(ramp(rank, 2), parts, dst=0, group=g)
    if parts is None:
        return 0, 0
    return [p.tolist() for p in parts], [ramp(r, 2).tolist() for r in range(size)]


def _scatter(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(2)
    dist.scatter(out, [ramp(r, 2) for r in range(size)] if rank == 0 else None, src=0, group=g)
    return out.tolist(), ramp(rank, 2).tolist()


def _reduce_scatter(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(2)
    dist.reduce_scatter(out, list(ramp(rank, 2 * size).chunk(size)), group=g)
    return out.tolist(), total(size, 2 * size)[2 * rank : 2 * rank + 2]


def _reduce_scatter_tensor(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, ramp(rank, 2 * size), group=g)
    return out.tolist(), total(size, 2 * size)[2 * rank : 2 * rank + 2]


def _all_to_all(g: Any, rank: int, size: int) -> Any:
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_to_all(parts, list(ramp(rank, size).chunk(size)), group=g)
    return torch.cat(parts).tolist(), [rank + 100.0 * r for r in range(size)]


def _all_to_all_single(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(size)
    dist.all_to_all_single(out, ramp(rank, size), group=g)
    return out.tolist(), [rank + 100.0 * r for r in range(size)]


def _barriers(g: Any, rank: int, size: int) -> Any:
    dist.barrier(group=g)
    # dist.monitored_barrier takes gloo groups only, so not this one, as not NCCL's.
    g.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    return 0, 0


def _coalesced(g: Any, rank: int, size: int) -> Any:
    tensors = [ramp(rank, 2), ramp(rank, 3)]
    with dist._coalescing_manager(group=g):
        for tensor in tensors:
            dist.all_reduce(tensor, group=g)
    return [t.tolist() for t in tensors], [total(size, 2), total(size, 3)]


def _ring(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, ramp(rank, 2), (rank + 1) % size, group=g),
        dist.P2POp(dist.irecv, out, (rank - 1) % size, group=g),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out.tolist(), ramp((rank - 1) % size, 2).tolist()


def _pair(g: Any, rank: int, size: int) -> Any:
    """Two members talk; the others do not touch the group."""
    out = torch.zeros(2)
    if rank == 0:
        dist.send(ramp(0, 2), dst=1, group=g)
    elif rank == 1:
        dist.recv(out, src=0, group=g)
        return out.tolist(), ramp(0, 2).tolist()
    return 0, 0


def _send_recv_any(g: Any, rank: int, size: int) -> Any:
    out = torch.zeros(2)
    if rank == 0:
        sources = sorted(dist.recv(out, group=g) for _ in range(size - 1))
        return sources, list(range(1, size))
    dist.send(ramp(rank, 2), dst=0, group=g)
    return 0, 0


def _objects(g: Any, rank: int, size: int) -> Any:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank}, group=g)
    said = [f"from {rank}"]
    dist.broadcast_object_list(said, src=1, group=g)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0, group=g)
    return (everyone, said, mine), ([{"rank": r} for r in range(size)], ["from 1"], [rank])


def _functional(g: Any, rank: int, size: int) -> Any:
    mine, chunk = ramp(rank, 2 * size), slice(2 * rank, 2 * rank + 2)
    gathered = torch.cat([ramp(r, 2) for r in range(size)]).tolist()
    results = [
        funcol.all_reduce(mine, "sum", g),
        funcol.all_gather_tensor(ramp(rank, 2), 0, g),
        funcol.reduce_scatter_tensor(mine, "sum", 0, g),
        funcol.all_to_all_single(ramp(rank, size), None, None, g),
        funcol.broadcast(ramp(rank, 2), 1, g),
        *funcol.all_reduce_coalesced([ramp(rank, 1), ramp(rank, 2)], "sum", g),
        *funcol.all_gather_into_tensor_coalesced([ramp(rank, 2)], g),
        *funcol.reduce_scatter_tensor_coalesced([mine], "sum", [0], g),
    ]
    expected = [
        total(size, 2 * size),
        gathered,
        total(size, 2 * size)[chunk],
        [rank + 100.0 * r for r in range(size)],
        ramp(1, 2).tolist(),
        total(size, 1),
        total(size, 2),
        gathered,
        total(size, 2 * size)[chunk],
    ]
    return [t.tolist() for t in results], expected


OPERATIONS: dict[str, Callable[[Any, int, int], Any]] = {
    f.__name__.strip("_"): f
    for f in (
        _all_reduce,
        _all_reduce_async_max,
        _broadcast,
        _reduce,
        _all_gather,
        _all_gather_into_tensor,
        _gather,
        _scatter,
        _reduce_scatter,
        _reduce_scatter_tensor,
        _all_to_all,
        _all_to_all_single,
        _barriers,
        _coalesced,
        _ring,
        _pair,
        _send_recv_any,
        _objects,
        _functional,
    )
}


def value_ranks(rank: int, size: int, installed: bool) -> dict[str, Any]:
    start(installed=installed)
    reference = dist.new_group(backend="gloo")
    outcomes: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        group = dist.new_group()  # its own group, so that each operation is also a first one
        try:
            outcomes[name] = operation(group, rank, size)
        except (RuntimeError, ValueError) as error:
            try:
                operation(reference, rank, size)
            except type(error):
                outcomes[name] = "gloo", "gloo"  # this torch's gloo cannot do it either
            else:
                outcomes[name] = repr(error), "as gloo does it"
        dist.destroy_process_group(group)
    outcomes["type"] = type(dist.group.WORLD).__name__
    dist.destroy_process_group()
    outcomes["stats"] = simulated.stats()
    return outcomes


@pytest.fixture(scope="module", params=["bare", "installed"])
def values(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    args = (request.param == "installed",)
    return request.param, run_ranks(value_ranks, 3, args=args, timeout=LIMIT)


@pytest.mark.matrix
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_gives_the_right_values_as_the_first_use_of_a_group(
    values: tuple[str, list[dict[str, Any]]], operation: str
) -> None:
    """Each operation, by value, on 3 ranks: on a bare group and behind a proxy."""
    for outcomes in values[1]:
        got, expected = outcomes[operation]
        assert got == expected


@pytest.mark.matrix
def test_default_policy_takes_the_backend_for_an_accelerator(
    values: tuple[str, list[dict[str, Any]]],
) -> None:
    """``install()`` without options makes its groups reloadable; bare, torch has them as made."""
    expected = {"bare": "SimulatedProcessGroup", "installed": "ReloadableProcessGroup"}
    assert {o["type"] for o in values[1]} == {expected[values[0]]}


@pytest.mark.matrix
def test_destroyed_groups_are_all_released(values: tuple[str, list[dict[str, Any]]]) -> None:
    """Every group that ``destroy_process_group`` ended is counted once, and holds nothing."""
    for outcomes in values[1]:
        stats = outcomes["stats"]
        assert stats.created == stats.released == len(OPERATIONS) + 1
        assert (stats.live, stats.leaked, stats.held_bytes) == (0, 0, 0)


# ---------------------------------------------------------------------------------------------
# memory, measured from outside


HELD = 96 * MIB


def memory_rank(rank: int, size: int, address: Any) -> None:
    start(installed=True, bytes_per_communicator=HELD)
    group = dist.new_group([0, 1])

    with Client(address) as parent:

        def phase(name: str) -> None:
            parent.send((name, os.getpid(), simulated.stats().held_bytes))
            parent.recv()

        # What any first collective costs (threads, pages of code) is no communicator's memory.
        dist.all_reduce(torch.ones(8), group=dist.new_group(backend="gloo"))
        phase("created")
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(8), group=group)
        phase("used")
        dist.all_reduce(torch.ones(8), group=group)
        phase("used again")
        reloadpg.offload()
        phase("offloaded")
        reloadpg.reload()
        phase("reloaded")
        dist.all_reduce(torch.ones(8), group=group)
        phase("used after reload")
        dist.destroy_process_group(group)
        phase("destroyed")
        parent.send(None)


@pytest.fixture(scope="module")
def resident() -> list[dict[str, tuple[int, int]]]:
    """By rank and phase: resident bytes as the parent sees them, and held bytes as counted."""

    def follow(listener: Listener) -> dict[str, tuple[int, int]]:
        seen = {}
        with listener.accept() as rank:
            while (message := rank.recv()) is not None:
                name, pid, held = message
                seen[name] = psutil.Process(pid).memory_info().rss, held
                rank.send("go on")
        return seen

    with Listener(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        # Two connections to accept; a failed run must not leave the threads waiting.
        following = [pool.submit(follow, listener) for _ in range(2)]
        try:
            run_ranks(memory_rank, 2, args=(listener.address,), timeout=60)
        except BaseException:
            for _ in following:
                Client(listener.address).close()
            raise
        return [f.result() for f in following]


def grown(seen: dict[str, tuple[int, int]], before: str, after: str) -> float:
    return (seen[after][0] - seen[before][0]) / HELD


@pytest.mark.matrix
def test_memory_is_taken_at_the_first_use(resident: list[dict[str, tuple[int, int]]]) -> None:
    """Creation takes none; the first use of each of two groups takes its bytes; a second none."""
    for seen in resident:
        assert seen["created"][1] == 0
        assert seen["used"][1] == 2 * HELD
        assert 1.9 < grown(seen, "created", "used") < 2.2
        assert abs(grown(seen, "used", "used again")) < 0.05


@pytest.mark.matrix
def test_offload_frees_the_memory_seen_from_outside(
    resident: list[dict[str, tuple[int, int]]],
) -> None:
    """Resident memory falls by at least 95% of what the communicators held (failure 20)."""
    for seen in resident:
        assert seen["offloaded"][1] == 0
        assert grown(seen, "used again", "offloaded") <= -0.95 * 2


def test_reload_takes_memory_only_where_a_group_is_used(
    resident: list[dict[str, tuple[int, int]]],
) -> None:
    """After a reload the memory comes back with the first use, group by group."""
    for seen in resident:
        assert seen["reloaded"][1] == 0
        assert abs(grown(seen, "offloaded", "reloaded")) < 0.1
        assert seen["used after reload"][1] == HELD
        assert 0.95 < grown(seen, "reloaded", "used after reload") < 1.1


def test_destroying_a_group_frees_its_memory(resident: list[dict[str, tuple[int, int]]]) -> None:
    """``destroy_process_group`` of one group gives its memory back at once."""
    for seen in resident:
        assert seen["destroyed"][1] == 0
        assert grown(seen, "used after reload", "destroyed") <= -0.95


# ---------------------------------------------------------------------------------------------
# training


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def steps(net: nn.Module, rank: int, between: Callable[[], object]) -> list[list[float]]:
    """Three optimizer steps; the local parameters after each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        net(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        local = [getattr(p, "_local_tensor", p).detach().flatten() for p in net.parameters()]
        seen.append(torch.cat(local).tolist())
        between()
    return seen


def train(kind: str, group: Any, rank: int, between: Callable[[], object]) -> list[list[float]]:
    if kind == "ddp":
        return steps(DistributedDataParallel(model(), process_group=group), rank, between)
    net = model()
    fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
    return steps(net, rank, between)


def training_rank(rank: int, size: int, installed: bool) -> dict[str, Any]:
    start(installed=installed)
    # A mesh dimension as large as the world is WORLD itself; the reference is beside it.
    reference = dist.new_group(backend="gloo")

    def cycle() -> None:
        if installed:
            reloadpg.offload()
            reloadpg.reload()

    results = {
        kind: (
            train(kind, reference, rank, lambda: None),
            train(kind, init_device_mesh("cpu", (size,)).get_group(), rank, cycle),
        )
        for kind in ("ddp", "fsdp2")
    }
    stats = simulated.stats()
    dist.destroy_process_group()
    return {**results, "stats": stats}


@pytest.fixture(scope="module", params=["bare", "installed"])
def trained(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    args = (request.param == "installed",)
    return request.param, run_ranks(training_rank, 2, args=args, timeout=LIMIT)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_equals_gloo_bit_for_bit(
    trained: tuple[str, list[dict[str, Any]]], kind: str
) -> None:
    """Three steps on a device mesh of the simulated accelerator give gloo's parameters.

    Installed, the groups are offloaded and reloaded after each step.
    """
    for results in trained[1]:
        reference, simulated_run = results[kind]
        assert len(reference) == 3
        assert reference[0] != reference[2]
        assert simulated_run == reference


@pytest.mark.matrix
def test_training_used_the_simulated_accelerator(
    trained: tuple[str, list[dict[str, Any]]],
) -> None:
    """The compared run went through it: its operations are counted, in every generation."""
    for results in trained[1]:
        generations = {"bare": 1, "installed": 7}[trained[0]]
        assert results["stats"].created == generations
        assert results["stats"].collectives >= 6
        assert results["stats"].leaked == 0


# ---------------------------------------------------------------------------------------------
# counters and replays over reload cycles


def cycle_rank(rank: int, size: int) -> dict[str, Any]:
    start(installed=True)
    options = SimOptions(is_high_priority_stream=True, hints=("a",))
    groups = [
        dist.group.WORLD,
        dist.new_group([0, 1], timedelta(seconds=77), pg_options=options, group_desc="pair"),
        dist.new_group(ranks=[1, 0]),
    ]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=55), groups[2])
    history = []
    for _ in range(4):
        for group in groups:
            dist.all_reduce(torch.ones(2), group=group)
        stats = simulated.stats()
        live = sorted(simulated.groups(), key=lambda group: group.desc)  # created in any order
        timeouts = [g._get_backend(CPU).options._timeout for g in groups]
        memory = [g._get_backend(CPU).memory_stats() for g in groups]
        history.append(
            {
                "stats": stats,
                "received": [(g.timeout, g.pg_options is options, g.ranks, g.size) for g in live],
                "names": [g.name for g in live],
                "desc": [g.desc for g in live],
                "held": [g.held_bytes for g in live],
                "operations": [g.collectives for g in live],
                "timeouts": [t.total_seconds() for t in timeouts],
                "memory": memory,
            }
        )
        reloadpg.offload()
        reloadpg.reload()
    dist.destroy_process_group()
    return {"history": history, "end": simulated.stats(), "all": len(simulated.groups(ended=True))}


@pytest.fixture(scope="module")
def cycles() -> list[dict[str, Any]]:
    return run_ranks(cycle_rank, 2, timeout=LIMIT)


@pytest.mark.matrix
def test_each_cycle_releases_and_creates_each_group_once(cycles: list[dict[str, Any]]) -> None:
    """Three groups: after k cycles 3k were released and 3(k+1) created, none leaked."""
    for result in cycles:
        for cycle, seen in enumerate(result["history"]):
            stats = seen["stats"]
            assert (stats.created, stats.connected) == (3 * (cycle + 1), 3 * (cycle + 1))
            assert (stats.released, stats.live, stats.leaked) == (3 * cycle, 3, 0)
            assert stats.held_bytes == stats.peak_bytes == 3 * MIB
            assert stats.collectives == 3 * (cycle + 1)
            assert seen["held"] == [MIB] * 3
            assert seen["operations"] == [1] * 3
            account = {"suspend": MIB - MIB // 8, "suspended": 0, "persist": MIB // 8, "total": MIB}
            assert seen["memory"] == [account] * 3
        end = result["end"]
        assert (end.created, end.released, end.live, end.leaked) == (15, 15, 0, 0)
        assert result["all"] == 15


@pytest.mark.matrix
def test_replays_receive_what_the_first_creation_received(cycles: list[dict[str, Any]]) -> None:
    """Timeout, the very options object, ranks and size reach the creating function (failure 9)."""
    for result in cycles:
        first = result["history"][0]["received"]
        assert first[1] == (timedelta(seconds=77), True, (0, 1), 2)
        assert first[2][1:] == (False, (0, 1), 2)
        for seen in result["history"]:
            assert seen["received"] == first
            assert seen["desc"] == ["default_pg", "pair", "undefined"]
            assert seen["timeouts"][1:] == [77.0, 55.0]
        names = [name for seen in result["history"] for name in seen["names"]]
        assert len(set(names)) == len(names)
