"""Many cycles leave no memory, files, threads, table entries or store keys."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.sampling import sampled
from helpers.tables import lengths, resolves_to, summed
from torch.distributed import distributed_c10d as c10d

import reloadpg

LONG, SHORT = 200, 30
"""Cycles of the whole run, and of the default one."""
WARM = 20
"""Cycles after which allocators and caches have their size; what follows is compared with it."""

RSS_TOLERANCE = 8 << 20
"""Bytes by which the resident memory may grow between cycle 20 and cycle 200.

A leak of 5.1 KiB for each of nine groups and 180 cycles exceeds it. Torch alone needs some: stock
2.13 that destroys and creates eight such groups in each cycle grows by 2.2 MiB between the same
cycles, and by 1.2 MiB in the next 200; with this library it is 3.2 MiB, then 0.8 MiB.
"""


def _keys(store):
    """Number of keys in the job's store, without prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.num_keys()


def _threads(process, most):
    """Number of threads; one that Python has ended may take a moment to exit."""
    end = time.monotonic() + 60
    while process.num_threads() > most and time.monotonic() < end:
        time.sleep(0.01)
    return process.num_threads()


def _measure(names, old_names, most_threads):
    for thread in threading.enumerate():
        if thread.name.startswith("reloadpg"):
            thread.join(60)  # it is about to end
    gc.collect()
    process = psutil.Process()
    return {
        "rss": process.memory_info().rss,
        "files": Counter(_kind(link) for link in _descriptors()),
        "threads": _threads(process, most_threads),
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "tables": lengths(),
        "resolved": sum(resolves_to(name) is not None for name in names),
        "old resolved": [name for name in old_names if resolves_to(name) is not None],
        "objects": Counter(
            type(item).__name__
            for item in gc.get_objects()
            if isinstance(item, (dist.ProcessGroup, dist.Store, dist.Work))
        ),
        "keys": _keys(c10d._get_default_store()),
    }


def _descriptors():
    for path in Path("/proc/self/fd").iterdir():
        try:
            yield path.readlink()
        except FileNotFoundError:  # the directory's own descriptor
            continue


def _kind(link):
    return str(link).partition(":")[0] if ":" in str(link) else "file"


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("cycles", sampled([SHORT, LONG], SHORT))
def test_many_cycles_leave_nothing(rank, cycles):
    """From cycle 20 to the last one.

    Nine groups rise by one generation a cycle, and only their own names resolve. Resident memory
    grows by less than 8 MiB (failures 24, 31). No entry in a table, group, store, work, file or
    thread is left (failure 13). The other rank may not have deleted its last keys in the store yet;
    a key a cycle and group would be ninety.
    """
    reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta(seconds=30))
    worlds.init(timeout=timedelta(seconds=30))
    groups = [dist.group.WORLD]
    groups += [dist.new_group([0, 1], group_desc=f"group {index}") for index in range(6)]
    groups += [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)]
    names = [group.group_name for group in groups]
    measured = {}
    for cycle in range(1, cycles + 1):
        inner_names = [group._managed.communicator.group_name for group in groups]
        reloadpg.offload()
        reloadpg.reload()
        assert [summed(group, rank) for group in groups] == [3] * len(groups)
        if cycle in (WARM, cycles):
            # Both ranks must be here: a rank that is ahead has more keys in the store.
            worlds.barrier()
            most = measured[WARM]["threads"] if measured else math.inf
            measured[cycle] = _measure(names, inner_names, most)
            worlds.barrier()
    assert [group.generation for group in groups] == [cycles] * 9
    assert all(resolves_to(group.group_name) is group for group in groups)
    warm, last = measured[WARM], measured[cycles]
    assert warm["resolved"] == 9
    for what in ("files", "python threads", "tables", "objects", "resolved"):
        assert last[what] == warm[what], what
    assert last["threads"] <= warm["threads"]  # one that was about to end may be counted first
    assert warm["old resolved"] == last["old resolved"] == []
    assert abs(last["rss"] - warm["rss"]) < RSS_TOLERANCE, (warm["rss"], last["rss"])
    assert abs(last["keys"] - warm["keys"]) <= 5
