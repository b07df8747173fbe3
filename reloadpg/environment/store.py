"""The store on which ranks meet before any group exists."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from reloadpg.environment.model import DistributedEnvironment
from reloadpg.errors import RendezvousTimeoutError
from reloadpg.rendezvous.worker_thread import Task

__all__ = ["open_store"]

_RESOLVE_S = 1.0
"""After the bound: how long to look whether the address can be resolved, so as to say so."""


class _Stores:
    """The connections of this process: one for each address, kept until it ends.

    Kept, because a second bring-up at the same address otherwise races with the first one's
    server: a fast rank connected to the server that rank 0 was just about to close.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str, int], tuple[TCPStore, int]] = {}

    def take(self, environment: DistributedEnvironment, timeout: timedelta) -> tuple[Store, int]:
        key = (os.getpid(), environment.master_addr, environment.master_port)
        with self._lock:
            store, uses = self._open.get(key, (None, 0))
            if store is None:
                store = _connect(environment, timeout)
            self._open[key] = (store, uses + 1)
        store.set_timeout(timeout)
        return store, uses + 1


_stores = _Stores()


def open_store(environment: DistributedEnvironment, timeout: timedelta) -> Store:
    """A store that all ranks of the job share, with no keys of an earlier bring-up in sight.

    Blocking until rank 0's server (or the launcher's) answers, bounded by ``timeout``; it does
    not wait for the other ranks. A world of 1 opens no socket.

    Raises:
        RendezvousTimeoutError: no server answered in time. Also a TimeoutError.
        ReloadpgError: the server could not be started.
    """
    if environment.world_size == 1:
        return HashStore()
    store, use = _stores.take(environment, timeout)
    return PrefixStore(f"reloadpg/bringup/{_attempt(os.environ)}/{use}", store)


def _attempt(environ: Mapping[str, str]) -> str:
    # torchrun's agent keeps its store when it restarts the ranks: without the attempt in the
    # prefix the restarted ranks would read the verdict of those that died.
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _connect(environment: DistributedEnvironment, timeout: timedelta) -> TCPStore:
    address, port = environment.master_addr, environment.master_port
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not by_agent
    seconds = timeout.total_seconds()
    task = Task(
        lambda: TCPStore(
            host_name=address,
            port=port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        ),
        "store-open",
    )
    cause: Exception | None = None
    # torch keeps trying for up to twice its timeout, and for ever where a server says nothing.
    if task.wait(seconds):
        try:
            return task.result()
        except RuntimeError as error:
            cause = error
    what = _what_failed(address, port, f"within {seconds:g} s", cause, by_agent, serves)
    raise RendezvousTimeoutError(
        f"init_distributed: rank {environment.rank} of {environment.world_size}: {what}",
        phase="connect",
        seconds=seconds,
        missing=() if serves or by_agent else (0,),
    ) from cause


def _what_failed(
    address: str, port: int, within: str, cause: Exception | None, by_agent: bool, serves: bool
) -> str:
    if "EADDRINUSE" in str(cause):
        return (
            f"the store could not be opened at {address}:{port}: the port is taken. Nothing was "
            f"started. Free the port, or set another MASTER_PORT on all ranks."
        )
    if _unresolvable(address, port):
        return (
            f"no store answered at {address}:{port} {within}: MASTER_ADDR {address!r} cannot be "
            f"resolved here. Nothing was started. Set it to a name or address of rank 0's host "
            f"that all ranks can resolve."
        )
    if serves:
        return (
            f"rank 0 does not reach its own store at {address}:{port} {within}"
            f"{f' ({cause})' if cause else ''}. Nothing was started. Set MASTER_ADDR to an address "
            f"of this host, and MASTER_PORT to a port that may be opened here."
        )
    who = "the launcher's agent" if by_agent else "rank 0"
    return (
        f"no store answered at {address}:{port} {within}: {who} has not come, or the address is "
        f"not reachable from here. Nothing was started. See what that process reports; raise "
        f"init_timeout if it is only slow."
    )


def _unresolvable(address: str, port: int) -> bool:
    look_up = Task(lambda: socket.getaddrinfo(address, port), "store-address")
    if not look_up.wait(_RESOLVE_S):
        return True
    try:
        look_up.result()
    except (OSError, UnicodeError):  # the latter for what cannot be a host name, such as "a..b"
        return True
    return False
