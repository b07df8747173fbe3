"""The store of a group: its clients, and the keys that a group writes."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import FunctionType
from typing import Any, cast

from torch.distributed import DistNetworkError, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d as _c10d

from ..errors import ReloadpgError
from ..processes import socket_of
from .tables import is_known, store_of

_RANKS_PER_ROOT = 128
_HAS_NCCL2 = hasattr(_c10d, "ProcessGroupNCCL2")
_NEEDED = ("add", "clone", "compare_set", "set", "wait")
_LISTENS_S = 5.0
_ATTEMPTS = timedelta(seconds=4)
"""Less than the exit of the interpreter waits for a thread before it shuts the connections."""

IDLE_S = 10.0
"""Seconds without a request after which a connection may have been reset."""

_PAIRS_UP_TO = 16
"""In larger groups, such as data-parallel ones, keys of pairs are not deleted: they rarely send."""


class JobEnded(RuntimeError):  # noqa: N818 - never leaves the core
    """The default group was destroyed, and with it the job that its store belongs to."""


def root_store(group: ProcessGroup) -> Store:
    """Return the store beneath the group's own name prefix, which all groups share."""
    store = store_of(group)
    return store.underlying_store if isinstance(store, PrefixStore) else store


def unprefixed(store: Store) -> Store:
    """Return the store beneath all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def root_store_of_job(world: ProcessGroup) -> Callable[[], Store]:
    """Return a function that finds the root store of the job for as long as the job lasts.

    Rank 0's client of a TCPStore holds the server, which ends with the default group. Objects that
    outlive the group must hold neither.
    """
    reference = weakref.ref(world)

    def find() -> Store:
        group = reference()
        if group is None or not is_known(group):
            raise JobEnded(
                "the default group was destroyed, in a callback or in another thread, and with it "
                "all groups on this rank. Call init_process_group() for a new job"
            )
        return root_store(group)

    return find


def fake_store() -> Store:
    """Register torch's backend ``fake``, and return a store without contents for it."""
    # On use: it is part of torch's test utilities.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def clone_store(
    store: Store, *, again: bool = False, stopped: Callable[[], object] = lambda: None
) -> Store:
    """Return a client of the same store with a separate connection. Blocking.

    A blocking wait holds the lock of its client, so each thread needs a separate client.

    Args:
        again: whether the server may have ended or stopped since the first connection. Nothing ends
            torch's attempts to connect to such a server for the timeout of the store; they can make
            the end of the process a SIGABRT. So a client with a short timeout connects before: it
            makes no further attempt after :func:`shut_store_connections`.
        stopped: called before the clone; raises if it is not wanted any more.

    Raises:
        ReloadpgError: the class of the store lacks methods.
        RuntimeError: no server listens.
    """
    own = unprefixed(store)
    if lacking := _lacking(type(own)):
        kind = f"{type(own).__module__}.{type(own).__qualname__}"
        raise ReloadpgError(
            f"the store of the job, a {kind}, does not define {', '.join(lacking)}, which reloadpg "
            "needs; no group was changed. Define the missing methods, or pass another store to "
            "init_process_group(), such as a TCPStore."
        )
    if again and isinstance(own, TCPStore):
        try:
            socket.create_connection((own.host, own.port), _LISTENS_S).close()
        except OSError as error:
            raise RuntimeError(f"no server listens at {own.host}:{own.port}: {error}") from None
        with suppress(RuntimeError):  # a look-up of the host's name may take longer
            TCPStore(own.host, own.port, timeout=_ATTEMPTS, wait_for_workers=False)
    stopped()
    return cast(Store, cast(Any, store).clone())


def _lacking(kind: type) -> list[str]:
    """The methods for the ranks' agreement that a store in Python lacks."""
    defined = kind.__mro__[: kind.__mro__.index(Store)]
    for base in defined:
        if not any(isinstance(one, FunctionType) for one in vars(base).values()):
            return []  # it is defined in C++
    return [name for name in _NEEDED if getattr(kind, name) is getattr(Store, name)]


class Clients:
    """Clients of one store, kept by number. A client that was idle is checked before its use, since
    its connection may have been reset, and replaced.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Store, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def is_ready(self, number: int) -> bool:
        """Whether :meth:`of` sends no request. Local."""
        return number in self._kept and time.monotonic() - self._kept[number][1] <= IDLE_S

    def of(self, number: int, root: Store) -> Store:
        """Return a client. Blocks until it is connected, or its server responds.

        Args:
            number: its number; only one thread uses it.
            root: a client to clone.
        """
        if number in self._kept:
            client = self._kept[number][0]
            if not self.is_ready(number):
                try:
                    client.compare_set("-", "-", "-")
                except RuntimeError:
                    client = clone_store(root, again=True)
        else:
            client = clone_store(root)
        self._kept[number] = client, time.monotonic()
        return client


def delete_keys(store: Store, keys: Iterable[str]) -> None:
    """Delete keys, where the store can. It raises if the connection is lost."""
    for key in keys:
        try:
            store.delete_key(key)
        except DistNetworkError:
            raise
        except RuntimeError:  # such as NotImplementedError
            return


def shut_store_connections(store: Store) -> None:
    """Make all requests of this process to the server of a TCPStore fail. Local; Linux only.

    For a process that ends: torch's own client of the same server is shut too.
    """
    port = getattr(unprefixed(store), "port", None)
    for name in os.listdir("/proc/self/fd") if port and os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError), socket_of(int(name)) as one:
            if one.getpeername()[1:2] == (port,):
                one.shutdown(socket.SHUT_RDWR)


def rendezvous_keys(name: str, backends: Mapping[str, str], rank: int, size: int) -> list[str]:
    """List the keys that one member of a group has written to connect it, in the root store.

    Torch never deletes them. As each generation has another name, the store would grow. Torch puts
    the default group's keys under its name, and the keys of all other groups below it. Seen: gloo
    writes ``0/<rank>`` in the device's prefix on torch 2.8 to 2.15, and a split of it without that
    prefix (2.15). NCCL, by ``ProcessGroupNCCL.cpp`` of torch 2.8 and later, not seen on a GPU:
    group rank 0 writes the unique id, one for each 128 ranks in a large group; a pair that sends
    before any collective has a separate id, ``<lower>:<higher>``. ``ProcessGroupNCCL2`` (2.15, over
    stand-ins): rank 0 writes ``<name>/nccl_storekey_0``.
    """
    places = {f"{name}//{device}//": backend for device, backend in backends.items()}
    places[f"{name}//"] = "gloo"
    keys = []
    for place, backend in places.items():
        keys.append(f"{place}0/{rank}")
        if rank == 0 and backend != "gloo":
            keys.append(f"{place}0")
    for device, backend in backends.items():
        if backend.startswith("nccl"):
            roots = -(-size // _RANKS_PER_ROOT) if rank == 0 and size > _RANKS_PER_ROOT else 0
            peers = range(rank + 1, size) if size <= _PAIRS_UP_TO else ()
            more = [f"UniqueNCCLID:{root}" for root in range(roots)]
            more += [f"{rank}:{peer}" for peer in peers]
            if rank == 0 and _HAS_NCCL2:
                more.append(f"{name}/nccl_storekey_0")
            keys += [f"{name}//{device}//{key}" for key in more]
    return keys
