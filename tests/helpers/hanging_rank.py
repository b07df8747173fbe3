"""A rank that publishes its status, and calls the functions that a test requests."""

import itertools
import os
import time
from pathlib import Path

import torch.distributed as dist

import reloadpg
from helpers import worlds

LIMIT_S = 300.0


def next_call(directory, rank, number):
    """Wait for the name of the next function to call."""
    path = Path(directory, f"call-{rank}-{number}")
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def hanging_rank(rank, size, directory):
    """Call the functions of reloadpg that the files ``call-RANK-NUMBER`` name, until killed."""
    if hasattr(os, "pidfd_open"):
        del os.pidfd_open  # dead processes are not detected, as on other hosts
    Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
    reloadpg.install(backends={worlds.BACKEND}, timeout=LIMIT_S)
    worlds.init(store=dist.FileStore(f"{directory}/store", size), rank=rank, world_size=size)
    dist.new_group(list(range(size)), group_desc="all of them")
    for number in itertools.count():
        getattr(reloadpg, next_call(directory, rank, number))()
        Path(directory, f"done-{rank}-{number}").touch()
