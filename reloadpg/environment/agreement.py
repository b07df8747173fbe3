"""Agreement before the first collective, when even the number of ranks is in question.

Rank 0 reads the claims in the order in which they arrive and writes one verdict that all ranks
read. It cannot be a gate of :mod:`reloadpg.rendezvous`, which counts to a world size that all
ranks know alike: with WORLD_SIZE 2 on one rank and 3 on the other, stock torch succeeds on one
and times out much later on the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from reloadpg.errors import (
    DisagreementError,
    ReloadpgError,
    RendezvousTimeoutError,
    format_ranks,
)
from reloadpg.rendezvous.worker_thread import Task

__all__ = ["Claim", "agree", "find_differences"]

_SETTLE_S = 2.0
"""After the first difference: how long to wait for further claims, so as to name all ranks."""

_FAREWELL_S = 5.0
"""How long rank 0, whose process holds the store, waits for the others to read a bad verdict."""


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
    """

    rank: int
    world_size: int
    backend: str
    mesh_dims: str
    host: str
    local_rank: int | None


def find_differences(claims: Sequence[Claim]) -> list[str]:
    """What the claims do not agree on, each with the values and the ranks that hold them. Pure."""
    found = []
    claims = sorted(claims, key=lambda claim: claim.rank)
    for field in ("world_size", "backend", "mesh_dims"):
        holders = _holders(claims, field)
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
    places: dict[tuple[str, int], list[int]] = {}
    for claim in claims:
        if claim.local_rank is not None:
            places.setdefault((claim.host, claim.local_rank), []).append(claim.rank)
    found += [
        f"(host, local rank) is ({host}, {local_rank}) on rank {format_ranks(ranks)}"
        for (host, local_rank), ranks in places.items()
        if len(set(ranks)) > 1
    ]
    return found


def _holders(claims: Sequence[Claim], field: str) -> dict[Any, list[int]]:
    holders: dict[Any, list[int]] = {}
    for claim in claims:
        holders.setdefault(getattr(claim, field), []).append(claim.rank)
    return holders


def agree(store: Store, mine: Claim, timeout: timedelta) -> None:
    """Return once all ranks are known to agree. Collective over the job, blocking, bounded.

    Raises:
        DisagreementError: on all ranks that came; names what differs, with ranks and values.
        RendezvousTimeoutError: not all ranks came in time; names the missing ones.
        ReloadpgError: the store was lost meanwhile.
    """
    seconds = timeout.total_seconds()
    task = Task(lambda: _Exchange(store, mine, seconds).verdict(), "agree")
    if not task.wait(seconds + _SETTLE_S + _FAREWELL_S):
        raise _silent(mine, seconds)
    try:
        verdict, slot = task.result()
    except RuntimeError as error:
        if isinstance(error, ReloadpgError):
            raise
        raise ReloadpgError(
            f"init_distributed: rank {mine.rank} lost the store before the ranks had agreed: "
            f"{error}. No group was made. Rank 0, or the launcher's agent, has ended: see what it "
            f"reports, then start the job again."
        ) from error
    _conclude(verdict, slot, mine, seconds)


class _Exchange:
    def __init__(self, store: Store, mine: Claim, seconds: float) -> None:
        self._store = store
        self._mine = mine
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def verdict(self) -> tuple[dict[str, Any], int]:
        """The verdict, and the place of this rank in the order of arrival."""
        slot = self._store.add("arrivals", 1)
        self._store.set(f"claim/{slot}", json.dumps(asdict(self._mine)))
        if self._mine.rank == 0 and self._store.add("judges", 1) == 1:
            return self._judge(slot), slot
        if not self._wait("verdict", self._end + _SETTLE_S):
            raise _silent(self._mine, self._seconds)
        verdict = dict(json.loads(self._store.get("verdict")))
        self._store.set(f"read/{slot}", "1")
        return verdict, slot

    def _judge(self, mine: int) -> dict[str, Any]:
        claims: list[Claim] = []
        here: set[int] = set()
        end = self._end
        while len(here) < self._mine.world_size:
            if not self._wait(f"claim/{len(claims) + 1}", end):
                break
            claims.append(self._claim(len(claims) + 1))
            taken = claims[-1].rank in here
            here.add(claims[-1].rank)
            if end == self._end and (taken or _conflicts(claims[-1], self._mine)):
                end = min(self._end, time.monotonic() + _SETTLE_S)
        # Those that have come beside the expected ones: a rank with a larger world, or twice one.
        while self._store.check([f"claim/{len(claims) + 1}"]):
            claims.append(self._claim(len(claims) + 1))
        differences = find_differences(claims)
        here.update(claim.rank for claim in claims)
        missing = [rank for rank in range(self._mine.world_size) if rank not in here]
        if differences:
            verdict: dict[str, Any] = {"kind": "differ", "text": ". ".join(differences)}
        elif missing:
            verdict = {"kind": "missing", "ranks": missing, "arrived": len(here)}
        else:
            verdict = {"kind": "agreed", "arrived": len(claims)}
        self._store.set("verdict", json.dumps(verdict))
        if verdict["kind"] != "agreed":
            farewell = time.monotonic() + _FAREWELL_S
            for slot in range(1, len(claims) + 1):
                if slot != mine:
                    self._wait(f"read/{slot}", farewell)
        return verdict

    def _claim(self, slot: int) -> Claim:
        return Claim(**json.loads(self._store.get(f"claim/{slot}")))

    def _wait(self, key: str, end: float) -> bool:
        left = max(0.01, end - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            if not self._store.check([key]):  # raises if the store itself is gone
                return False
        return True


def _conflicts(newest: Claim, mine: Claim) -> bool:
    return any(
        getattr(newest, field) != getattr(mine, field)
        for field in ("world_size", "backend", "mesh_dims")
    )


def _conclude(verdict: Mapping[str, Any], slot: int, mine: Claim, seconds: float) -> None:
    if verdict["kind"] == "differ":
        raise DisagreementError(
            f"init_distributed: the ranks do not agree: {verdict['text']}. No group was made on "
            f"any rank. Start all ranks with the same launcher and arguments."
        )
    if verdict["kind"] == "missing":
        missing = list(verdict["ranks"])
        raise RendezvousTimeoutError(
            f"init_distributed: {verdict['arrived']} of {mine.world_size} ranks came within "
            f"{seconds:g} s; missing: rank {format_ranks(missing)}. No group was made. See what "
            f"those ranks report; raise init_timeout if they are only slow.",
            phase="agree",
            seconds=seconds,
            arrived=int(verdict["arrived"]),
            missing=missing,
        )
    if slot > int(verdict["arrived"]):
        raise DisagreementError(
            f"init_distributed: {verdict['arrived']} ranks have agreed without this process, "
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
