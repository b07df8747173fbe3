"""The process of the store ends or hangs: all ranks raise a clear error within the timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import ALLOWANCE, BOUND, PARALLELISM, Job, attempt, backend_for, interfere
from helpers.sampling import sampled

import reloadpg
from reloadpg.testing import run_ranks

SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def signalled(server: int, number: int) -> None:
    """Signal the store's server; a stopped one does not respond once this returns."""
    os.kill(server, number)
    # One thread gets the signal; the others continue until it has run.
    tasks = Path(f"/proc/{server}/task")
    while number == signal.SIGSTOP and not all(
        (task / "stat").read_text().rpartition(") ")[2].startswith("T") for task in tasks.iterdir()
    ):
        time.sleep(0.001)


def on_a_separate_store(
    rank: int, size: int, port: int, server: int, point: str, number: int
) -> None:
    os.environ |= worlds.SILENCE
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    job = Job(
        backend_for(point),
        subgroups=((0, 1), (1, 2)),
        timeout=BOUND,
        store=(store, size),
        parallelism=PARALLELISM,
    )
    if point.startswith("reload"):
        reloadpg.offload()
    before = job.snapshot()
    if rank == 1:
        interfere(point, lambda: signalled(server, number))
    first = reloadpg.offload if point.startswith("offload") else reloadpg.reload
    for call in (first, reloadpg.reload):
        seen = attempt(call)
        assert seen.kind in {"ReloadpgError", "RendezvousTimeoutError", "RebuildError"}, seen
        assert "store" in seen.text
        assert "Restart the job" in seen.text, seen
        assert seen.seconds < BOUND + ALLOWANCE, seen
    # This rank may have been counted without knowing it; the others then release their groups.
    unchanged = point == "offload.enter" and job.snapshot() == before
    assert job.states() == ({"live"} if unchanged else {"failed"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="ends"),
        pytest.param(signal.SIGSTOP, id="hangs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("point", sampled(["offload.enter", "reload.group1"], "reload.group1"))
def test_all_ranks_get_a_clear_error(point: str, number: int) -> None:
    """The error names the store. The groups are unchanged, or all are failed."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            args = (port, server.pid, point, number)
            run_ranks(on_a_separate_store, 3, args=args, timeout=240)
        finally:
            server.kill()
