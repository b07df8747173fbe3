"""A default group that is bound to a device, as most new trainers make it, and its splits."""

from __future__ import annotations

import gc
import os
import weakref
from datetime import timedelta
from functools import partial

import faulty_gloo
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion
from watched_store import WatchedStore
from worlds import CAN_SPLIT, DEVICE, TIMEOUT, accelerator_claimed, split, start, subgroup, summed

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix

needs_split = pytest.mark.skipif(not CAN_SPLIT, reason="this torch cannot split gloo groups")

WORLDS = ["bound", "bound late"]


def _cycles(rank, world_size, world):
    start(world)
    pair = dist.new_group(list(range(world_size)), timeout=TIMEOUT)
    part = subgroup([0, 1])
    groups = [None, pair, part] if rank < 2 else [None, pair]  # None is WORLD
    seen = []
    for _ in range(3):
        reloadpg.offload()
        refused = 0
        try:
            dist.all_reduce(torch.ones(1))
        except reloadpg.GroupOffloadedError:
            refused = 1
        bound = dist.group.WORLD.bound_device_id
        reloadpg.reload()
        sums = [summed(group, rank) for group in groups]
        devices = [g.bound_device_id for g in (dist.group.WORLD, pair)]
        seen.append((refused, bound, sums, devices, reloadpg.status().generation))
    return seen


@pytest.mark.parametrize("world", WORLDS)
def test_a_bound_world_keeps_its_device_through_cycles(world):
    """Of the proxy, of the groups made under it, while offloaded and afterwards."""
    for rank, seen in enumerate(run_ranks(_cycles, 3, args=(world,))):
        sums = [6.0, 6.0, 3.0] if rank < 2 else [6.0, 6.0]
        for number, (refused, bound, got, devices, generation) in enumerate(seen, 1):
            assert (refused, bound, generation) == (1, DEVICE, number)
            assert got == sums
            assert devices == [DEVICE, DEVICE]


def _split(rank, world_size, file, world, when):
    start(world, file=file)
    groups = {}
    if when == "before":
        groups["whole"] = split([[0, 1]])
    seen = []
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
        seen.append([summed(None, rank)])
        if when == "before":
            seen[-1].append(summed(groups["whole"], rank))
    if when == "after":
        groups["whole"] = split([[0, 1]])
        reloadpg.offload()
        reloadpg.reload()
        seen = [[summed(None, rank), summed(groups["whole"], rank)]] * 2
    whole = groups["whole"]
    return seen, type(whole).__name__, whole.generation, dist.get_process_group_ranks(whole)


@needs_split
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_world_that_was_split_survives(world, when, tmp_path):
    """Torch makes up the ranks of the first default group only; the next one's split indexed an
    empty list and killed the interpreter, at the reload or at the first split after it.
    """
    for seen, kind, generation, ranks in run_ranks(
        _split, 2, args=(str(tmp_path / "store"), world, when)
    ):
        assert seen == [[3.0, 3.0]] * 2
        assert kind == "ReloadableProcessGroup"
        assert generation == (2 if when == "before" else 3)
        assert list(ranks) == [0, 1]


def _parts(rank, world_size, file):
    start("bound", file=file)
    parent = split([[2, 1, 0]])
    options = {"timeout": timedelta(seconds=33), "group_desc": "the child"}
    child = split([[0, 1], [2]], parent, **options)
    members = dist.get_process_group_ranks(child)
    facts = []
    for cycle in range(3):
        reloadpg.offload()
        if cycle == 1:
            dist.destroy_process_group(parent)
        reloadpg.reload()
        timeouts = [g.timeout_s for g in reloadpg.status().groups if g.desc == "the child"]
        facts.append(
            (
                summed(child, rank) == sum(r + 1 for r in members),
                dist.get_process_group_ranks(child) == members,
                timeouts,
                child.group_desc,
            )
        )
    return type(child).__name__, facts


@needs_split
def test_a_split_is_rebuilt_on_its_own(tmp_path):
    """With its ranks in their order, timeout and description; it outlives its parent, and the
    parts below min_size are left alone.
    """
    results = run_ranks(_parts, 3, args=(str(tmp_path / "store"),))
    kinds = sorted(kind for kind, _ in results)
    assert kinds == ["ProcessGroup", "ReloadableProcessGroup", "ReloadableProcessGroup"]
    for kind, facts in results:
        timeouts = [33.0] if kind == "ReloadableProcessGroup" else []
        assert facts == [(True, True, timeouts, "the child")] * 3


