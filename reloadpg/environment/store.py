"""The store on which ranks meet before any group exists, and what they agree on there.

Rank 0 reads the claims in the order in which they arrive and writes one outcome that all ranks
read. It cannot be a barrier of :mod:`reloadpg.rendezvous`: that counts to a world size which all
ranks know alike, and names its keys by ranks that are taken once. Here both are in question: with
WORLD_SIZE 2 on one rank and 3 on the other, stock torch succeeds on one and times out much later
on the other.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ..errors import DisagreementError, ReloadpgError, RendezvousTimeoutError, format_ranks
from ..rendezvous.store_client import StoreClient, StoreLost, StoreSilent
from ..rendezvous.worker_thread import Task, Wait
from .model import DistributedEnvironment

__all__ = ["Claim", "agree", "find_differences", "open_store"]

AGREED = ("world_size", "backend", "mesh_dims", "connect")
"""What all claims must have alike."""

_RESOLVE_S = 1.0
"""After the bound: how long to look whether the address can be resolved, so as to say so."""

_SETTLE_S = 2.0
"""After the first difference: how long to wait for further claims, so as to name all ranks."""

_EXIT_S = 5.0
"""How long rank 0, whose process holds the store, waits for the others to read a bad outcome."""

_PAUSE_S = 0.1
"""Between two looks at the clock at the end of a wait: time in which this process did not run is
not counted."""

_LAST_S = 5.0
"""The end of a wait, in which the store is asked again and again. Before, it says so itself."""


_opening = threading.Lock()
_opened: dict[tuple[int, str, int], tuple[TCPStore, int]] = {}
"""The store of each process and address, and how often it was used. Kept until the process ends: a
second bring-up at the same address otherwise races with the first one's server, where a fast rank
connected to the one that rank 0 was just about to close."""

_PROBE_S = 0.1
"""Interval between two attempts to connect to a store that is not there yet."""


def open_store(
    environment: DistributedEnvironment, timeout: timedelta, given: Store | None = None
) -> Store:
    """Return a store that all ranks of the job share, with no keys of an earlier bring-up in sight.

    Blocking until rank 0's server (or the launcher's) answers, bounded by ``timeout``; it does
    not wait for the other ranks. A world of 1 opens no socket. A store that was given is used as
    it is, with keys that each bring-up on it has for itself.

    Raises:
        RendezvousTimeoutError: no server answered in time. Also a TimeoutError.
        ReloadpgError: the server could not be started.
    """
    if given is not None:
        given.set_timeout(timeout)
        use = given.add(f"reloadpg/bringup/uses/{environment.rank}", 1)
        return PrefixStore(f"reloadpg/bringup/given/{use}", given)
    if environment.world_size == 1:
        return HashStore()
    key = (os.getpid(), environment.master_addr, environment.master_port or 0)
    with _opening:
        store, uses = _opened.get(key) or (_connect(environment, timeout), 0)
        _opened[key] = store, uses + 1
    store.set_timeout(timeout)
    # torchrun's agent keeps its store when it restarts the ranks: without the attempt in the
    # prefix the restarted ranks would read the outcome of those that died.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"reloadpg/bringup/{attempt}/{uses + 1}", store)


def _connect(environment: DistributedEnvironment, timeout: timedelta) -> TCPStore:
    address, port = environment.master_addr, environment.master_port or 0
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not by_agent
    seconds = timeout.total_seconds()
    end = time.monotonic() + seconds

    def opened(limit: timedelta) -> TCPStore:
        return TCPStore(
            host_name=address,
            port=port,
            is_master=serves,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )

    def connected() -> TCPStore:
        # Torch keeps trying for up to twice its timeout, in C++. A thread that is in there when
        # the interpreter ends makes the process end in "terminate called without an active
        # exception", and the error is lost. So it is called when somebody listens.
        while True:
            left = max(0.001, end - time.monotonic())
            try:
                socket.create_connection((address, port), timeout=left).close()
            except OSError as error:
                if time.monotonic() >= end:
                    raise RuntimeError(f"no server listens at {address}:{port}: {error}") from error
                time.sleep(_PROBE_S)
            else:
                return opened(timedelta(seconds=left))

    task = Task((lambda: opened(timeout)) if serves else connected, "store-open")
    cause: Exception | None = None
    # torch tries indefinitely where a server accepts the connection and does not respond.
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
    wait = Wait("init_distributed, address", _RESOLVE_S)
    while not look_up.ended:
        if wait.left == 0:
            return True
        wait.pause(_PAUSE_S, look_up.wait)
    try:
        look_up.result()
    except (OSError, UnicodeError):  # the latter for what cannot be a host name, such as "a..b"
        return True
    return False


# -- agreement --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What one rank believes.

    Attributes:
        rank: its rank.
        world_size: the number of ranks.
        backend: the backend string.
        mesh_dims: the resolved mesh, as text.
        host: name of its host.
        local_rank: its number on that host, or None where nobody said.
        device: the device that it uses.
        exclusive: what no other rank may use; empty if there is nothing.
        connect: whether it connects the groups that are made.
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
    """What the claims do not agree on, each with the values and the ranks that hold them. Pure."""
    found = []
    claims = sorted(claims, key=lambda claim: claim.rank)
    for field in AGREED:
        holders: dict[Any, list[int]] = {}
        for claim in claims:
            holders.setdefault(getattr(claim, field), []).append(claim.rank)
        if len(holders) > 1:
            listed = "; ".join(
                f"{value} on rank {format_ranks(ranks)}" for value, ranks in holders.items()
            )
            found.append(f"{field} is {listed}")
    takers: dict[int, list[str]] = {}
    for claim in claims:
        takers.setdefault(claim.rank, []).append(f"{claim.host} (local rank {claim.local_rank})")
    found += [
        f"rank {rank} was taken by {len(hosts)} processes: on {', '.join(hosts)}"
        for rank, hosts in takers.items()
        if len(hosts) > 1
    ]
    users: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.exclusive:
            users.setdefault(claim.exclusive, []).append(claim)
    found += [_shared(sharing) for sharing in users.values() if len({c.rank for c in sharing}) > 1]
    return found


def _shared(claims: Sequence[Claim]) -> str:
    first = claims[0]
    locals_ = ", ".join("not set" if c.local_rank is None else str(c.local_rank) for c in claims)
    return (
        f"{first.device} on host {first.host} ({first.exclusive}) is the device of rank "
        f"{format_ranks(claim.rank for claim in claims)}, whose local ranks are {locals_}: give "
        f"each rank a device of its own, by LOCAL_RANK or by what its launcher makes visible"
    )


def agree(store: Store, mine: Claim, timeout: timedelta) -> None:
    """Return once all ranks are known to agree. Collective over the job, blocking, bounded.

    Raises:
        DisagreementError: on all ranks that came; names what differs, with ranks and values.
        RendezvousTimeoutError: not all ranks came in time; names the missing ones.
        ReloadpgError: the store was lost meanwhile.
    """
    seconds = timeout.total_seconds()
    wait = Wait("init_distributed, agree", seconds + _SETTLE_S + _EXIT_S)
    try:
        outcome, slot = StoreClient(lambda: store).ask(_Exchange(mine, seconds).outcome, wait)
    except StoreSilent:
        raise _silent(mine, seconds) from None
    except StoreLost as error:
        raise ReloadpgError(
            f"init_distributed: rank {mine.rank} lost the store before the ranks had agreed: "
            f"{error}. No group was made. Rank 0, or the launcher's agent, has ended: see what it "
            f"reports, then start the job again."
        ) from error
    if outcome["kind"] == "silent":
        raise _silent(mine, seconds)
    _conclude(outcome, slot, mine, seconds)


class _Exchange:
    """The questions of one rank to the store. They raise nothing but what the store raises."""

    def __init__(self, mine: Claim, seconds: float) -> None:
        self._mine = mine
        self._seconds = seconds

    def outcome(self, store: Store) -> tuple[dict[str, Any], int]:
        """Return the outcome, and the place of this rank in the order of arrival."""
        slot = store.add("arrivals", 1)
        store.set(f"claim/{slot}", json.dumps(asdict(self._mine)))
        if self._mine.rank == 0 and store.add("judges", 1) == 1:
            return self._judge(store, slot), slot
        if not self._await(store, "outcome", self._wait(self._seconds + _SETTLE_S)):
            return {"kind": "silent"}, slot
        outcome = dict(json.loads(store.get("outcome")))
        store.set(f"read/{slot}", "1")
        return outcome, slot

    def _judge(self, store: Store, mine: int) -> dict[str, Any]:
        claims: list[Claim] = []
        here: set[int] = set()
        wait, settles = self._wait(self._seconds), False
        while len(here) < self._mine.world_size:
            if not self._await(store, f"claim/{len(claims) + 1}", wait):
                break
            claims.append(_claim(store, len(claims) + 1))
            differs = any(getattr(claims[-1], f) != getattr(self._mine, f) for f in AGREED)
            if not settles and (differs or claims[-1].rank in here):
                wait, settles = self._wait(min(_SETTLE_S, wait.left)), True
            here.add(claims[-1].rank)
        # Those that have come beside the expected ones: a rank with a larger world, or twice one.
        while store.check([f"claim/{len(claims) + 1}"]):
            claims.append(_claim(store, len(claims) + 1))
        differences = find_differences(claims)
        here.update(claim.rank for claim in claims)
        missing = [rank for rank in range(self._mine.world_size) if rank not in here]
        if differences:
            outcome: dict[str, Any] = {"kind": "differ", "text": ". ".join(differences)}
        elif missing:
            outcome = {"kind": "missing", "ranks": missing, "arrived": len(here)}
        else:
            outcome = {"kind": "agreed", "arrived": len(claims)}
        store.set("outcome", json.dumps(outcome))
        if outcome["kind"] != "agreed":
            wait = self._wait(_EXIT_S)
            for slot in range(1, len(claims) + 1):
                if slot != mine:
                    self._await(store, f"read/{slot}", wait)
        return outcome

    def _wait(self, seconds: float) -> Wait:
        return Wait("init_distributed, agree", seconds)

    def _await(self, store: Store, key: str, wait: Wait) -> bool:
        """Whether the key is there before the wait ends."""
        # In a large job all ranks together ask the store some thousand times a second at most.
        pause = max(_PAUSE_S, self._mine.world_size / 2000)
        if wait.left > _LAST_S:
            with suppress(RuntimeError):
                wait.pause(wait.left - _LAST_S, lambda s: store.wait([key], timedelta(seconds=s)))
        while not store.check([key]):  # raises if the store itself is gone
            if wait.left == 0:
                return False
            wait.pause(pause, time.sleep)
        return True


def _claim(store: Store, slot: int) -> Claim:
    return Claim(**json.loads(store.get(f"claim/{slot}")))


def _conclude(outcome: Mapping[str, Any], slot: int, mine: Claim, seconds: float) -> None:
    if outcome["kind"] == "differ":
        raise DisagreementError(
            f"init_distributed: the ranks do not agree: {outcome['text']}. No group was made on "
            f"any rank. Start all ranks with the same launcher and arguments."
        )
    if outcome["kind"] == "missing":
        missing = list(outcome["ranks"])
        raise RendezvousTimeoutError(
            f"init_distributed: {outcome['arrived']} of {mine.world_size} ranks came within "
            f"{seconds:g} s; missing: rank {format_ranks(missing)}. No group was made. See what "
            f"those ranks report; raise init_timeout if they are only slow.",
            phase="agree",
            seconds=seconds,
            arrived=int(outcome["arrived"]),
            missing=missing,
        )
    if slot > int(outcome["arrived"]):
        raise DisagreementError(
            f"init_distributed: {outcome['arrived']} ranks have agreed without this process, "
            f"which calls itself rank {mine.rank} of {mine.world_size} (host {mine.host}, local "
            f"rank {mine.local_rank}). No group was made here. A rank was started twice, or "
            f"another job uses this store: give each job its own MASTER_PORT."
        )


def _silent(mine: Claim, seconds: float) -> RendezvousTimeoutError:
    return RendezvousTimeoutError(
        f"init_distributed: rank {mine.rank} of {mine.world_size} waited {seconds:g} s, but rank 0 "
        f"said nothing; missing: rank 0. No group was made. See what rank 0 reports; raise "
        f"init_timeout if it is only slow.",
        phase="agree",
        seconds=seconds,
        missing=(0,),
    )
