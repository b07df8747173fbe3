"""An offload and a reload before every collective phase of a test.

A *phase* begins with a call of one of torch.distributed's collective functions that

- is made by the body's own thread, and not by another collective (``all_gather_object`` calls
  ``all_gather``) or in a block that coalesces operations;
- is on a group of all ranks, WORLD first of all; with ``every_group=True`` on any group;
- finds no operation under way: every asynchronous one was waited for with ``wait()``.

A synchronous collective is thus a phase by itself; an asynchronous one opens a phase that lasts
until everything started in it was waited for. Sends and receives belong to the phase they are in
and begin none.

What is required of the test: all ranks begin the same phases in the same order, since an offload
is collective. With the default, ranks may do as they like on smaller groups; with
``every_group=True`` they may not. Collectives that C++ starts (DDP's in the backward pass,
functional collectives) are not seen: call the fixture ``reload_point`` where they begin. A rank
that begins a phase alone fails with the library's error that names the missing ranks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import wrapt
from torch.distributed import Work

import reloadpg
from reloadpg import c10d

from ._plugin_marks import PhasesMark

__all__ = ["COLLECTIVES", "POINT_TO_POINT", "Phases", "reloading"]

COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
"""Public functions of torch.distributed that begin phases; what the installed torch lacks is
left out."""

POINT_TO_POINT = ("batch_isend_irecv", "irecv", "isend")
"""Functions whose operations are waited for, but begin no phase."""

_UNUSABLE = frozenset({"fake", "undefined"})


@contextmanager
def reloading(mark: PhasesMark, timeout: float) -> Iterator[Callable[[], None]]:
    """Reload before each phase within this block, of a process that ends with it.

    Yields:
        A function that reloads where it is called.

    Raises:
        AssertionError: the block passed and nothing was ever offloaded in it.
    """
    phases = Phases(mark, timeout)
    phases.watch()
    yield phases.point
    if phases.cycles == 0:
        groups = "there is no reloadable group" if phases.points else "no phase began"
        raise AssertionError(
            f"the mark reload_each_phase had nothing to reload: {groups}, so the run was the same "
            "as the one without. Use a collective of torch.distributed on all ranks, wait for "
            "asynchronous ones, or call the fixture reload_point."
        )


class Phases:
    """The phases of one rank.

    Attributes:
        points: places at which an offload was asked for.
        cycles: those of them at which groups were released.
    """

    def __init__(self, mark: PhasesMark, timeout: float) -> None:
        self.points = self.cycles = 0
        self._mark = mark
        self._timeout = timedelta(seconds=timeout / 2)
        self._thread = threading.get_ident()
        self._depth = 0
        self._pending: set[_WatchedWork] = set()

    def watch(self) -> None:
        """Put wrappers over the functions, for the life of the process. Not idempotent."""
        for name in (*COLLECTIVES, *POINT_TO_POINT, "init_process_group"):
            original = getattr(dist, name, None)
            if original is None:
                continue
            around = self._initialize if name == "init_process_group" else self._call
            wrapper = wrapt.FunctionWrapper(original, around)
            for module in c10d.creator_modules():
                if vars(module).get(name) is original:
                    setattr(module, name, wrapper)

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
        options: dict[str, Any] = {"backends": c10d.known_backends() - _UNUSABLE}
        if self._mark.options is not None:
            options = dict(self._mark.options)
        reloadpg.install(**{"timeout": self._timeout, **options})
        return dist.init_process_group(*args, **kwargs)  # by way of what was installed

    def _call(
        self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._depth or threading.get_ident() != self._thread:
            return wrapped(*args, **kwargs)
        if wrapped.__name__ in COLLECTIVES and self._begins(_group_of(wrapped, args, kwargs)):
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
        if self._mark.every_group or group is None or group is world:
            return True
        return isinstance(group, dist.ProcessGroup) and group.size() == dist.get_world_size()

    def _watched(self, work: Work) -> Work:
        watched = _WatchedWork(work, self._pending.discard)
        self._pending.add(watched)
        return watched


def _group_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "group" in kwargs:
        return kwargs["group"]
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get("group")
    except TypeError:
        return None  # torch says what is wrong with the call


class _WatchedWork(Work):
    """A Work that says when it was waited for."""

    def __init__(self, work: Work, waited: Callable[[_WatchedWork], object]) -> None:
        super().__init__()
        self.work = work
        self._waited = waited

    __hash__ = object.__hash__


def _forwarding(name: str, *, ends: bool) -> Callable[..., Any]:
    def method(self: _WatchedWork, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.work, name)(*args, **kwargs)
        if ends:
            self._waited(self)
        return result

    method.__name__ = name
    return method


for _name in dir(Work):
    if not _name.startswith("_"):
        setattr(_WatchedWork, _name, _forwarding(_name, ends=_name in ("wait", "synchronize")))
