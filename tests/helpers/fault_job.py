"""A job of overlapping groups, fault injection, and the results of its calls.

A *point* is a place in an operation, written ``operation.place``: ``offload.enter``,
``offload.callbacks``, ``offload.group3`` (releasing the fourth group),
``offload.released``, ``reload.enter``, ``reload.group0`` (rebuilding WORLD),
``reload.done``. A barrier's point is the moment before this rank arrives. A
recovery has ``recover.enter``, ``recover.abort0`` (of the first communicator),
``recover.group0``, ``recover.check0`` (the canary of WORLD) and ``recover.done``. ``use`` is a
collective.
"""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import reloadpg
from helpers import worlds
from reloadpg.testing import run_ranks, simulated
from reloadpg.testing.faults import Fault, inject

RING = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2, 3))
"""Overlapping subgroups; with WORLD, each of four ranks is in four groups."""
TRIANGLE = ((0, 1), (1, 2), (0, 1, 2))
"""Overlapping subgroups of three ranks."""
BOUND = 6.0
"""A timeout that ranks reach, in seconds. A rank that stands still for five seconds does not."""
ALLOWANCE = 60.0
"""Seconds after the timeout within which every rank must have raised, also on a loaded machine."""
FAR = 100.0
"""A timeout that no rank reaches, in seconds; longer than ALLOWANCE."""
PATIENCE = timedelta(seconds=120)
"""The timeout of collectives: reached only if something hangs."""
PARALLELISM = int(os.environ.get("TEST_PARALLELISM", "1"))
"""The number of groups that scenarios release and create in parallel. With 1, only one group is in
progress at a point; with 8, all are."""
HELD = 8 << 20
"""Bytes of each simulated communicator."""

OFFLOAD_POINTS = (
    "offload.callbacks",
    "offload.enter",
    "offload.group0",
    "offload.group3",
    "offload.released",
)
RELOAD_POINTS = (
    "reload.enter",
    "reload.group0",
    "reload.group1",
    "reload.group3",
    "reload.done",
)
RECOVER_POINTS = (
    "recover.enter",
    "recover.group0",
    "recover.group3",
    "recover.check0",
    "recover.check3",
    "recover.done",
)

GROUP_EVENTS: dict[str, Fault] = {
    "offload.group": Fault("release", operation="shutdown"),
    "reload.group": Fault("create"),
    "recover.group": Fault("create"),
    "recover.abort": Fault("release", operation="abort"),
    "recover.check": Fault("collective", operation="allreduce"),
    "use": Fault("collective", operation="allreduce"),
}
"""The fault for each point in a group."""


class Injected(RuntimeError):
    """An error that a test injects."""


def fail() -> None:
    raise Injected("injected")


@dataclass
class Seen:
    """The result of a call on one rank."""

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


def attempt(call: Callable[[], Any]) -> Seen:
    """Call a function and return its result."""
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


class Job:
    """One rank's part of a job of overlapping groups.

    Args:
        backend: of all groups.
        subgroups: the ranks of each group beyond WORLD.
        timeout: of the library, in seconds.
        used: whether each group is used once; an unused group is not suspended.
        options: of ``install``.

    Attributes:
        groups: those of this rank: ``WORLD``, and ``g0`` for the first subgroup.
        ring: the last one.
    """

    def __init__(
        self,
        backend: str = worlds.BACKEND,
        *,
        subgroups: Sequence[Sequence[int]] = RING,
        timeout: float = FAR,
        used: bool = True,
        **options: Any,
    ) -> None:
        if backend == "sim":
            simulated.register()
            simulated.configure(bytes_per_communicator=HELD)
        reloadpg.install(timeout=timeout, **{"backends": {backend}, **options})
        self.rank = int(os.environ["RANK"])
        worlds.init(backend, timeout=PATIENCE)
        self.size = dist.get_world_size()
        self.groups: dict[str, Any] = {"WORLD": dist.group.WORLD}
        for number, ranks in enumerate(subgroups):
            name = f"g{number}"
            group = dist.new_group(list(ranks), timeout=PATIENCE, group_desc=name)
            if isinstance(group, reloadpg.ReloadableProcessGroup):  # it may be bypassed
                self.groups[name] = group
        if used:
            self.sums()
        self._first = {name: (id(one), one.group_name) for name, one in self.groups.items()}

    @property
    def ring(self) -> Any:
        return [*self.groups.values()][-1]

    def sums(self, *names: str) -> bool:
        """Whether an all-reduce on the named groups, by default all, sums over their members."""
        chosen = [group for name, group in self.groups.items() if not names or name in names]
        try:
            return worlds.sums_right(*chosen)
        except reloadpg.GroupOffloadedError:
            return False

    def snapshot(self) -> list[Any]:
        """The observable state, for comparison with that after an operation without effect."""
        groups = [
            (str(g.state), g.generation, id(g._managed.communicator)) for g in self.groups.values()
        ]
        return [*groups, reloadpg.status().generation]

    def states(self) -> set[str]:
        return {str(group.state) for group in self.groups.values()}

    def generations(self) -> set[int]:
        return {group.generation for group in self.groups.values()}

    def refused(self) -> bool:
        """Whether a collective raises on every group."""
        for group in self.groups.values():
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except reloadpg.GroupOffloadedError:
                continue
            return False
        return True

    def inner(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(group._managed.communicator) for group in self.groups.values()]

    def cycle(self) -> None:
        """Offload and reload; check generations, sums, and that the old communicators are freed."""
        before, inner = self.generations(), self.inner()
        reloadpg.offload()
        gc.collect()
        assert all(ref() is None for ref in inner)
        reloadpg.reload()
        self.assert_live()
        assert min(self.generations()) > max(before)

    def assert_live(self, generation: int | None = None) -> None:
        """Check the invariants after a completed operation.

        Objects and names are unchanged, all groups are live and sum over their members, and no
        recovery is requested.
        """
        for name, group in self.groups.items():
            assert (id(group), group.group_name) == self._first[name]
        assert self.states() == {"live"}
        assert self.sums()
        assert not reloadpg.recovery.recovery_requested()
        if generation is not None:
            assert (reloadpg.status().generation, self.generations()) == (generation, {generation})

    def meet(self, name: str) -> None:
        """Wait for all ranks on the store, without the library."""
        meet(name, self.size)

    def agree(self, name: str, value: object) -> None:
        """Check that all ranks have the same value. A rank does not wait for the others."""
        first = base_store().clone().compare_set(f"test/agreed/{name}", "", repr(value))
        assert first.decode() == repr(value)


