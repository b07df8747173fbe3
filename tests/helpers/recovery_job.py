"""Work of each rank in the tests of recovery: a job, points to interfere at, and what was seen.

A *point* is a place in an operation, written ``operation.place``: ``offload.enter``,
``offload.callbacks``, ``offload.quiesced``, ``offload.group3`` (releasing the fourth group),
``offload.released``, ``reload.enter``, ``reload.group0`` (rebuilding WORLD), ``reload.rebuilt``,
``reload.callbacks``, ``reload.done``. A barrier's point is the moment before this rank arrives. A
recovery has ``recover.enter``, ``recover.agreed``, ``recover.group0``, ``recover.check0`` (the
canary of WORLD), ``recover.rebuilt``, ``recover.callbacks`` and ``recover.done``. Simulated groups
that are suspended have ``offload.suspend0`` and ``reload.resume0``.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import faulty_gloo
import torch
import torch.distributed as dist
import worlds
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg.testing import simulated
from reloadpg.testing.simulated import Fault, clear_faults, inject

RING = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2, 3))
"""Overlapping subgroups; with WORLD, each rank is in four groups."""
BOUND = 4.0
"""A timeout in seconds that ranks reach."""
ALLOWANCE = 60.0
"""Seconds past the timeout within which every rank must have raised, on the busiest machine."""
FAR = 100.0
"""A timeout in seconds that no rank reaches: one that ends within ALLOWANCE did not wait for it."""
PARALLELISM = int(os.environ.get("TEST_PARALLELISM", "1"))
"""How many groups the jobs release and create in parallel. With 1, "while the fourth group is
released" is a moment; with 8, the others are being released as well: the tests hold for both."""

OFFLOAD_POINTS = (
    "offload.enter",
    "offload.callbacks",
    "offload.quiesced",
    "offload.group0",
    "offload.group3",
    "offload.released",
)
RELOAD_POINTS = (
    "reload.enter",
    "reload.group0",
    "reload.group1",
    "reload.group3",
    "reload.rebuilt",
    "reload.callbacks",
    "reload.done",
)
RECOVER_POINTS = (
    "recover.enter",
    "recover.agreed",
    "recover.group0",
    "recover.group3",
    "recover.check0",
    "recover.check3",
    "recover.rebuilt",
    "recover.callbacks",
    "recover.done",
)

_extending: list[Callable[[], None]] = []

GROUP_EVENTS: dict[str, tuple[faulty_gloo.Moment | None, Fault]] = {
    "offload.group": ("shutdown", Fault("release", operation="shutdown")),
    "reload.group": ("create", Fault("create")),
    "recover.group": ("create", Fault("create")),
    "recover.check": ("allreduce", Fault("collective", operation="allreduce")),
    "offload.suspend": (None, Fault("suspend")),
    "reload.resume": (None, Fault("resume")),
}
"""What a point in a group is on the backend ``faulty``, and on the simulated accelerator."""


@dataclass
class Seen:
    """How a call ended on one rank."""

    kind: str
    text: str
    seconds: float
    missing: tuple[int, ...] = ()
    rank: int = -1
    cause: str = ""

    def names(self, rank: int) -> bool:
        """Whether the message names that rank as ``rank N`` or within ``ranks 0, 2-3``."""
        for listed in re.findall(r"[Rr]anks? ((?:\d+(?:-\d+)?(?:, )?)+)", self.text):
            for part in filter(None, listed.split(", ")):
                low, _, high = part.partition("-")
                if int(low) <= rank <= int(high or low):
                    return True
        return False


