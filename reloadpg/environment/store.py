"""The store on which ranks meet before any group exists, and their agreement there.

Rank 0 reads the claims in order of arrival and writes one decision that all ranks read. This cannot
be a barrier of :mod:`reloadpg.rendezvous`, which assumes that all ranks have the same world size
and different ranks. Here neither is certain: with WORLD_SIZE 2 on one rank and 3 on the other,
torch succeeds on one rank and times out much later on the other.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ..errors import DisagreementError, ReloadpgError, RendezvousTimeoutError, named_ranks
from ..rendezvous.store_client import StoreClient, StoreLost, StoreSilent
from ..rendezvous.worker_thread import Task, Wait
from .model import DistributedEnvironment

AGREED = ("world_size", "backend", "mesh_dims", "connect")
"""The fields that must be equal in all claims."""

NO_DECISION = {"differences": [], "missing": [0], "arrived": 0}
"""The decision of a rank that did not find one in time: rank 0 writes it."""

_RESOLVE_S = 1.0
"""Seconds after the timeout to find out, for the message, whether the address resolves."""

_SETTLE_S = 2.0
"""Seconds after the first difference to wait for further claims, so as to name all ranks."""

_EXIT_S = 5.0
"""Seconds that rank 0, which hosts the store, waits for the others to read a decision to fail."""

_PAUSE_S = 0.1
"""Seconds between two checks of the clock at the end of a wait. Time in which this process did not
run is not counted."""

_LAST_S = 5.0
"""Last seconds of a wait, in which the store is polled. Before, a blocking wait is used."""

_opened: dict[tuple[int, str, int], tuple[TCPStore, Iterator[int]]] = {}
"""The open stores by process, host and port, each with the numbers of its uses. Kept until the
process ends: otherwise, in a second bring-up at the same address, a fast rank may connect to the
first server while rank 0 is closing it."""

_PROBE_S = 0.1
"""Seconds between two attempts to connect to a store that does not exist yet."""


def open_store(
    environment: DistributedEnvironment, timeout: timedelta, given: Store | None = None
) -> Store:
    """Return a store that all ranks of the job share, without keys of an earlier bring-up.

    Blocks until rank 0's server (or the launcher's) responds, or until ``timeout``; does not wait
    for the other ranks. A world of 1 opens no socket.
    """
    if given is not None:
        given.set_timeout(timeout)
        use = given.add(f"reloadpg/bringup/uses/{environment.rank}", 1)
        return PrefixStore(f"reloadpg/bringup/given/{use}", given)
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
                if time.monotonic() >= end:
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
    if _unresolvable(address, port):
        return (
            f"no store responded at {address}:{port} {within}: MASTER_ADDR {address!r} cannot be "
            f"resolved here. Nothing was started. Set it to a name or address of rank 0's host "
            f"that all ranks can resolve."
        )
    if serves:
        return (
            f"rank 0 cannot reach its own store at {address}:{port} {within}"
            f"{f' ({cause})' if cause else ''}. Nothing was started. Set MASTER_ADDR to an address "
            f"of this host, and MASTER_PORT to a port that can be opened here."
        )
    who = "the launcher's agent" if by_agent else "rank 0"
    return (
        f"no store responded at {address}:{port} {within}: {who} has not started it, or the "
        f"address is unreachable from here. Nothing was started. See the output of that process; "
        f"raise init_timeout if it is only slow."
    )


def _unresolvable(address: str, port: int) -> bool:
    look_up = Task(lambda: socket.getaddrinfo(address, port), "store-address")
    wait = Wait("init_distributed", _RESOLVE_S, "address")
    while not look_up.ended:
        if wait.left == 0:
            return True
        with wait.pause(_PAUSE_S) as pause:
            look_up.wait(pause)
    try:
        look_up.result()
    except (OSError, UnicodeError):  # UnicodeError: not a host name, such as "a..b"
        return True
    return False


# -- agreement --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """The configuration of one rank.

    Attributes:
        mesh_dims: the resolved mesh, as text.
        exclusive: identifier of the device that no other rank may use; empty if there is none.
    """

    rank: int
    world_size: int
    backend: str
    mesh_dims: str
    host: str
    local_rank: int | None
    device: str = "cpu"
    exclusive: str = ""
    connect: str = "none"


def find_differences(claims: Sequence[Claim]) -> list[str]:
    """Describe the differences between claims, with values and ranks. Pure."""
    found = []
    claims = sorted(claims, key=lambda claim: claim.rank)

    def by(field: str) -> Iterable[tuple[Any, list[Claim]]]:
        holders: dict[Any, list[Claim]] = {}
        for claim in claims:
            holders.setdefault(getattr(claim, field), []).append(claim)
        return holders.items()

    for field in AGREED:
        values = [f"{value} on {named_ranks(c.rank for c in some)}" for value, some in by(field)]
        if len(values) > 1:
            found.append(f"{field} is {'; '.join(values)}")
    for rank, takers in by("rank"):
        if len(takers) > 1:
            hosts = ", ".join(f"{one.host} (local rank {one.local_rank})" for one in takers)
            found.append(f"rank {rank} was taken by {len(takers)} processes: on {hosts}")
    for device, users in by("exclusive"):
        if device and len({one.rank for one in users}) > 1:
            places = ("not set" if one.local_rank is None else str(one.local_rank) for one in users)
            found.append(
                f"{users[0].device} on host {users[0].host} ({device}) is the device of "
                f"{named_ranks(one.rank for one in users)}, whose local ranks are "
                f"{', '.join(places)}: assign a separate device to each rank, with LOCAL_RANK or "
                f"through the launcher's visible devices"
            )
    return found


def agree(store: Store, mine: Claim, timeout: timedelta) -> None:
    """Wait until all ranks agree. Collective over the job, blocking, with a timeout."""
    seconds = timeout.total_seconds()
    exchange = partial(_exchange, mine, seconds)
    wait = _wait(seconds + _SETTLE_S + _EXIT_S)
    try:
        decision, slot = StoreClient(lambda: store).ask(exchange, wait)
    except StoreSilent:
        decision, slot = NO_DECISION, 0
    except StoreLost as error:
        raise ReloadpgError(
            f"init_distributed: rank {mine.rank} lost the store before the ranks had agreed: "
            f"{error}. No group was created. Rank 0, or the launcher's agent, has ended. See its "
            f"output, then restart the job."
        ) from error
    _conclude(decision, slot, mine, seconds)


def _exchange(mine: Claim, seconds: float, store: Store) -> tuple[dict[str, Any], int]:
    """Return the decision, and this rank's position in the order of arrival.

    Raises only exceptions of the store.
    """
    slot = store.add("arrivals", 1)
    store.set(f"claim/{slot}", json.dumps(asdict(mine)))
    if mine.rank == 0 and store.add("coordinators", 1) == 1:
        return _decide(mine, seconds, store, slot), slot
    if not _await(store, "decision", _wait(seconds + _SETTLE_S), mine.world_size):
        return NO_DECISION, slot
    decision = dict(json.loads(store.get("decision")))
    store.set(f"read/{slot}", "1")
    return decision, slot


def _decide(mine: Claim, seconds: float, store: Store, slot: int) -> dict[str, Any]:
    claims: list[Claim] = []
    here: set[int] = set()
    wait, settles = _wait(seconds), False
    while len(here) < mine.world_size:
        if not _await(store, f"claim/{len(claims) + 1}", wait, mine.world_size):
            break
        with wait.pause(0.0):  # the process may be stopped in the request
            claims.append(_claim(store, len(claims) + 1))
        differs = any(getattr(claims[-1], f) != getattr(mine, f) for f in AGREED)
        if not settles and (differs or claims[-1].rank in here):
            wait, settles = _wait(min(_SETTLE_S, wait.left)), True
        here.add(claims[-1].rank)
    # Unexpected arrivals: a rank with a larger world, or a duplicate rank.
    while store.check([f"claim/{len(claims) + 1}"]):
        claims.append(_claim(store, len(claims) + 1))
    differences = find_differences(claims)
    here.update(claim.rank for claim in claims)
    missing = [rank for rank in range(mine.world_size) if rank not in here]
    decision = {"differences": differences, "missing": missing, "arrived": len(claims)}
    store.set("decision", json.dumps(decision))
    if differences or missing:
        wait = _wait(_EXIT_S)
        for other in range(1, len(claims) + 1):
            if other != slot:
                _await(store, f"read/{other}", wait, mine.world_size)
    return decision


def _wait(seconds: float) -> Wait:
    return Wait("init_distributed", seconds, "agree")


def _await(store: Store, key: str, wait: Wait, world_size: int) -> bool:
    """Whether the key exists before the wait ends."""
    # Limits the requests of all ranks of a large job to some thousand per second.
    pause = max(_PAUSE_S, world_size / 2000)
    if wait.left > _LAST_S:
        with suppress(RuntimeError), wait.pause(wait.left - _LAST_S) as seconds:
            store.wait([key], timedelta(seconds=seconds))
    with wait.pause(0.0):  # the process may be stopped in the request, too
        found = bool(store.check([key]))  # raises if the store itself is gone
    while not found and wait.left:
        with wait.pause(pause) as seconds:
            time.sleep(seconds)
            found = store.check([key])
    return found


def _claim(store: Store, slot: int) -> Claim:
    return Claim(**json.loads(store.get(f"claim/{slot}")))


def _conclude(decision: Mapping[str, Any], slot: int, mine: Claim, seconds: float) -> None:
    """Raise the error of a decision, unless this rank is one of those that have agreed."""
    arrived, missing = int(decision["arrived"]), tuple(decision["missing"])
    if decision["differences"]:
        raise DisagreementError(
            f"init_distributed: the ranks do not agree: {'. '.join(decision['differences'])}. No "
            f"group was created on any rank. Start all ranks with the same launcher and arguments."
        )
    if missing:
        raise RendezvousTimeoutError(
            f"init_distributed: rank {mine.rank} of {mine.world_size} waited {seconds:g} s; "
            f"missing: {named_ranks(missing)}. No group was created. See the output of those "
            f"ranks; raise init_timeout if they are only slow.",
            phase="agree",
            seconds=seconds,
            arrived=arrived,
            missing=missing,
        )
    if slot > arrived:
        raise DisagreementError(
            f"init_distributed: {arrived} ranks have agreed without this process, which is rank "
            f"{mine.rank} of {mine.world_size} (host {mine.host}, local rank {mine.local_rank}). "
            f"No group was created here. A rank was started twice, or another job uses this store: "
            f"set a separate MASTER_PORT for each job."
        )