def interfere(
    point: str,
    action: Callable[[], object],
    moment: Literal["before", "after"] = "before",
) -> None:
    """Call a function when this rank first reaches a point.

    Points in a group need simulated groups. ``after`` a barrier means that this rank has read its
    decision.
    """
    if point == "offload.callbacks":
        remove = reloadpg.on_offload(lambda: (remove(), action()))
    elif (event := point.rstrip("0123456789")) in GROUP_EVENTS:
        nth = int(point.removeprefix(event) or 0) + 1
        inject(replace(GROUP_EVENTS[event], action="call", nth=nth, call=lambda _: action()))
    else:
        fault = Fault("barrier", "call", operation=point, moment=moment, call=lambda _: action())
        inject(fault)


def signalling(number: int, error: BaseException) -> Callable[[], None]:
    """Return an action that sends this process a signal, whose handler raises an error.

    Called in the main thread, which runs the handler. In another thread, the action waits for the
    handler, as a blocked call does.
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def await_death(pid: int) -> None:
    """Wait until a process has ended."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        assert select.select([process], [], [], PATIENCE.total_seconds())[0]
        os.close(process)


def survivors(
    program: Callable[..., Any], size: int, *args: Any, dead: int, store: Any = "parent"
) -> dict[int, Any]:
    """Run a program in which one rank is killed; return the results of the others, by rank."""
    outcomes = run_ranks(program, size, args=args, timeout=280, check=False, store=store)
    assert outcomes[dead].signal == signal.SIGKILL
    others = [one for one in outcomes if one.rank != dead]
    assert [one.exception for one in others] == [None] * (size - 1)
    return {one.rank: one.result for one in others}


def meet(name: str, size: int, seconds: float = 120.0, store: Any = None) -> None:
    """Wait for all ranks on the given store, by default the job's, without the library."""
    store = base_store().clone() if store is None else store
    if store.add(f"test/{name}", 1) == size:
        store.set(f"test/{name}/all", "1")
    store.wait([f"test/{name}/all"], timedelta(seconds=seconds))


def base_store() -> Any:
    """The default group's store without its prefixes."""
    store = c10d._world.pg_map[dist.group.WORLD][1]
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def eventually(condition: Callable[[], object]) -> bool:
    """Wait up to ``PATIENCE`` for a condition; return whether it holds."""
    end = time.monotonic() + PATIENCE.total_seconds()
    while not (found := bool(condition())) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def join_operations() -> None:
    """Wait until all operations of this process that run in threads have ended."""
    for thread in threading.enumerate():
        # An interrupt in `start` can leave a thread that never begins.
        if thread.name.startswith("reloadpg-") and not thread.daemon and thread.ident is not None:
            thread.join(PATIENCE.total_seconds())


def all_reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def strategies(report: Any) -> dict[str, str]:
    """The strategy of each group, by its name in :attr:`Job.groups`."""
    return {group.desc.replace("default_pg", "WORLD"): group.strategy for group in report.groups}


def reasons(report: Any) -> dict[str, str]:
    """The reason for each group's strategy, by its name in :attr:`Job.groups`."""
    return {group.desc.replace("default_pg", "WORLD"): group.reason for group in report.groups}
