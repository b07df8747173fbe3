"""One rank of a job in one of torch's or Python's debug modes: ``debug_job.py BACKEND [trace]``.

The values of collectives are those of plain torch, in two cycles and after a recovery. It checks
without ``assert``, which ``python -O`` removes.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from types import FrameType
from typing import Any

import op_table
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.recovery import recover, recovery_requested

LIMIT = timedelta(seconds=60)
ROWS = ("all_reduce[SUM]", "all_gather", "broadcast", "reduce_scatter_tensor", "barrier", "gather")
ROWS += ("all_gather_into_tensor", "all_to_all_single", "send, recv", "all_gather_object")
ROWS += ("batch_isend_irecv", "fc.all_reduce", "ops.all_reduce")


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


def table(group: Any) -> dict[str, str]:
    """The results of some rows of the op table."""
    groups = {"world": (None, range(2)), "sub": (group, (0, 1))}
    rank = dist.get_rank()
    chosen = [one for one in op_table.cases(groups, rank, salt=1) if one[0].name in ROWS]
    check(len({one[0].name for one in chosen}) > 6, chosen)
    found = {str(key): op_table.run_row(row, case) for row, key, case in chosen}
    return {key: f"{one.value} {one.error}" for key, one in found.items()}


def main() -> None:
    backend = sys.argv[1]
    rank = int(os.environ["RANK"])
    if "trace" in sys.argv:
        threading.settrace(trace)
        sys.settrace(trace)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    group = start(backend, "plain")
    plain = table(group)
    dist.barrier()
    dist.destroy_process_group()
    reloadpg.install(
        backends={"gloo"} if backend == "gloo" else None,
        timeout=LIMIT,
        recoverable=os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1",
    )
    group = start(backend, "reloadable")
    check(type(group) is reloadpg.ReloadableProcessGroup, group)
    check(table(group) == plain, table(group), plain)
    for _ in range(2):
        report = reloadpg.offload()
        check(len(report.groups) == 2, report)
        reloadpg.reload()
        check(table(group) == plain, table(group), plain)
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
        check(table(group) == plain, table(group), plain)
    dist.destroy_process_group()
    print("complete")


if __name__ == "__main__":
    main()
