"""Checks around the body of a test: for leaked groups, and with reloads between phases.

An offload and a reload come before each collective *phase*. A phase begins with a call of one of
torch.distributed's collective functions that

- comes from the thread of the body, and not from another collective (``all_gather_object`` calls
  ``all_gather``) or from a block that coalesces operations;
- is on a group of all ranks, such as WORLD; with ``every_group=True`` on any group;
- starts while no operation is running: ``wait()`` was called for every asynchronous one.

So a synchronous collective is a phase by itself; an asynchronous one opens a phase that lasts until
all operations started in it were waited for. Sends and receives never begin a phase.

All ranks of the test must begin the same phases in the same order, since an offload is collective.
By default, this does not apply to smaller groups; with ``every_group=True`` it does. Collectives
that C++ starts (DDP's in the backward pass, functional collectives) are not detected: call the
fixture ``reload_point`` before them. A rank that begins a phase alone fails with the library's
error that names the missing ranks.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import wrapt
from torch.distributed import Work

import reloadpg
from reloadpg import c10d
from reloadpg.groups.proxy import ReloadableProcessGroup

from ._plugin_marks import PHASES, POINT, PhasesMark

_SIM_BYTES = 1 << 20
_NUMBERS = 64
"""Minimum number of names to look up: torch uses numbers as names of most groups."""

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
"""Functions of torch.distributed that begin phases; some do not exist in all versions."""
_POINT_TO_POINT = ("batch_isend_irecv", "irecv", "isend")
"""Functions whose operations are waited for, but begin no phase."""
_UNUSABLE = frozenset({"fake", "undefined"})


# ---------------------------------------------------------------------------------------------
# leaked groups


@contextmanager
def _simulated_accelerator(**settings: Any) -> Iterator[Any]:
    """Register and set up the simulated accelerator; check and undo everything at the end."""
    from reloadpg.testing import simulated

    simulated.register()
    with simulated.configured(**{"bytes_per_communicator": _SIM_BYTES, **settings}):
        before, leaked = _communicators(), simulated.stats().leaked
        try:
            yield simulated
            gc.collect()
            left = [name for serial, name in _communicators().items() if serial not in before]
            dropped = simulated.stats().leaked - leaked
        finally:
            simulated.clear_faults()
    problems = []
    if left:
        problems.append(f"{len(left)} communicators still exist: {', '.join(left)}")
    if dropped:
        problems.append(f"{dropped} communicators were dropped without shutdown or abort")
    if problems:
        raise AssertionError(
            f"the simulated accelerator: {'; '.join(problems)}. Destroy the groups that the "
            "test creates with torch.distributed.destroy_process_group()."
        )


def _existing(also: Iterable[str] = ()) -> dict[tuple[str, object], str]:
    """The process groups of this process, as text by place and name. Runs a garbage collection.

    ``also`` are further names to look up in the C++ registry, which cannot be listed.
    """
    gc.collect()
    groups = {c10d.name_of(group): _text(group) for group in c10d.known_groups()}
    proxies = {
        one.group_name
        for one in gc.get_objects()
        if type(one) is ReloadableProcessGroup and one.state.value != "destroyed"
    }
    registered = c10d.registered({*groups, *proxies, *also, *map(str, range(_NUMBERS))})
    found: dict[tuple[str, object], str] = {}
    for name, text in groups.items():
        found["table", name] = f"group {name!r} ({text}) is still in c10d's tables"
    for name in sorted(registered):
        found["registry", name] = f"C++ still finds a group by the name {name!r}"
    for name in sorted(proxies):
        found["reloadable", name] = f"reloadable group {name!r} is not destroyed"
    for name in _communicators().values():
        found["simulated", name.partition("@")[0]] = (
            f"the simulated accelerator still holds a communicator of group {name!r}"
        )
    return found


@contextmanager
def _assert_no_group_leaks() -> Iterator[None]:
    """Check that this block, if it passes, leaves no process group. Local."""
    before, sizes = _existing(), c10d.table_sizes()
    yield
    known = {str(name) for place, name in before if place == "table"}
    now = _existing(also=known)
    # A group that existed may have become reloadable or have connected since.
    left = [text for key, text in now.items() if key not in before and key[1] not in known]
    left += [
        f"c10d's table {table} has {size} entries, {sizes.get(table, 0)} before"
        for table, size in c10d.table_sizes().items()
        if size > sizes.get(table, 0)
    ]
    if left:
        lines = "\n".join(f"  {one}" for one in left)
        raise AssertionError(
            f"process groups were left behind:\n{lines}\nDestroy them with "
            "torch.distributed.destroy_process_group(group); without an argument it destroys all."
        )


@contextmanager
def _around_test() -> Iterator[Any]:
    with _assert_no_group_leaks():
        yield _assert_no_group_leaks


CONTEXTS: dict[str, Callable[..., AbstractContextManager[Any]]] = {
    "simulated_accelerator": _simulated_accelerator,
    "assert_no_group_leaks": _around_test,
}
"""Implementations of the fixtures, in the test's process or in each rank."""


def _communicators() -> dict[int, str]:
    simulated = sys.modules.get("reloadpg.testing.simulated")
    return {} if simulated is None else {group.serial: group.name for group in simulated.groups()}


