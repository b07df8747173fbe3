"""Faults in a running job, and a job of overlapping groups that must survive them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from recovery_job import RING as RING
from recovery_job import Job, meet
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg

PATIENCE = timedelta(seconds=120)
"""The timeout of collectives and of the library: reached only if something hangs."""
IMPATIENCE = timedelta(seconds=2)
"""The timeout of a collective that is never to complete."""


class FaultJob(Job):
    """One rank's part of the job."""

    def __init__(self, rank: int, size: int, backend: str = "gloo") -> None:
        super().__init__(
            rank,
            bound=PATIENCE.total_seconds(),
            backend=backend,
            backends={"gloo", "faulty"},
            parallelism=8,
            timeout=PATIENCE,
        )
        self.size = size
        self.ring = self.groups[-1]
        """The last group, of all ranks: faults happen in it."""

    def meet(self, name: str) -> None:
        """Wait for all ranks without groups and without the library."""
        meet(name, self.size, 120.0)

    def new_group(self, backend: str | None = None) -> Any:
        """Create another group of all ranks."""
        group: Any = dist.new_group(list(range(self.size)), backend=backend)
        self.groups.append(group)
        self.names.append(group.group_name)
        self.ids.append(id(group))
        return group

    def whole(self) -> dict[str, Any]:
        """What must hold after each recovery."""
        return {
            "same": self.same(),
            "states": self.states(),
            "sums": self.sums(),
            "generation": reloadpg.status().generation,
            "generations": self.generations(),
            "pending": reloadpg.recovery_requested(),
        }


def sockets() -> set[int]:
    """The descriptors of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if re.match(r"socket:", os.readlink(f"/proc/self/fd/{name}")):
                found.add(int(name))
    return found


def connections() -> set[int]:
    """The descriptors of this process's connections, except those to the store."""
    port, found = int(os.environ["MASTER_PORT"]), set()
    for descriptor in sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                ports = {one.getsockname()[1], one.getpeername()[1]}
                if port not in ports:
                    found.add(descriptor)
    return found


def cut(descriptors: set[int]) -> int:
    """Shut connections down without their owner; return their number."""
    count = 0
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()  # of a listening socket: raises
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def impatient(group: Any, call: Callable[[], object]) -> str:
    """Call a function with a short timeout of the group's collectives; return the error's text."""
    _set_pg_timeout(IMPATIENCE, group)
    try:
        call()
    except RuntimeError as error:
        return str(error)
    finally:
        with suppress(RuntimeError):
            _set_pg_timeout(PATIENCE, group)
    return ""


def all_reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)
