"""``split_group``: what a reload replays of it, and what the record of it keeps alive."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist
from _splitting import prepare
from _tables import meet_at_rank_0, store_closed_by_rank_0, summed
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix

TIMEOUT = timedelta(seconds=20)


def _begin():
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.init_process_group("gloo", timeout=TIMEOUT)


def _cycle():
    reloadpg.offload()
    reloadpg.reload()


def _two_lives(rank, world_size, how, folder):
    prepare()
    seen = []
    for life in range(2):
        _begin()
        parent = {"keyword": {"parent_pg": dist.group.WORLD}, "none": {}}.get(how, {})
        parts = [[0, 1]] if how != "not mine" else [[0]]
        child = dist.split_group(split_ranks=parts, timeout=TIMEOUT, **parent)
        _cycle()
        sums = [summed(None, rank)]
        if how != "not mine":
            sums.append(summed(child, rank))
        meet_at_rank_0(rank, f"life {life}")
        world = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        del child, parent
        gc.collect()
        seen.append((set(sums), world() is None))
        store_closed_by_rank_0(rank, folder / f"closed {life}")
    return seen


@pytest.mark.parametrize("how", ["keyword", "none", "not mine"])
def test_a_split_does_not_keep_the_default_group_alive(how, tmp_path):
    """Rank 0's store ends with the job, though the record of the split names its parent; so it is
    on a rank outside all parts, too (failure 5).
    """
    for facts in run_ranks(_two_lives, 2, args=(how, tmp_path), store="rank0"):
        assert facts == [({3}, True)] * 2


def _parent_destroyed(rank, world_size):
    prepare()
    _begin()
    parent = dist.new_group([0, 1, 2])
    child = dist.split_group(parent, [[1, 0]], TIMEOUT, None, "the child")
    reloadpg.offload()
    dist.destroy_process_group(parent)
    reloadpg.reload()
    seen = []
    for _ in range(2):
        if rank != 2:
            ranks = dist.get_process_group_ranks(child)
            seen.append((summed(child, rank), ranks, child.group_desc, child.generation))
        _cycle()
    return seen


def test_a_split_outlives_its_parent():
    """Its members make it alone then: torch would split from a group that is gone."""
    results = run_ranks(_parent_destroyed, 3)
    facts = [(3, [0, 1], "the child", generation) for generation in (1, 2)]
    assert results[2] == []
    for seen in results[:2]:
        assert [(s, sorted(ranks), *rest) for s, ranks, *rest in seen] == facts


def _small_part(rank, world_size):
    calls = prepare()
    _begin()
    child = dist.split_group(split_ranks=[[0, 1], [2]], timeout=TIMEOUT)
    calls.clear()
    replayed = []
    for _ in range(2):
        _cycle()
        replayed.append(len(calls))
        calls.clear()
    return type(child).__name__, replayed, summed(child, rank)


def test_all_parts_of_a_split_are_replayed():
    """The ranks of a part that the policy leaves alone too: splitting is collective over the
    parent, and NCCL would wait for them.
    """
    results = run_ranks(_small_part, 3)
    pair = ("ReloadableProcessGroup", [1, 1], 3)
    assert results == [pair, pair, ("ProcessGroup", [1, 1], 4)]


def _keys(rank, world_size):
    prepare()
    _begin()
    child = dist.split_group(split_ranks=[[0, 1]], timeout=TIMEOUT)
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    counted = []
    for _ in range(4):
        _cycle()
        summed(child, rank)
        dist.barrier()  # a rank that is ahead has keys of its own in the store
        counted.append(store.num_keys())
        dist.barrier()
    return counted


def test_splits_leave_no_keys_behind():
    """Torch 2.15 writes the addresses of a split gloo group under another name than a new one's."""
    for counted in run_ranks(_keys, 2):
        assert len(set(counted)) == 1
