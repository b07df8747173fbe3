"""The store on which ranks meet before any group exists, and the place of each rank there.

A barrier of :mod:`reloadpg.rendezvous` assumes that all ranks have the same world size and
different ranks. Here neither is certain: with WORLD_SIZE 2 on one rank and 3 on the other, torch
succeeds on one rank and times out much later on the other. So each process first takes its place,
by a compare-and-set.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from uuid import uuid4

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from ..errors import RendezvousTimeoutError
from ..rendezvous.store_client import StoreClient
from ..threads import Deadline, Task
from .model import DistributedEnvironment

_opened: dict[tuple[int, str, int], tuple[TCPStore, Iterator[int]]] = {}
"""The open stores by process, host and port, each with the numbers of its uses. Kept until the
process ends: otherwise, in a second bring-up at the same address, a fast rank may connect to the
first server while rank 0 is closing it."""

_PROBE_S = 0.1
"""Seconds between two attempts to connect to a store that does not exist yet."""


def open_store(environment: DistributedEnvironment, timeout: timedelta) -> Store:
    """Return a store that all ranks of the job share, without keys of an earlier bring-up.

    Blocks until rank 0's server (or the launcher's) responds, or until ``timeout``; does not wait
    for the other ranks. A world of 1 opens no socket.
    """
    if environment.world_size == 1:
        return HashStore()
    store, use = _open(environment, timeout.total_seconds())
    store.set_timeout(timeout)
    # torchrun's agent keeps its store when it restarts the ranks. Without the attempt in the
    # prefix, restarted ranks would read the decision of the earlier ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"reloadpg/bringup/{attempt}/{use}", store)


def _open(environment: DistributedEnvironment, seconds: float) -> tuple[TCPStore, int]:
    """The store at the job's address, and the number of this use. Blocking, with a timeout."""
    address, port = environment.master_addr, environment.master_port or 0
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not by_agent
    key = (os.getpid(), address, port)
    cause = None
    if key not in _opened:
        task = _connect(address, port, seconds, serves=serves)
        try:
            # Torch retries indefinitely if a server accepts the connection but does not respond.
            if task.wait(seconds):
                _opened[key] = (task.result(), itertools.count(1))
        except RuntimeError as error:
            cause = error
    if key in _opened:
        store, uses = _opened[key]
        return store, next(uses)
    what = _what_failed(address, port, f"within {seconds:g} s", cause, by_agent, serves)
    raise RendezvousTimeoutError(
        f"init_distributed: rank {environment.rank} of {environment.world_size}: {what}",
        phase="connect",
        seconds=seconds,
        missing=() if serves or by_agent else (0,),
    ) from cause


def _connect(address: str, port: int, seconds: float, *, serves: bool) -> Task[TCPStore]:
    """Open a store in the background. Local, non-blocking."""
    end = time.monotonic() + seconds

    def opened(limit: float) -> TCPStore:
        return TCPStore(
            host_name=address,
            port=port,
            is_master=serves,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def connected() -> TCPStore:
        # Torch retries in C++ for up to twice its timeout. If the interpreter exits during that,
        # the process ends with "terminate called without an active exception", and the error is
        # lost. So torch is called only once a server listens.
        while True:
            left = max(0.001, end - time.monotonic())
            try:
                socket.create_connection((address, port), timeout=left).close()
            except OSError as error:
                if time.monotonic() + _PROBE_S >= end:
                    raise RuntimeError(f"no server listens at {address}:{port}: {error}") from error
                time.sleep(_PROBE_S)
            else:
                return opened(left)

    return Task(partial(opened, seconds) if serves else connected, "store-open")


def _what_failed(
    address: str, port: int, within: str, cause: Exception | None, by_agent: bool, serves: bool
) -> str:
    if "EADDRINUSE" in str(cause):
        return (
            f"the store could not be opened at {address}:{port}: the port is in use. Nothing was "
            f"started. Free the port, or set another MASTER_PORT on all ranks."
        )
    reason = f" ({cause})" if cause else ""
    if serves:
        return (
            f"rank 0 cannot reach its own store at {address}:{port} {within}{reason}. Nothing was "
            f"started. Set MASTER_ADDR to an address of this host, and MASTER_PORT to a port that "
            f"can be opened here."
        )
    who = "the launcher's agent" if by_agent else "rank 0"
    return (
        f"no store responded at {address}:{port} {within}{reason}: {who} has not started it, or "
        f"the address is unreachable from here. Nothing was started. See the output of that "
        f"process; raise init_timeout if it is only slow."
    )


# -- agreement --------------------------------------------------------------------------------


def claim_place(store: Store, environment: DistributedEnvironment, seconds: float) -> str:
    """Take this process's place in the job. Local, blocking, with a timeout.

    A rank can be counted at a barrier only if its rank is unique and all world sizes are equal.

    Returns:
        The difference to the place that another process has taken before; empty if there is none.
    """
    rank, size = environment.rank, environment.world_size
    here = f"{socket.gethostname()} (local rank {environment.local_rank})"
    process = uuid4().hex  # a request that is repeated finds its own place

    def take(store: Store) -> str:
        first = store.compare_set("place/first", "", f"{size} {rank}").decode()
        other_size, other = map(int, first.split())
        if other_size != size:
            sizes = sorted([(rank, size), (other, other_size)])
            return "world_size is " + "; ".join(f"{size} on rank {rank}" for rank, size in sizes)
        taken = store.compare_set(f"place/rank/{rank}", "", f"{process} {here}").decode()
        owner, _, there = taken.partition(" ")
        if owner != process:
            return (
                f"rank {rank} was taken by 2 processes: on {there}, {here}: start each rank once, "
                f"and set a separate MASTER_PORT for each job"
            )
        return ""

    deadline = Deadline("init_distributed", seconds, "agree")
    return StoreClient(lambda: store, rank).ask(take, deadline)
