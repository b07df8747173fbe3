"""One rank of a job that publishes its status; it calls what the file ``call-<n>`` of it says.

Usage: ``python hanging_rank.py DIRECTORY RANK WORLD_SIZE``.
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.observability import publish

LIMIT_S = 300.0

if hasattr(os, "pidfd_open"):
    del os.pidfd_open  # as for ranks of other hosts: none is seen to have ended


def next_call(directory, rank, number):
    """The next command; the end if there is none for a long time."""
    path = Path(directory, f"call-{rank}-{number}")
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end:
            return "end"
        time.sleep(0.05)
    return path.read_text()


def main():
    directory, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    publish._LAST_WRITE_S = LIMIT_S  # it ends as soon as the last record is written
    reloadpg.install(backends={worlds.BACKEND}, timeout=LIMIT_S)
    store = dist.FileStore(f"{directory}/store", size)
    worlds.init(store=store, rank=rank, world_size=size)
    dist.new_group(list(range(size)), group_desc="all of them")
    number = 0
    while (call := next_call(directory, rank, number)) != "end":
        getattr(reloadpg, call)()
        Path(directory, f"done-{rank}-{number}").touch()
        number += 1


if __name__ == "__main__":
    main()
