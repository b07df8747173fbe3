"""What happens when a group is created: the wrappers of the three creating functions.

Each lets torch create the group, and then, if the policy selects it, puts a proxy in its place.
A group that is not selected, and the value that a non-member gets, are returned as torch made
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from . import c10d
from .construction import (
    WORLD_ORDER,
    Call,
    Construction,
    Order,
    WorldConstruction,
    is_verbatim,
    split_order,
    subgroup_order,
    verbatim,
)
from .errors import ReloadpgError
from .group import ReloadableProcessGroup
from .registry import Job, registry

__all__ = ["WRAPPERS", "adopt_world"]

Wrapped = Callable[..., Any]


def _new_group(wrapped: Wrapped, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_verbatim():
        return wrapped(*args, **kwargs)
    call = Call.capture(wrapped, args, kwargs)
    made, names = _create(call)
    name = names[-1] if names else ""
    return _adopt(call, made, name, lambda: subgroup_order(name))


def _split_group(wrapped: Wrapped, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_verbatim():
        return wrapped(*args, **kwargs)
    # Torch reads None as the default group, which a record that lives in the job must not keep.
    world = c10d.world()
    call = Call.capture(
        wrapped,
        tuple(None if value is world else value for value in args),
        {key: None if value is world else value for key, value in kwargs.items()},
    )
    made, names = _create(call)
    parent = cast(ProcessGroup, call.given.get("parent_pg") or world)
    name = names[-1] if names else ""
    return _adopt(call, made, name, lambda: _next_split(parent))


def _init_process_group(
    wrapped: Wrapped, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if is_verbatim():
        return wrapped(*args, **kwargs)
    call = Call.capture(wrapped, args, kwargs)
    with verbatim():
        result = wrapped(*call.args, **call.kwargs)
    adopt_world(call)
    return result


WRAPPERS: dict[str, Callable[..., Any]] = {
    "new_group": _new_group,
    "split_group": _split_group,
    "init_process_group": _init_process_group,
}


def _create(call: Call) -> tuple[Any, list[str]]:
    """Let torch create the group; also the names that it gave meanwhile."""
    world = c10d.world()
    with ExitStack() as stack:
        stack.enter_context(verbatim())
        names = stack.enter_context(c10d.observed_names())
        if isinstance(world, ReloadableProcessGroup) and not world.is_live:
            # An offloaded WORLD has no communicator to split from: create a fresh one.
            c10d.forget_parent(call.given.get("pg_options"))
            stack.enter_context(world.solitary())
        return call(), names


def _adopt(call: Call, made: Any, name: str, order: Callable[[], Order]) -> Any:
    options = registry.options
    if options is None or isinstance(made, ReloadableProcessGroup):
        return made
    if c10d.is_non_member(made):
        if name and _more_than_members_take_part(call):
            place = order()
            _job().shared[place] = Construction(call, name, (), "", {}, (), place)
        return made
    group = cast(ProcessGroup, made)
    devices = c10d.device_backends(group)
    # One part of a split may be too small for the policy while another one is not.
    wanted = options.policy.selected(devices, sys.maxsize)
    construction = Construction(
        call,
        c10d.name_of(group),
        c10d.ranks_of(group),
        c10d.backend_of(group),
        devices,
        wanted,
        order(),
    )
    if wanted and _more_than_members_take_part(call):
        _job().shared[construction.order] = construction
    selected = options.policy.selected(devices, group.size())
    return _install_proxy(group, construction) if selected else group


def _install_proxy(group: ProcessGroup, construction: Construction) -> ReloadableProcessGroup:
    proxy = ReloadableProcessGroup(group, construction)
    c10d.take_place(group, proxy)
    return proxy


def _more_than_members_take_part(call: Call) -> bool:
    """Whether torch wants ranks in the replay that are no members of the group."""
    if call.function.__name__ == "split_group":
        return True
    if call.given.get("use_local_synchronization", False):
        return False
    world = c10d.world()
    return c10d.barrier_after_creation() or (
        world is not None and world.bound_device_id is not None
    )


def _job() -> Job:
    job = registry.job("new_group")
    if job is None:
        raise ReloadpgError("a group was created without a default group; this is a bug")
    return job


def _next_split(parent: ProcessGroup) -> Order:
    job = _job()
    index = job.splits.get(parent, 0)
    job.splits[parent] = index + 1
    if isinstance(parent, ReloadableProcessGroup):
        return split_order(parent.construction.order, index)
    if parent is c10d.world():
        return split_order(WORLD_ORDER, index)
    return split_order(subgroup_order(c10d.name_of(parent)), index)


def adopt_world(call: Call | None) -> ReloadableProcessGroup | None:
    """Make the default group reloadable if the policy selects it. Local, idempotent.

    Args:
        call: the captured ``init_process_group``; None when it ran before ``install``, in which
            case what it was given is read from the live group.
    """
    options = registry.options
    world = c10d.world()
    if options is None or world is None or isinstance(world, ReloadableProcessGroup):
        return None
    devices = c10d.device_backends(world)
    selected = options.policy.selected(devices, world.size()) if options.policy.world else ()
    if not selected:
        return None
    backend = c10d.backend_of(world)
    if call is None:
        call = Call(c10d.original("init_process_group"), (), {})
        given: dict[str, Any] = {
            "pg_options": c10d.options_of(world, selected),
            "timeout": next(iter(c10d.get_timeouts(world, selected).values()), None),
        }
    else:
        given = call.given
    timeout: timedelta = given.get("timeout") or c10d.default_timeout(backend)
    device: torch.device | None = world.bound_device_id
    construction = WorldConstruction(
        call,
        c10d.name_of(world),
        c10d.ranks_of(world),
        backend,
        devices,
        selected,
        WORLD_ORDER,
        store=c10d.root_store(world),
        rank=world.rank(),
        options=given.get("pg_options"),
        timeout=timeout,
        device=device,
        desc=str(world.group_desc),
    )
    proxy = _install_proxy(world, construction)
    registry.job("init_process_group")  # its connection to the store is made meanwhile
    return proxy
