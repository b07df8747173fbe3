"""One rank of a job in a debug mode of torch or Python: ``debug_job.py BACKEND [trace | errors]``.

The values of collectives are those of plain torch, in two cycles and after a recovery. It checks
without ``assert``, which ``python -O`` removes.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import reloadpg
from helpers import op_table, worlds
from reloadpg.recovery import recover, recovery_requested

LIMIT = timedelta(seconds=60)


def check(holds: object, *shown: object) -> None:
    if not holds:
        raise SystemExit(f"not as expected: {shown}")


def trace(frame: FrameType, event: str, argument: object) -> Any:
    """A trace function, as of a debugger or of coverage."""
    return trace


def start(backend: str, name: str) -> Any:
    """Create the default group and a subgroup."""
    rank, address, port = os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    client = dist.TCPStore(address, int(port), is_master=False, timeout=LIMIT)
    store = dist.PrefixStore(name, client)
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=2, timeout=LIMIT)
    return dist.new_group([0, 1], timeout=LIMIT, group_desc="sub")


Table = dict[op_table.Key, tuple[Any, str]]


def table(group: Any) -> Table:
    """The op table on the default group and on the subgroup: values, and types of errors.

    Without what NCCL refuses: with DETAIL, torch's checks then wait for the rank that raised.
    """
    groups = {"world": (None, range(2)), "sub": (group, (0, 1))}
    left_out = op_table.UNSUPPORTED_BY_NCCL if worlds.NCCL else set()
    if worlds.NCCL and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        left_out = left_out | op_table.HANGS_IN_DETAIL
    found = {
        key: op_table.run_row(row, case)
        for row, key, case in op_table.cases(groups, dist.get_rank(), salt=1)
        if row.name not in left_out
    }
    return {key: (one.value, one.error) for key, one in found.items()}


def compare(group: Any, plain: Table) -> None:
    """The results on reloadable groups are those on plain ones, also in the errors."""
    found = table(group)
    check(found.keys() == plain.keys(), found.keys(), plain.keys())
    refused = (None, "RuntimeError")
    for key, value in plain.items():
        expected = refused if op_table.asks_for_backend(key[0]) else value
        check(found[key] == expected, key, found[key], expected)


def main() -> None:
    backend = sys.argv[1]
    rank = int(os.environ["RANK"])
    if "trace" in sys.argv:
        threading.settrace(trace)
        sys.settrace(trace)
    if "errors" in sys.argv:  # not by -W: torch and its dependencies warn when they are imported
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of names that it will remove
        # Torch's, of each barrier() over NCCL in a default group that is bound to no device.
        for text in ("No device id is provided via", r"barrier\(\): using the device under"):
            warnings.filterwarnings("ignore", text, UserWarning)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    group = start(backend, "plain")
    plain = table(group)
    values = [value for value, error in plain.values() if not error]
    check(len(values) > 200, len(values), plain)
    shown = f"{len(values)} of {len(plain)} calls with a value"
    dist.barrier()
    dist.destroy_process_group()
    reloadpg.install(
        backends={"gloo"} if backend == "gloo" else None,
        timeout=LIMIT,
        recoverable=os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1",
    )
    group = start(backend, "reloadable")
    check(type(group) is reloadpg.ReloadableProcessGroup, group)
    compare(group, plain)
    for _ in range(2):
        report = reloadpg.offload()
        check(len(report.groups) == 2, report)
        reloadpg.reload()
        compare(group, plain)
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1":
        if rank == 0:  # in a collective that rank 1 does not join
            try:
                value = torch.ones(1)
                dist.all_reduce(value, group=group)
                value.item()
            except RuntimeError:
                pass
            check(recovery_requested(), "rank 1 has requested a recovery")
        recover("a test")
        compare(group, plain)
    dist.destroy_process_group()
    print(f"complete: {shown}")


if __name__ == "__main__":
    main()
