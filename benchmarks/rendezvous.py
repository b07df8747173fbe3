"""Measure what one store barrier costs, by the number of ranks.

Up to 1,000 simulated ranks: each is a rendezvous with a separate connection to one real
TCPStore, in threads of a few processes. The time is from the first arrival at a barrier to the last
return, divided over the barriers; the store operations are counted on one rank. With ``--host``
each rank is a process, and the ranks know that they share a host, as in a job; nothing is counted.

Usage: python benchmarks/rendezvous.py [--ranks 8 64 256 1000] [--host] [--barriers 10]
       [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _output import machine, write_json

from reloadpg.rendezvous.plan import Entry, Plan
from reloadpg.rendezvous.rendezvous import Rendezvous
from reloadpg.rendezvous.round import Round
from reloadpg.testing import run_ranks
from reloadpg.texts import table

BOUND_S = 120.0


class Counting(dist.Store):
    """A store that counts the operations asked of it, over a connection made for it."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.operations = 0

    def clone(self) -> Counting:
        """Count what is asked of the connection that the library makes."""
        self._store = self._store.clone()
        return self

    def _count(self, name: str, *args: Any) -> Any:
        self.operations += 1
        return getattr(self._store, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._count("set", key, value)

    def add(self, key: str, amount: int) -> int:
        return self._count("add", key, amount)  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._count("compare_set", key, expected, desired)  # type: ignore[no-any-return]

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch looks for
        return self._count("delete_key", key)  # type: ignore[no-any-return]

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._count("wait", keys, *timeout)


def _plan(size: int) -> Plan:
    group = Entry("group '0'", tuple(range(size)), {"set": "trainer"}, {"generation": "0"})
    return Plan("offload", (Entry("install()", (), {"timeout_s": "300.0"}), group))


def measure(
    process: int, processes: int, port: int, size: int, barriers: int, host: bool
) -> dict[str, Any]:
    """One process's share of the ranks: the milliseconds that each of its barriers took."""
    mine = range(process, size, processes)
    plan = _plan(size)
    counters: list[Counting] = []

    def rank_main(rank: int) -> float:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        counting: Any = store
        if rank == mine[-1] and not host:
            counting = Counting(store)
            counters.append(counting)
        rendezvous = Rendezvous(lambda: counting, rank, size, watches=host)
        Round.open(rendezvous, "warm-up", ("enter",), BOUND_S).barrier("enter")
        for counter in counters:
            counter.operations = 0
        own: list[float] = []
        for _ in range(barriers):
            turn = Round.open(rendezvous, "offload", ("enter", "released"), BOUND_S)
            begun = time.perf_counter()
            turn.barrier("enter", plan)
            turn.barrier("released")
            own.append((time.perf_counter() - begun) * 1e3 / 2)
        return statistics.median(own)

    with ThreadPoolExecutor(len(mine)) as threads:
        times = list(threads.map(rank_main, mine))
    return {
        "ms": times,
        "operations": counters[0].operations / (2 * barriers) if counters else None,
    }


def main() -> int:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--barriers", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for size in options.ranks:
        processes = size if options.host else min(4, size)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        args = (store.port, size, options.barriers, options.host)
        results = run_ranks(measure, processes, args=args, timeout=900)
        every = [ms for result in results for ms in result["ms"]]
        rows.append(
            (
                size,
                statistics.median(every),
                max(every),
                None
                if options.host
                else statistics.median(result["operations"] for result in results),
                store.num_keys() / size,
            )
        )
        print(f"{size} ranks done", file=sys.stderr)
    header = (
        "ranks",
        "ms a barrier, median",
        "ms a barrier, worst rank",
        "operations a rank and barrier",
        "keys left a rank",
    )
    print(table(header, rows))
    names = ("ranks", "median_ms", "worst_ms", "operations", "keys_per_rank")
    figures = [dict(zip(names, row, strict=True)) for row in rows]
    write_json(options.json, {"machine": machine(), "barriers": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
