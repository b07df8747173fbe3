"""Count what the groups of a mesh cost: split from the default group, and rebuilt by a reload.

A mesh of 2 x 2 x 2 ranks in a default group that is bound to a device: one ``split_group`` along
each axis. A reload creates each group again by its members. Both are counted for the groups of the
mesh alone: calls of NCCL (over stand-ins for CUDA and NCCL, without a GPU), the ranks that have to
meet in them, requests to the store, and keys in it. The cost of the default group, as a reload had
before the mesh was made, is subtracted; barriers are left out.

Times are not measured, since those of the stand-ins say nothing about NCCL's.

Usage: python -m reloadpg standins run -- python benchmarks/rebuild_split.py [--json PATH]

It needs torch's CUDA build.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _output import machine, write_json

import reloadpg
from reloadpg.testing import run_ranks
from reloadpg.texts import table

SHAPE = (2, 2, 2)
LIMIT = timedelta(seconds=120)
NEW_ENGINE = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
ENGINES: Mapping[str, Mapping[str, str]] = {
    "ProcessGroupNCCL": {"TORCH_DIST_USE_NCCL2": "0"},
    # Torch before 2.15 does not split groups of gloo by itself.
    **({"ProcessGroupNCCL2": {}, "gloo": {}} if NEW_ENGINE else {}),
}
LOG = "RELOADPG_STANDIN_LOG"
CALL = re.compile(r"pid (\d+) rank \d+ comm (\S+?)\(.*?\) \d+/(\d+) (init begins|split color)")


class CountingStore(dist.Store):
    """Another store. Counts all requests but those of barriers; its clones share the counter."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        super().__init__()
        self._store, self._asked = store, asked
        self._clones: list[CountingStore] = []  # a PrefixStore that is cloned does not keep them

    def clone(self) -> CountingStore:
        self._clones.append(CountingStore(self._store.clone(), self._asked))
        return self._clones[-1]

    def _ask(self, method: str, *args: Any) -> Any:
        key = args[0] if isinstance(args[0], str) else args[0][0]
        if not key.startswith("reloadpg/"):  # the number of those depends on how long a rank waits
            self._asked["deletions" if method == "delete_key" else "requests"] += 1
        return getattr(self._store, method)(*args)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch looks for
        return bool(self._ask("delete_key", key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._ask("wait", keys, *timeout)

    def getNumKeys(self) -> int:  # noqa: N802 - likewise
        return int(self._store.num_keys())


def axes(ranks: int) -> list[list[list[int]]]:
    """The groups along each axis of the mesh."""
    grid = torch.arange(ranks).view(SHAPE)
    return [grid.movedim(axis, -1).reshape(-1, SHAPE[axis]).tolist() for axis in range(len(SHAPE))]


def counted(rank: int, ranks: int, backend: str) -> dict[str, Counter[str]]:
    """What the mesh of one rank costs, by way. Runs as a rank."""
    asked: Counter[str] = Counter()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    plain = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    device = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = {"device_id": torch.device("cuda", rank)}
    reloadpg.install(timeout=LIMIT, backends={backend})
    store = CountingStore(plain, asked)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=LIMIT, **device
    )
    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1
        plain.add(f"counted/{meetings}", 1)
        while plain.add(f"counted/{meetings}", 0) < ranks:
            pass

    def of(work: Any) -> Counter[str]:
        before = _calls() + asked
        work()
        found = _calls() + asked
        found.subtract(before)
        meet()
        found["keys"] = plain.num_keys() - meetings  # one more on a rank that comes late
        meet()
        return found

    def reloaded() -> Counter[str]:
        cycles = []
        for _ in range(2):  # the first reload deletes the keys of the first generation
            reloadpg.offload()
            cycles.append(of(reloadpg.reload))
        return cycles[-1]

    alone = reloaded()
    groups: list[Any] = []
    split = of(lambda: groups.extend(dist.split_group(split_ranks=part) for part in axes(ranks)))
    return {"alone": alone, "split": split, "reload": reloaded()}


def _calls() -> Counter[str]:
    """Calls of NCCL in this process that create communicators, and the ranks that they join."""
    found: Counter[str] = Counter()
    text = Path(os.environ[LOG]).read_text(encoding="utf-8", errors="replace")
    for pid, communicator, size, call in CALL.findall(text):
        # A split's own communicator has its parent's number, a dot, and more.
        if int(pid) == os.getpid() and (call == "split color" or "." not in communicator):
            found["inits" if call == "init begins" else "splits"] += 1
            found["ranks that meet"] += int(size)
    return found


COLUMNS = ("inits", "splits", "ranks that meet", "requests", "deletions")


def measured() -> list[dict[str, Any]]:
    """A row for each engine and way, with the largest figure of the ranks."""
    rows = []
    for engine, env in ENGINES.items():
        backend = "gloo" if engine == "gloo" else "nccl"
        with tempfile.NamedTemporaryFile() as log:
            results = run_ranks(
                counted,
                torch.Size(SHAPE).numel(),
                args=(backend,),
                standins=True,
                env={**env, LOG: log.name},
                timeout=300.0,
            )
        keys = {way: min(one[way]["keys"] for one in results) for way in results[0]}
        for way in ("split", "reload"):
            for one in results:
                if way == "reload":  # less what the default group costs
                    one[way].subtract(one["alone"])
                one[way]["of store"] = one[way]["requests"] + one[way]["deletions"]
            row = {name: max(one[way][name] for one in results) for name in COLUMNS}
            total = sum(one[way]["of store"] for one in results)
            of_job = {"of the job": total, "keys": keys[way] - keys["alone"]}
            rows.append({"engine": engine, "way": way, **row, **of_job})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    options = parser.parse_args(arguments)
    rows = measured()
    header = list(rows[0])
    print(table(header, [[row[name] for name in header] for row in rows]))
    result = {"benchmark": "rebuild_split", "machine": machine(), "rows": rows}
    write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
