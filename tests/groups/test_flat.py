"""Many cycles leave nothing behind: memory, files, threads, tables, store keys."""

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
import worlds
from sampling import sampled
from tables import lengths, resolves_to, summed
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg.testing import run_ranks

LONG, SHORT = 200, 60
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
    """Number of threads; one that Python has forgotten may take a moment to be gone."""
    end = time.monotonic() + 60
    while process.num_threads() > most and time.monotonic() < end:
        time.sleep(0.01)
    return process.num_threads()


def _measure(names, old_names, most_threads):
    for thread in threading.enumerate():
        if thread.name.startswith("reloadpg"):
            thread.join(60)  # it has done its work, and is about to end
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


def _many_cycles(rank, world_size, cycles):
    reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta(seconds=30))
    worlds.init(timeout=timedelta(seconds=30))
    groups = [dist.group.WORLD]
    groups += [dist.new_group([0, 1], group_desc=f"group {index}") for index in range(6)]
    groups += [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)]
    names = [group.group_name for group in groups]
    measured, inner_names = {}, []
    for cycle in range(1, cycles + 1):
        inner_names = [group.communicator.group_name for group in groups]
        reloadpg.offload()
        reloadpg.reload()
        assert [summed(group, rank) for group in groups] == [3] * len(groups)
        if cycle in (WARM, cycles):
            # Both ranks must be here: a rank that is ahead has keys of its own in the store.
            worlds.barrier()
            old = inner_names if cycle > 1 else []
            most = measured[WARM]["threads"] if measured else math.inf
            measured[cycle] = _measure(names, old, most)
            worlds.barrier()
    return (
        measured,
        [group.generation for group in groups],
        [resolves_to(group.group_name) is group for group in groups],
    )


@pytest.fixture(scope="module", params=sampled([SHORT, LONG], SHORT))
def flat(request):
    """The number of cycles, and by rank what was there after some of them."""
    return request.param, run_ranks(_many_cycles, 2, args=(request.param,), timeout=240)


def _pairs(flat, what):
    cycles, ranks = flat
    return [(measured[WARM][what], measured[cycles][what]) for measured, *_ in ranks]


def test_cycles_took_place(flat):
    """Nine groups, a generation a cycle, found by their names at the end."""
    cycles, ranks = flat
    for _, generations, found in ranks:
        assert generations == [cycles] * 9
        assert found == [True] * 9


def test_resident_memory_is_flat(flat):
    """Within 8 MiB between cycle 20 and the last (failures 24, 31)."""
    for warm, last in _pairs(flat, "rss"):
        assert abs(last - warm) < RSS_TOLERANCE, f"{warm >> 10} KiB, then {last >> 10} KiB"


@pytest.mark.parametrize("what", ["files", "threads", "python threads"])
def test_open_files_and_threads_are_flat(flat, what):
    """No socket, pipe or thread of an old generation is left."""
    for warm, last in _pairs(flat, what):
        # A thread that was about to end may have been counted at first.
        assert last <= warm if what == "threads" else last == warm


@pytest.mark.parametrize("what", ["tables", "objects", "resolved"])
def test_tables_and_objects_are_flat(flat, what):
    """No entry in c10d's tables or the C++ registry, no group, store or work (failure 13)."""
    for warm, last in _pairs(flat, what):
        assert last == warm


def test_names_of_old_generations_are_gone_from_the_cpp_registry(flat):
    """Each generation has a name of its own; only the proxies' names resolve."""
    cycles, ranks = flat
    for measured, *_ in ranks:
        assert measured[WARM]["resolved"] == 9
        assert measured[WARM]["old resolved"] == measured[cycles]["old resolved"] == []


def test_number_of_store_keys_is_constant(flat):
    """Keys of barriers and of old generations are deleted when no rank reads them any more.

    The other rank may not have deleted its last ones yet; a key a cycle would be dozens.
    """
    for warm, last in _pairs(flat, "keys"):
        assert abs(last - warm) <= 5, f"{warm} keys, then {last}"
