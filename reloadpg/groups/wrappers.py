"""Wrappers of torch's creating functions: each calls torch, then replaces the group by a proxy.

A group that is not selected, and the value for non-members, are returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from ..c10d import backends, creation, tables
from ..texts import warn
from .creation import WORLD_ORDER, Call, Construction, Defaults, parameters_of, thread, verbatim
from .offloaded import Offloaded
from .proxy import ReloadableProcessGroup
from .registry import registry
from .selection import IN_NO_SET, Bypass
from .sets import TRAINER

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
"""Takes one of torch's functions and returns the function that replaces it."""

_UNCHANGED = frozenset({list, tuple, range, type(None)})
"""Types of ``ranks`` that torch does not change; each can be read twice."""


def wrappers(after_world: Callable[[], object] = lambda: None) -> dict[str, Wrapper]:
    """Return the wrappers that the installed torch needs; a dotted name is in another module.

    ``after_world`` is called when a new default group is reloadable.
    """
    needed: dict[str, Wrapper] = {
        "new_group": _new_group,
        creation.COMPILERS_NEW_GROUP: _new_group,
        "split_group": _split_group,
        "init_process_group": partial(_init_process_group, after_world),
        **{name: partial(_outside_tables, name) for name in creation.creators_outside_tables()},
    }
    if creation.batching_refuses_subclasses():
        needed["batch_isend_irecv"] = _batch_isend_irecv
    return needed


def _new_group(wrapped: Function) -> Function:
    # Every rank makes this call for every group of the job, so it must add little.
    parameters_of(wrapped)  # fill the cache before the first call
    outside = tables.NON_MEMBERS

    def new_group(*args: Any, **kwargs: Any) -> Any:
        if thread.verbatim:
            return wrapped(*args, **kwargs)
        ranks = args[0] if args else kwargs.get("ranks")
        world = tables.world()
        call = None
        thread.verbatim = True
        try:
            # The placeholder: WORLD is not live, or an operation has exclusive use of it.
            if type(world) is ReloadableProcessGroup and type(world._inner) is Offloaded:
                call = Call.capture(wrapped, args, kwargs)
                group = _create_alone(call)
            elif type(ranks) in _UNCHANGED:  # non-members copy nothing
                group = wrapped(*args, **kwargs)
            else:
                call = Call.capture(wrapped, args, kwargs)
                group = call()
        finally:
            thread.verbatim = False
        if group in outside:
            return group
        return _manage(group, call, wrapped, args, kwargs)

    return new_group


def new_plain_group(*args: Any, **kwargs: Any) -> Any:
    """Create a group that stays as torch makes it, with the arguments of ``new_group``.

    Collective as ``new_group`` is. The caller wants it so: it bypasses, without a warning at each
    offload.
    """
    with verbatim():  # torch's function calls another patched function
        group = creation.original("new_group")(*args, **kwargs)
    if not tables.is_non_member(group):
        registry.without_set.add(group)
    return group


def _split_group(wrapped: Function) -> Function:
    def split_group(*args: Any, **kwargs: Any) -> Any:
        if thread.verbatim:
            return wrapped(*args, **kwargs)
        call = Call.capture(wrapped, args, kwargs)
        with verbatim():
            group = call()
        if tables.is_non_member(group):
            return group
        # The replay needs no parent: the record must not keep one alive, nor WORLD's store.
        return _manage(group, call.replacing("parent_pg", None), wrapped, args, kwargs)

    return split_group


def _init_process_group(after_world: Callable[[], object], wrapped: Function) -> Function:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if thread.verbatim:
            return wrapped(*args, **kwargs)
        call = Call.capture(wrapped, args, kwargs)
        with verbatim():
            result = wrapped(*call.args, **call.kwargs)
        if manage_world(call) is not None:
            after_world()
        _warn_of_unknown_backends()
        return result

    return init_process_group


def _outside_tables(name: str, wrapped: Function) -> Function:
    """Record a group that torch enters into none of its tables: no user can find it."""
    reason = (
        f"it was created by {name}(), which does not enter it into torch's tables; create it with "
        "torch.distributed.new_group()"
    )

    def create(*args: Any, **kwargs: Any) -> Any:
        group = wrapped(*args, **kwargs)
        if not thread.verbatim and not tables.is_non_member(group):
            registry.outside_tables[group] = reason
        return group

    return create


