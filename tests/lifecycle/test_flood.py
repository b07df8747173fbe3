"""Another process connects to the job's store in a loop, as any user of its network can."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import worlds

import reloadpg

FLOOD = """
import os, socket, sys, time
how, port, parent = sys.argv[1], int(sys.argv[2]), os.getppid()
kept = []
number = 0
while os.getppid() == parent:
    try:
        one = socket.create_connection(("127.0.0.1", port), timeout=5)
        number += 1
        if how == "bytes":
            one.sendall(os.urandom(64))
        if how == "open":
            kept.append(one)
            if len(kept) > 200:
                kept.pop(0).close()
        else:
            one.close()
    except OSError:
        time.sleep(0.01)
    if number == 50:
        print("flooded", flush=True)
"""

CYCLES = 5


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("how", ["closed", "bytes", "open"])
def test_cycles_while_the_stores_port_is_flooded(rank: int, how: str) -> None:
    """They complete, with the right sums: no rank fails and none is named as missing."""
    worlds.start("unbound")
    group = dist.new_group([0, 1])
    flood = None
    if rank == 0:
        command = [sys.executable, "-c", FLOOD, how, os.environ["MASTER_PORT"]]
        flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert flood.stdout is not None
        assert flood.stdout.readline() == "flooded\n"
    try:
        dist.barrier()
        for cycle in range(1, CYCLES + 1):
            assert len(reloadpg.offload().groups) == 2
            assert reloadpg.reload().generation == cycle
            value = torch.full((1,), float(rank + cycle))
            dist.all_reduce(value, group=group)
            assert value.item() == 2 * cycle + 1
        assert flood is None or flood.poll() is None
    finally:
        if flood is not None:
            flood.kill()
            flood.wait()
