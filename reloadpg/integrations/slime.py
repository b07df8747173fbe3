"""Replacement for ``utils/reloadable_process_group.py`` of slime, miles, Relax, vime and ROLL.

Only the import changes::

    from reloadpg.integrations.slime import (
        destroy_process_groups,
        monkey_patch_torch_dist,
        register_default_process_group,  # slime only
        reload_process_groups,
    )

The behaviour that their callers need is the same: all functions are idempotent; groups may be
reloaded for a weight update while the trainer sleeps; the default group is released only if it was
registered (miles never does). Differences from their module:

* ``destroy_process_groups`` and ``reload_process_groups`` are collective over all ranks of the
  job, and return the report of :func:`reloadpg.offload` and :func:`reloadpg.reload`.
* The default group stays the same object: no temporary gloo group replaces it, and while asleep
  a collective on it raises.
* Gloo groups bypass, also if the default group is registered. Groups of one rank are reloadable.
  Each group has ``group``; for a group that bypasses it is always the group itself.
* ``reload_process_groups`` connects each communicator on all its ranks. So no barrier on WORLD is
  needed before a first exchange between some of them.
* Memory is not checked before a collective: each check asks the device (slime#2269).
* Relax's arguments are accepted. Sockets need no pause after a destroy, and groups keep their own
  timeouts, so these arguments are ignored, with a line in the log.
* On MUSA devices, request the backend ``mccl``: it does not replace ``nccl`` by itself.

Code that reads their tables finds ``torch.distributed.old_new_group``, ``old_new_group_dict``,
``ReloadableProcessGroup.GROUPS``, and ``group_info`` of a group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import ReloadableProcessGroup as _Group
from .. import install, is_installed, offload, reload
from ..c10d import tables
from ..errors import ReloadpgError
from ..extend import (
    Connect,
    GroupState,
    managed,
    managed_groups,
    new_plain_group,
    on_uninstall,
    select_world,
)
from ..reports import Report
from ..settings import as_timedelta

__all__ = [
    "ReloadableProcessGroup",
    "destroy_process_groups",
    "monkey_patch_torch_dist",
    "old_new_group_dict",
    "register_default_process_group",
    "reload_process_groups",
]

logger = logging.getLogger("reloadpg")

old_new_group_dict: dict[int, Callable[..., Any]] = {}
"""The unpatched ``torch.distributed.new_group``, by process id."""

_registered: dict[int, timedelta] = {}
"""Timeouts passed to ``register_default_process_group`` before the patch, by process id."""


def monkey_patch_torch_dist(args: object = None, /, **options: Any) -> None:
    """Make groups created from now on reloadable; the default group only once it is registered.

    Local; call it before the groups are created. Idempotent: an existing installation of reloadpg
    is used unchanged. :func:`reloadpg.uninstall` undoes all of this.

    Args:
        args: the arguments of Relax's program, which ask for a check of memory; not used.
        options: passed to :func:`reloadpg.install`, for example ``backends={"gloo"}`` to test
            without a GPU. ``world`` is False and ``min_size`` 1 unless given.
    """
    if not is_installed():
        install(**{"world": False, "min_size": 1, **options})
    for (owner, name), attribute in _ATTRIBUTES.items():
        if name not in vars(owner):
            setattr(owner, name, attribute)
    dist.old_new_group = old_new_group_dict[os.getpid()] = new_plain_group  # type: ignore[attr-defined]
    on_uninstall(_take_back)
    timeout = _registered.pop(os.getpid(), None)
    if timeout is not None and dist.is_initialized():
        register_default_process_group(timeout)


def _take_back() -> None:
    """Undo the changes of the patch other than the installation."""
    if getattr(dist, "old_new_group", None) is new_plain_group:
        del dist.old_new_group  # type: ignore[attr-defined]
    old_new_group_dict.pop(os.getpid(), None)
    for (owner, name), attribute in _ATTRIBUTES.items():
        if vars(owner).get(name) is attribute:
            delattr(owner, name)


def register_default_process_group(timeout: timedelta | float) -> None:
    """Let the default group be released and rebuilt with the others from now on.

    Local; call it on every rank, after ``init_process_group``; idempotent. A call before
    ``monkey_patch_torch_dist`` takes effect with that. A gloo default group is bypassed.

    Args:
        timeout: timeout of the default group, now and after each reload, in seconds or as a
            timedelta.

    Raises:
        ReloadpgError: there is no default group yet; nothing was changed.
    """
    if not dist.is_initialized():
        raise ReloadpgError(
            "register_default_process_group: torch.distributed is not initialized; nothing was "
            "changed. Call it after init_process_group()."
        )
    timeout = as_timedelta(timeout, "timeout", "nothing was changed")
    if not select_world():
        _registered[os.getpid()] = timeout
        return
    world = managed(tables.world())
    if world is not None:
        world.set_timeout(timeout, kept=False)


def destroy_process_groups(post_destroy_delay: float | None = None) -> Report | None:
    """Release the communicators of all groups: :func:`reloadpg.offload`.

    Collective over all ranks; blocking, with a timeout; idempotent. Before
    ``monkey_patch_torch_dist`` it does nothing and returns None, for actors that never train.

    Args:
        post_destroy_delay: Relax's pause until sockets are free; not needed, and ignored.
    """
    _ignored("destroy_process_groups", post_destroy_delay=post_destroy_delay)
    return offload() if is_installed() else None


def reload_process_groups(
    timeout_minutes: float | None = None,
    max_retries: int | None = None,
    retry_delay: float | None = None,
    *,
    connect: Connect = "eager",
) -> Report | None:
    """Rebuild all groups: :func:`reloadpg.reload`.

    Collective over all ranks; blocking, with a timeout; idempotent; may be called again after a
    failure. Before ``monkey_patch_torch_dist`` it does nothing and returns None.

    Args:
        timeout_minutes: Relax's: how long to wait for ranks that have not made the call.
        max_retries: Relax's maximum number of attempts; see ``attempts`` of
            :func:`reloadpg.reload`.
        retry_delay: Relax's pause between attempts; not needed, and ignored.
        connect: as for :func:`reloadpg.reload`. ``eager`` connects each communicator on all its
            ranks. With ``none`` a first exchange between some ranks of a group (Megatron's
            pipelines) waits for the others, which hangs if these first need one of the two.
    """
    _ignored("reload_process_groups", retry_delay=retry_delay)
    if not is_installed():
        return None
    timeout = None if timeout_minutes is None else timeout_minutes * 60
    return reload(connect=connect, attempts=max_retries or 1, timeout=timeout)


def _ignored(function: str, **given: object) -> None:
    """Log the arguments of Relax that have no effect here."""
    if told := ", ".join(f"{name}={value}" for name, value in given.items() if value is not None):
        logger.info("%s: ignored: %s", function, told)


class _AnyReloadableGroup(type):
    """``isinstance`` with the class below is true for every reloadable group."""

    @property
    def GROUPS(cls) -> dict[int, list[dist.ProcessGroup]]:  # noqa: N802 - slime's name
        """The reloadable groups of this process except the default group, by process id."""
        groups = managed_groups()
        return {os.getpid(): [one.proxy for one in groups if not one.construction.is_world]}

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Group)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Group)


class ReloadableProcessGroup(metaclass=_AnyReloadableGroup):
    """Substitute for :class:`reloadpg.ReloadableProcessGroup`, with slime's static methods.

    ``isinstance`` is true for every reloadable group. Only the patched ``torch.distributed``
    functions create instances.
    """

    destroy_process_groups = staticmethod(destroy_process_groups)
    reload_process_groups = staticmethod(reload_process_groups)

    @staticmethod
    def invalidate_process_groups() -> None:
        """Do nothing: handles to groups stay valid. Local."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "reloadable groups cannot be created directly: torch.distributed.new_group() returns "
            "them after monkey_patch_torch_dist(). Nothing was created."
        )


def _group_info(group: _Group) -> dict[str, Any]:
    made = group._managed.construction
    return {
        "ranks": list(made.ranks),
        "args": made.call.args,
        "kwargs": dict(made.call.kwargs),
        "backend": made.backend,
    }


class _Itself:
    """``group`` of a plain group. Not a data descriptor: subclasses may have an own ``group``."""

    def __get__(self, group: object, owner: object = None) -> object:
        return self if group is None else group


_ATTRIBUTES: dict[tuple[type, str], Any] = {
    (dist.ProcessGroup, "group"): _Itself(),
    (_Group, "group"): property(lambda group: group if group.state is GroupState.LIVE else None),
    (_Group, "group_info"): property(_group_info),
}
"""Attributes of slime's wrappers. Its ``group`` is the group that torch created, since torch does
not know the wrapper; miles' bridge uses it around object collectives (miles#1221)."""
