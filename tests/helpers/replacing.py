"""Ranks that are killed, and processes that take their places.

``run_replaced`` starts more processes than the job has ranks. Each of those beyond waits until a
process of the job has died, and then runs the same program under that one's rank, as a process that
a launcher starts again would: it has the same RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reloadpg.testing import run_ranks

RANKS = 4
VICTIM = 2
LIMIT = timedelta(seconds=280)
"""Reached only if something hangs."""


def store() -> Any:
    """A client of the job's store, by other means than the library's."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=LIMIT)


def incarnation() -> int:
    """0 in a process of the job, 1 in the first that takes a place, and so on."""
    return int(os.environ.get("TEST_INCARNATION", "0"))


def all_here() -> None:
    """Wait until all ranks that begin the job are here; no rank is replaced before."""
    if incarnation():
        return
    meeting = store()
    if meeting.add("test/here", 1) == RANKS:
        meeting.set("test/all here", "1")
    meeting.wait(["test/all here"])


def die() -> None:
    """End this process as the kernel does, and let the next one take its place."""
    meeting = store()
    number = meeting.add("test/deaths", 1)
    meeting.set(f"test/death/{number}", f"{os.getpid()} {os.environ['RANK']}")
    os.kill(os.getpid(), signal.SIGKILL)


def _start(rank: int, size: int, program: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    if rank >= RANKS:
        number = rank - RANKS + 1
        pid, taken = store().get(f"test/death/{number}").decode().split()
        _await_death(int(pid))
        os.environ.update(RANK=taken, LOCAL_RANK=taken, TEST_INCARNATION=str(number))
        rank = int(taken)
    return program(rank, RANKS, *args)


def _await_death(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll(LIMIT.total_seconds() * 1000)
    os.close(descriptor)


def run_replaced(
    program: Callable[..., Any], *args: Any, deaths: int = 1, timeout: float = 280
) -> list[Any]:
    """Run ``program(rank, 4, *args)``, in which some processes call :func:`die`.

    Returns:
        The results: of the four ranks that began (None of those that died), then of those that took
        their places, in the order of the deaths.
    """
    outcomes = run_ranks(_start, RANKS + deaths, args=(program, args), timeout=timeout, check=False)
    killed = [one for one in outcomes if one.signal == signal.SIGKILL and not one.timed_out]
    bad = [one for one in outcomes if not one.ok and one not in killed]
    told = "\n".join(f"rank {one.rank}: {one.exception}\n{one.output}" for one in bad)
    assert not bad, told
    assert len(killed) == deaths
    return [one.result for one in outcomes]
