"""Work of each rank in the tests of recovery: a job, points to interfere at, and what was seen.

A *point* is a place in an operation, written ``operation.place``: ``offload.enter``,
``offload.callbacks``, ``offload.quiesced``, ``offload.group3`` (releasing the fourth group),
``offload.released``, ``reload.enter``, ``reload.group0`` (rebuilding WORLD), ``reload.rebuilt``,
``reload.callbacks``, ``reload.done``. A barrier's point is the moment before this rank arrives. A
recovery has ``recover.enter``, ``recover.agreed``, ``recover.group0``, ``recover.check0`` (the
canary of WORLD), ``recover.rebuilt``, ``recover.callbacks`` and ``recover.done``.
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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import faulty_gloo
import moments
import torch
import torch.distributed as dist
import worlds
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg.testing.simulated import Fault, clear_faults, inject

RING = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2, 3))
"""Overlapping subgroups; with WORLD, each rank is in four groups."""
BOUND = 4.0
ALLOWANCE = 60.0
"""Seconds past the bound within which every rank must have raised, on the busiest machine."""
PARALLELISM = int(os.environ.get("TEST_PARALLELISM", "1"))
"""How many groups the jobs release and create side by side. With 1, "while the fourth group is
released" is a moment; with 8, the others are being released as well: the tests hold for both."""
FAR = 100.0
"""A bound that no rank reaches, in seconds; who ends within ALLOWANCE did not wait for it."""

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


_extending: list[Callable[[], None]] = []

GROUP_EVENTS: dict[str, tuple[faulty_gloo.Moment, Fault]] = {
    "offload": ("shutdown", Fault("release", operation="shutdown")),
    "reload": ("create", Fault("create")),
    "recover": ("create", Fault("create")),
    "check": ("allreduce", Fault("collective", operation="allreduce")),
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
        """Whether the message names that rank as ``rank N`` or inside a range."""
        for listed in re.findall(r"[Rr]ank ((?:\d+(?:-\d+)?(?:, )?)+)", self.text):
            for part in filter(None, listed.split(", ")):
                low, _, high = part.partition("-")
                if int(low) <= rank <= int(high or low):
                    return True
        return False


@dataclass
class Job:
    """One rank's part of a job whose gloo groups are reloadable."""

    rank: int
    groups: list[Any] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        rank: int,
        *,
        subgroups: Sequence[Sequence[int]] = RING,
        bound: float = BOUND,
        backend: str = worlds.BACKEND,
        store: Any = None,
        size: int | None = None,
        parallelism: int = PARALLELISM,
    ) -> Job:
        faulty_gloo.register()
        reloadpg.install(
            backends={backend}, timeout=timedelta(seconds=bound), parallelism=parallelism
        )
        if store is None:
            worlds.init(backend)
        else:
            worlds.init(backend, store=store, rank=rank, world_size=size)
        job = cls(rank)
        for ranks in subgroups:
            group = dist.new_group(list(ranks))
            if rank in ranks and len(ranks) > 1:  # a group of one bypasses
                job.groups.append(group)
        worlds.barrier()
        return job

    @property
    def everything(self) -> list[Any]:
        return [dist.group.WORLD, *self.groups]

    def sums(self) -> bool:
        """Whether every group sums over its own members."""
        try:
            return worlds.sums_right(*self.everything)
        except reloadpg.GroupOffloadedError:
            return False

    def snapshot(self) -> dict[str, Any]:
        """What an operation that touched nothing must leave alone."""
        return {
            "states": [str(group.state) for group in self.everything],
            "generations": [group.generation for group in self.everything],
            "inner": [id(group.communicator) for group in self.everything],
            "job": reloadpg.status().generation,
        }

    def states(self) -> set[str]:
        return {str(group.state) for group in self.everything}

    def generations(self) -> set[int]:
        return {group.generation for group in self.everything}

    def refused(self) -> bool:
        """Whether every group refuses a collective."""
        for group in self.everything:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except reloadpg.GroupOffloadedError:
                continue
            return False
        return True

    def inner(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(group.communicator) for group in self.everything]

    def cycle(self) -> bool:
        """One offload and reload: new generations, old groups gone, right sums."""
        before, inner = self.generations(), self.inner()
        reloadpg.offload()
        gc.collect()
        gone = all(ref() is None for ref in inner)
        reloadpg.reload()
        risen = min(self.generations()) > max(before)
        return gone and self.sums() and self.states() == {"live"} and risen


def rose(before: set[int], after: set[int]) -> bool:
    return min(after) > max(before)


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


def interfere(point: str, action: Callable[[], object]) -> None:
    """Do something when this rank comes to a point for the first time.

    The groups of the points in a group are on the backend ``faulty``, or simulated.
    """
    operation, place = point.split(".")
    if place == "callbacks":
        register = reloadpg.on_offload if operation == "offload" else reloadpg.on_reload
        remove = register(lambda: (remove(), action()), name="interfering")
    elif place.startswith(("group", "check")):
        nth = int(place[5:]) + 1
        moment, fault = GROUP_EVENTS["check" if place.startswith("check") else operation]
        faulty_gloo.inject(moment, action, nth=nth)
        inject(replace(fault, action="call", nth=nth, call=lambda _: action()))
    else:
        if place in ("quiesced", "rebuilt"):  # barriers that are there only if a rank has callbacks
            register = reloadpg.on_offload if operation == "offload" else reloadpg.on_reload
            _extending.append(register(lambda: None, name="extending"))
        moments.at("arriving", action, barrier=point)


def signalling(number: int, error: BaseException) -> Callable[[], None]:
    """Return an action that sends this process a signal, whose handler raises an error.

    Called in the main thread, which handles the signal. The action waits for that in any other, as
    a blocked call does: nothing is done meanwhile.
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
    moments.restore()
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