class Job:
    """One rank's part of a job of overlapping groups, WORLD first.

    Args:
        rank: this rank.
        subgroups: the ranks of each group beyond WORLD.
        bound: the timeout of the library, in seconds.
        backend: of all groups.
        backends: which backends are reloadable; None for that one.
        store: what the ranks meet on, with the number of ranks; None for the environment's.
        timeout: of collectives; None for torch's default.
        options: of ``install``.
    """

    def __init__(
        self,
        rank: int,
        *,
        subgroups: Sequence[Sequence[int]] = RING,
        bound: float = BOUND,
        backend: str = worlds.BACKEND,
        backends: set[str] | None = None,
        store: tuple[Any, int] | None = None,
        parallelism: int = PARALLELISM,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        faulty_gloo.register()
        if backend == "sim":
            simulated.register()
        reloadpg.install(
            backends=backends or {backend}, timeout=bound, parallelism=parallelism, **options
        )
        limit = {} if timeout is None else {"timeout": timeout}
        met = {} if store is None else {"store": store[0], "rank": rank, "world_size": store[1]}
        worlds.init(backend, **met, **limit)
        self.rank = rank
        self.groups: list[Any] = [dist.group.WORLD]
        for ranks in subgroups:
            group = dist.new_group(list(ranks), **limit)
            if rank in ranks and len(ranks) > 1:  # a group of one bypasses
                self.groups.append(group)
        self.sums()  # a group that was never used is not suspended
        self.names = [group.group_name for group in self.groups]
        self.ids = [id(group) for group in self.groups]

    def sums(self) -> bool:
        """Whether every group sums over its own members."""
        try:
            return worlds.sums_right(*self.groups)
        except reloadpg.GroupOffloadedError:
            return False

    def snapshot(self) -> list[Any]:
        """What an operation that touched nothing must not change."""
        groups = [(str(g.state), g.generation, id(g.communicator)) for g in self.groups]
        return [*groups, reloadpg.status().generation]

    def states(self) -> set[str]:
        return {str(group.state) for group in self.groups}

    def generations(self) -> set[int]:
        return {group.generation for group in self.groups}

    def same(self) -> bool:
        """Whether the groups are the objects that they were, under the same names."""
        names = [group.group_name for group in self.groups]
        return [id(group) for group in self.groups] == self.ids and names == self.names

    def refused(self) -> bool:
        """Whether every group refuses a collective."""
        for group in self.groups:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except reloadpg.GroupOffloadedError:
                continue
            return False
        return True

    def inner(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(group.communicator) for group in self.groups]

    def cycle(self) -> bool:
        """One offload and reload: new generations, old groups gone, right sums."""
        before, inner = self.generations(), self.inner()
        reloadpg.offload()
        gc.collect()
        gone = all(ref() is None for ref in inner)
        reloadpg.reload()
        risen = min(self.generations()) > max(before)
        return gone and self.sums() and self.states() == {"live"} and risen


def attempt(call: Callable[[], Any]) -> Seen:
    """Call something and say how it ended."""
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:
        return Seen(
            type(error).__name__,
            str(error),
            time.monotonic() - begun,
            tuple(getattr(error, "missing", ())),
            getattr(error, "rank", -1),
            repr(error.__cause__),
        )
    return Seen("", "", time.monotonic() - begun)


def interfere(
    point: str,
    action: Callable[[], object],
    moment: Literal["before", "after"] = "before",
) -> None:
    """Do something when this rank comes to a point for the first time.

    The groups of the points in a group are on the backend ``faulty``, or simulated. ``after`` a
    barrier, this rank has read its decision.
    """
    operation, place = point.split(".")
    register = reloadpg.on_offload if operation == "offload" else reloadpg.on_reload
    if place == "callbacks":
        remove = register(lambda: (remove(), action()), name="interfering")
    elif (event := point.rstrip("0123456789")) in GROUP_EVENTS:
        nth = int(point.removeprefix(event)) + 1
        at, fault = GROUP_EVENTS[event]
        if at is not None:
            faulty_gloo.inject(at, action, nth=nth)
        inject(replace(fault, action="call", nth=nth, call=lambda _: action()))
    else:
        if place in ("quiesced", "rebuilt") or moment == "after":
            # Barriers that are there only if a rank has callbacks.
            _extending.append(register(lambda: None, name="extending"))
        fault = Fault("barrier", "call", operation=point, moment=moment, call=lambda _: action())
        inject(fault)


def signalling(number: int, error: BaseException) -> Callable[[], None]:
    """Return an action that sends this process a signal, whose handler raises an error.

    Called in the main thread, which handles the signal. The action waits for that in any other, as
    a blocked call does.
    """
    handled = threading.Event()

    def handle(*_: object) -> None:
        handled.set()
        raise error

    def action() -> None:
        os.kill(os.getpid(), number)
        if threading.current_thread() is not threading.main_thread():
            handled.wait(ALLOWANCE)

    signal.signal(number, handle)
    return action


def backend_for(point: str) -> str:
    """Return the backend of a job in which this point is interfered with."""
    return faulty_gloo.NAME if "group" in point or "check" in point else worlds.BACKEND


def stop_interfering() -> None:
    """Undo what :func:`interfere` did, but for callbacks."""
    faulty_gloo.clear()
    clear_faults()
    while _extending:
        _extending.pop()()


def meet(name: str, size: int, seconds: float = 120.0) -> None:
    """Wait for all ranks, by other means than the library's."""
    store = base_store().clone()
    if store.add(f"test/{name}", 1) == size:
        store.set(f"test/{name}/all", "1")
    store.wait([f"test/{name}/all"], timedelta(seconds=seconds))


def base_store() -> Any:
    """The store beneath all prefixes."""
    store = c10d._world.pg_map[dist.group.WORLD][1]
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