def _warn_of_unknown_backends() -> None:
    """Warn once per process of unknown backends in ``RELOADPG_BACKENDS``."""
    unknown = registry.selection.unknown_backends() if registry.selection else []
    if unknown and "unknown backends" not in registry.warned:
        registry.warned.add("unknown backends")
        warn(
            f"RELOADPG_BACKENDS names {', '.join(unknown)}, which torch does not know as a backend "
            "after the default group was created; this name selects no group",
            of_host=True,
        )


def _create_alone(call: Call) -> Any:
    """Create a group without a parent: WORLD has no communicator to split."""
    call.forget_parent()
    with creation.private_creation(creation.PrivateCreation()):
        return call()


def _manage(
    group: Any, call: Call | None, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replace a new group by a proxy if it is selected and does not manage itself.

    Every member makes this call for every group. Without a ``call``, it is captured now, if the
    group is selected.
    """
    selection = registry.selection
    if selection is None or type(group) is ReloadableProcessGroup:
        return group
    entry = tables.entry_of(group)
    decision = selection.decide(entry, selection.set_now)
    if isinstance(decision, Bypass):
        if decision is IN_NO_SET:
            registry.without_set.add(group)
        return group
    devices, set_name = decision
    if _manages_itself(group):
        return group
    if call is None:
        call = Call.capture(function, args, kwargs)
    defaults: Defaults = (None, None)
    if function.__name__ == "split_group":  # torch has copied the parent's options
        defaults = _defaults_of(group, devices)
        creation.forget_parent(defaults[0])
    if call.kwargs or len(call.args) > 1:
        call.forget_parent()  # the split is done
    construction = Construction(call, entry, devices, group.rank(), defaults)
    proxy = ReloadableProcessGroup(group, construction)
    if set_name != TRAINER:
        proxy._managed.join(set_name)
    return proxy


def _manages_itself(group: ProcessGroup) -> bool:
    """Whether a selected group recreates its communicators itself, and so stays as it is. Local."""
    # Every member comes here: no call for the groups of torch itself.
    if type(group) is ProcessGroup or not callable(getattr(group, "configure", None)):
        return False
    registry.left_alone[group] = (
        "its configure() recreates its communicators, like torchft's: it manages itself"
    )
    return True


def _defaults_of(group: ProcessGroup, devices: tuple[str, ...]) -> Defaults:
    """The options and the timeout of a live group, for a call that has none. Local."""
    timeouts = backends.get_timeouts(group, devices).values()
    return backends.options_of(group, devices), next(iter(timeouts), None)


def manage_world(call: Call | None) -> ReloadableProcessGroup | None:
    """Make the default group reloadable if it is selected; None if it is already, or is not. Local.

    The arguments of an ``init_process_group`` before ``install`` (``call`` is None) are read from
    the live group.
    """
    selection, world = registry.selection, tables.world()
    if selection is None or world is None or isinstance(world, ReloadableProcessGroup):
        return None
    entry = tables.entry_of(world)
    decision = selection.decide(entry, lambda: TRAINER, is_world=True)
    if isinstance(decision, Bypass) or _manages_itself(world):
        return None
    devices = decision.devices
    defaults: Defaults = (None, None)
    if call is None:
        call = Call(creation.original("init_process_group"), (), {})
        defaults = _defaults_of(world, devices)
    creation.complete_ranks(world, tuple(entry.devices))
    construction = Construction(call, entry, devices, world.rank(), defaults, WORLD_ORDER)
    return ReloadableProcessGroup(world, construction)


# ---------------------------------------------------------------------------------------------
# the one collective in which torch checks the type of the group


def _batch_isend_irecv(wrapped: Function) -> Function:
    """Coalesce a batch on a reloadable group as on a plain one.

    Before torch 2.15 only ``type(group) is ProcessGroup`` coalesces. On a proxy, each operation
    would be issued separately, and two ranks that both send first deadlock in NCCL. Pipeline
    schedules (of Megatron and of torch) use this function.
    """

    def batch_isend_irecv(*args: Any, **kwargs: Any) -> Any:
        operations: Any = args[0] if args else kwargs.get("p2p_op_list")
        if not _coalesces(operations):
            return wrapped(*args, **kwargs)
        return creation.batch_coalesced(operations)

    return batch_isend_irecv


def _coalesces(operations: Any) -> bool:
    if not isinstance(operations, list) or not operations:
        return False  # torch raises the error
    group = getattr(operations[0], "group", None) or tables.world()
    if not isinstance(group, ReloadableProcessGroup):
        return False
    try:
        if not backends.backend_for(group, operations[0].tensor.device).supports_coalescing:
            return False  # torch checks the operations, and issues each one separately
        creation.check_batch(operations)
    except Exception:
        return False  # torch raises the error
    return True