def _mesh(rank, world_size):
    start("bound")
    with accelerator_claimed():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh.get_group("dp"), mesh.get_group("tp")]
    seen = []
    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
        seen.append([summed(group, rank) for group in groups])
    return [type(group).__name__ for group in groups], seen


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.15", reason="this torch cannot split a mesh of gloo groups"
)
def test_a_mesh_over_a_bound_world():
    """init_device_mesh splits a bound world; its groups go and come back."""
    for rank, (kinds, seen) in enumerate(run_ranks(_mesh, 4)):
        assert kinds == ["ReloadableProcessGroup"] * 2
        column, row = [rank % 2, rank % 2 + 2], [rank - rank % 2, rank - rank % 2 + 1]
        assert seen == [[sum(column) + 2.0, sum(row) + 2.0]] * 2


def _no_parent_kept(rank, world_size, file, parent):
    start("bound", file=file)
    given = {"parent": dist.group.WORLD} if parent else {}
    child = split([[0, 1]], **given)
    reloadpg.offload()
    reloadpg.reload()
    world = weakref.ref(dist.group.WORLD)
    summed(child, rank)
    dist.destroy_process_group()
    del given
    gc.collect()
    return child.size() == 2 and world() is None  # though the split is still held


@needs_split
@pytest.mark.parametrize("parent", [True, False])
def test_a_split_does_not_keep_the_default_group_alive(parent, tmp_path):
    """Nor, with it, rank 0's store server (failure 5)."""
    assert run_ranks(_no_parent_kept, 2, args=(str(tmp_path / "store"), parent)) == [True, True]


WAITING = ("/outcome", "/progress", "/proposals", "/sum", "recovery")
"""Keys of questions that a rank asks, or not, by how long it waits and whether it comes last."""


def _asked(rank, world_size, world, count):
    """How many questions a cycle asks the store, whatever groups the job has."""
    asked = set()  # a question that is asked again counts once, and one of waiting not at all
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = WatchedStore(
        dist.TCPStore(*server, is_master=False),
        lambda method, key: key.endswith(WAITING) or asked.add((method, key)),
    )
    start(world, store=store)
    mine = [subgroup([0, 1]) for _ in range(2)]
    for _ in range(count):
        subgroup([2, 3])
    asked.clear()
    reloadpg.offload()
    reloadpg.reload()
    return len(asked), len(mine)


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_rank_asks_the_store_nothing_about_groups_of_others(world):
    """A bound job asked once for each group of the job: a second for a thousand groups."""
    few = run_ranks(_asked, 4, args=(world, 1))
    many = run_ranks(_asked, 4, args=(world, 40))
    for rank in (0, 1):
        assert 5 < many[rank][0] <= few[rank][0] + 8


def _fail_beside_rank_0(store):
    store.wait(["rank 0 creates"], timedelta(minutes=1))
    raise RuntimeError("once")


def _retry(rank, world_size, world):
    faulty_gloo.register()
    start(world, backend="faulty", timeout=timedelta(seconds=60))
    bound = dist.group.WORLD.bound_device_id
    pair = dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()
    reloadpg.offload()
    if rank == 1:
        faulty_gloo.inject("create", partial(_fail_beside_rank_0, store))
    else:
        faulty_gloo.inject("create", lambda: store.set("rank 0 creates", ""))
    try:
        reloadpg.reload()
        first = ""
    except reloadpg.ReloadpgError as error:
        first = type(error).__name__
    unfinished = len(reloadpg.status().unfinished)  # rank 0 is still in the creation of WORLD
    try:
        reloadpg.reload()
        second = ""
    except reloadpg.ReloadpgError as error:
        second = f"{type(error).__name__}: {error}"
    kept = dist.group.WORLD.bound_device_id == bound
    sums = [summed(None, rank), summed(pair, rank)] if not second else []
    reloadpg.offload()
    reloadpg.reload()
    return first, unfinished, second, kept, sums


@pytest.mark.parametrize("world", ["unbound", *WORLDS])
def test_a_job_can_retry_while_a_creation_is_stuck(world):
    """The binding of the default group was saved and cleared in the stuck thread, and part of what
    the ranks compare: every later operation disagreed (failure 27).
    """
    for rank, seen in enumerate(run_ranks(_retry, 2, args=(world,))):
        first, unfinished, second, kept, sums = seen
        assert first == ("RebuildError" if rank == 1 else "PeerFailedError")
        assert unfinished == (1 if rank == 0 else 0)
        assert (second, kept, sums) == ("", True, [3.0, 3.0])