def _text(group: Any) -> str:
    kind = "reloadable, " if isinstance(group, ReloadableProcessGroup) else ""
    desc = c10d.desc_of(group)
    if desc not in ("", "undefined"):
        kind = f"{desc!r}, {kind}"
    ranks = c10d.ranks_of(group)
    members = list(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return f"{kind}{c10d.backend_of(group)}, ranks {members}"


# ---------------------------------------------------------------------------------------------
# reloads between phases


@contextmanager
def reloading(
    mark: PhasesMark | None, timeout: float, *, points: bool
) -> Iterator[Callable[[], None]]:
    """Reload before each phase within this block. The patches remain for the life of the process.

    Yields a function that offloads and reloads. Raises ``AssertionError`` if the block passed but
    nothing was offloaded. The arguments are the mark, the timeout of the test, and whether the test
    uses ``reload_point``; without a mark, only its calls reload.
    """
    phases = _Phases(mark or PhasesMark(), timeout)
    phases.watch(*(() if mark is None else (*_COLLECTIVES, *_POINT_TO_POINT)))
    yield phases.called
    if points and phases.calls == 0:
        raise AssertionError(
            f"the fixture {POINT} was not called, so nothing was reloaded there. Call it on all "
            "ranks, after the groups are created."
        )
    if phases.cycles == 0:
        what = f"the mark {PHASES}" if mark is not None else f"the fixture {POINT}"
        groups = "there is no reloadable group" if phases.points else "no phase began"
        raise AssertionError(
            f"{what} had nothing to reload: {groups}, so this run was the same as one without "
            "reloads. Use a collective of torch.distributed on all ranks, wait for asynchronous "
            f"ones, or call the fixture {POINT}."
        )


class _Phases:
    """The phases of one rank: points at which it reloads, and cycles that released groups."""

    def __init__(self, mark: PhasesMark, timeout: float) -> None:
        self.calls = self.points = self.cycles = 0
        self._every_group = mark.every_group
        self._options = mark.options
        self._timeout = timedelta(seconds=timeout / 2)
        self._thread = threading.get_ident()
        self._depth = 0
        self._pending: set[_WatchedWork] = set()

    def watch(self, *functions: str) -> None:
        """Wrap these functions and the bring-up, for the life of the process. Not idempotent."""
        for name in (*functions, "init_process_group"):
            original = getattr(dist, name, None)
            if original is None:
                continue
            around = self._initialize if name == "init_process_group" else self._call
            wrapper = wrapt.FunctionWrapper(original, around)
            for module in c10d.creator_modules():
                if vars(module).get(name) is original:
                    setattr(module, name, wrapper)

    def called(self) -> None:
        """Do what ``reload_point()`` does."""
        if not dist.is_initialized():
            raise AssertionError(
                f"{POINT}() was called without a default group; nothing was reloaded. Call it "
                "after torch.distributed.init_process_group()."
            )
        self.calls += 1
        self.point()

    def point(self) -> None:
        """Offload and reload here, if there is a job. Collective over all ranks."""
        if not dist.is_initialized():
            return
        self.points += 1
        self._depth += 1
        try:
            self.cycles += reloadpg.offload().changed
            reloadpg.reload()
        finally:
            self._depth -= 1

    def _initialize(
        self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if reloadpg.is_installed():
            return wrapped(*args, **kwargs)
        options = self._options
        if options is None:
            options = {"backends": c10d.known_backends() - _UNUSABLE}
        reloadpg.install(**{"timeout": self._timeout, **options})
        return dist.init_process_group(*args, **kwargs)  # calls the installed wrapper

    def _call(
        self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._depth or threading.get_ident() != self._thread:
            return wrapped(*args, **kwargs)
        if wrapped.__name__ in _COLLECTIVES and self._begins(_group_of(wrapped, args, kwargs)):
            self.point()
        self._depth += 1
        try:
            result = wrapped(*args, **kwargs)
        finally:
            self._depth -= 1
        if isinstance(result, Work):
            return self._watched(result)
        if isinstance(result, list):
            return [self._watched(one) if isinstance(one, Work) else one for one in result]
        return result

    def _begins(self, group: Any) -> bool:
        if self._pending or not dist.is_initialized():
            return False
        world = c10d.world()
        if c10d.is_coalescing(world if group is None else group):
            return False
        if self._every_group or group is None or group is world:
            return True
        return isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size()

    def _watched(self, work: Work) -> _WatchedWork:
        watched = _WatchedWork(work, self._pending.discard)
        self._pending.add(watched)
        return watched


def _group_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "group" in kwargs:
        return kwargs["group"]
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get("group")
    except TypeError:
        return None  # torch raises the error


class _WatchedWork(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A Work with a callback for its ``wait()``."""

    def __init__(self, work: Work, waited: Callable[[_WatchedWork], object]) -> None:
        super().__init__(work)
        self._self_waited = waited

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__.wait(*args, **kwargs)
        self._self_waited(self)
        return result

    def synchronize(self) -> None:
        self.__wrapped__.synchronize()
        self._self_waited(self)
