"""A default group that is bound to a device, as most new trainers create it, and its splits."""

from __future__ import annotations

import gc
import os
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers.jobs import one_cycle
from helpers.watched_store import WatchedStore
from helpers.worlds import (
    CAN_SPLIT,
    split,
    start,
    subgroup,
    summed,
)

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix

needs_split = pytest.mark.skipif(not CAN_SPLIT, reason="this torch cannot split gloo groups")

WORLDS = ["bound", "bound late"]


@needs_split
@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_world_can_be_split_before_and_after_a_reload(rank, world, when, tmp_path):
    """Torch computes the ranks of the first default group only. The split of a later one indexed an
    empty list and ended the interpreter, in the next job, at the reload or at a split after it.
    """
    start(world, file=str(tmp_path / "store of the first job"))
    assert summed(None, rank) == 3.0  # both are connected
    dist.destroy_process_group()
    start(world, file=str(tmp_path / "store"))
    whole = split([[0, 1]]) if when == "before" else None
    for _ in range(2):
        one_cycle()
        assert summed(None, rank) == 3.0
        assert whole is None or summed(whole, rank) == 3.0
    if whole is None:
        whole = split([[0, 1]])
        one_cycle()
    assert (summed(None, rank), summed(whole, rank)) == (3.0, 3.0)
    assert isinstance(whole, reloadpg.ReloadableProcessGroup)
    assert whole.generation == (2 if when == "before" else 3)
    assert list(dist.get_process_group_ranks(whole)) == [0, 1]


@needs_split
@pytest.mark.ranks(3)
def test_a_split_is_rebuilt_without_its_parent(rank, tmp_path):
    """With its ranks in their order, timeout and description, also after the parent was destroyed.
    A part smaller than ``min_size`` is bypassed.
    """
    start("bound", file=str(tmp_path / "store"))
    parent = split([[2, 1, 0]])
    options = {"timeout": timedelta(seconds=33), "group_desc": "the child"}
    child = split([[0, 1], [2]], parent, **options)
    members = dist.get_process_group_ranks(child)
    assert isinstance(child, reloadpg.ReloadableProcessGroup) == (len(members) == 2)
    for cycle in range(3):
        reloadpg.offload()
        if cycle == 1:
            dist.destroy_process_group(parent)
        reloadpg.reload()
        assert summed(child, rank) == sum(one + 1 for one in members)
        assert dist.get_process_group_ranks(child) == members
        assert child.group_desc == "the child"
        timeouts = [g.timeout_s for g in reloadpg.status().groups if g.desc == "the child"]
        assert timeouts == [33.0] * (len(members) == 2)


@needs_split
@pytest.mark.ranks(2)
@pytest.mark.parametrize("parent", [True, False])
def test_a_split_does_not_keep_the_default_group_alive(rank, parent, tmp_path):
    """Nor, with it, rank 0's store server (failure 5)."""
    start("bound", file=str(tmp_path / "store"))
    given = {"parent": dist.group.WORLD} if parent else {}
    child = split([[0, 1]], **given)
    one_cycle()
    world = weakref.ref(dist.group.WORLD)
    summed(child, rank)
    dist.destroy_process_group()
    del given
    gc.collect()
    assert child.size() == 2
    assert world() is None


def _requests(rank, world_size, world, count):
    """The keys of groups that a cycle requests from the store."""
    asked = set()
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = WatchedStore(
        dist.TCPStore(*server, is_master=False),
        # Requests of barriers depend on how long a rank waits, and on whether it is the last.
        lambda method, key: key.startswith("reloadpg/") or asked.add((method, key)),
    )
    start(world, store=store)
    for _ in range(2):
        subgroup([0, 1])
    for _ in range(count):
        subgroup([2, 3])
    asked.clear()
    one_cycle()
    return asked


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_rank_requests_nothing_about_groups_of_other_ranks(world):
    """A bound job requested one key for each group of the job: a second for a thousand groups."""
    few = run_ranks(_requests, 4, args=(world, 1), timeout=240)
    many = run_ranks(_requests, 4, args=(world, 40), timeout=240)
    for rank in (0, 1):
        assert many[rank] == few[rank] != set()
