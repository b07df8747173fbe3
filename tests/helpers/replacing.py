"""Ranks that are killed, and processes that replace them.

``run_replaced`` starts more processes than the job has ranks. Each additional one waits until a
process of the job has died, and then runs the same program with its rank, as a launcher's restart
would: with the same RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from helpers.fault_job import await_death, meet
from reloadpg.testing import run_ranks

RANKS = 4
VICTIM = 2
LIMIT = timedelta(seconds=280)
"""Reached only if something hangs."""


def store() -> Any:
    """A separate client of the job's store."""
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=LIMIT)


def incarnation() -> int:
    """0 in a process of the job, 1 in the first replacement, and so on."""
    return int(os.environ.get("TEST_INCARNATION", "0"))


def all_here() -> None:
    """Wait until all initial ranks have started, before one may be replaced."""
    if not incarnation():
        meet("here", RANKS, LIMIT.total_seconds(), store())


def die() -> None:
    """End this process by SIGKILL, and let the next replacement start."""
    meeting = store()
    number = meeting.add("test/deaths", 1)
    meeting.set(f"test/death/{number}", f"{os.getpid()} {os.environ['RANK']}")
    os.kill(os.getpid(), signal.SIGKILL)


def _start(rank: int, size: int, program: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    if rank >= RANKS:
        number = rank - RANKS + 1
        pid, taken = store().get(f"test/death/{number}").decode().split()
        await_death(int(pid))
        os.environ.update(RANK=taken, LOCAL_RANK=taken, TEST_INCARNATION=str(number))
        rank = int(taken)
    return program(rank, RANKS, *args)


def run_replaced(
    program: Callable[..., Any], *args: Any, deaths: int = 1, timeout: float = 280, **options: Any
) -> list[Any]:
    """Run ``program(rank, 4, *args)``, in which some processes call :func:`die`.

    ``options`` are those of ``run_ranks``.

    Returns:
        The results of the four initial ranks (None for those that died), followed by those of the
        replacements, in the order of the deaths.
    """
    options |= {"args": (program, args), "timeout": timeout, "check": False}
    outcomes = run_ranks(_start, RANKS + deaths, **options)
    killed = [one for one in outcomes if one.signal == signal.SIGKILL and not one.timed_out]
    bad = [one for one in outcomes if not one.ok and one not in killed]
    assert not bad, "\n".join(f"rank {one.rank}: {one.exception}\n{one.output}" for one in bad)
    assert len(killed) == deaths
    return [one.result for one in outcomes]
