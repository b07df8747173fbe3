"""The names that slime and miles import from their ``utils/reloadable_process_group.py``.

One changed import moves a user over::

    from reloadpg.integrations.slime import (
        destroy_process_groups,
        monkey_patch_torch_dist,
        register_default_process_group,  # slime only
        reload_process_groups,
    )

What their callers rely on holds: all of it may be called twice; waking what is awake, and putting
to sleep what sleeps, does nothing; groups may be reloaded for a weight update in the middle of a
sleep; the default group goes too once it is registered, and stays if it is not (miles never
registers it). What differs from their own module:

* ``destroy_process_groups`` and ``reload_process_groups`` are collective over all ranks of the
  job, as :func:`reloadpg.offload` and :func:`reloadpg.reload`, and return their report.
* The default group and the gloo groups stay the same objects: no temporary gloo WORLD takes their
  place, and nothing has to be looked up again after a wake-up.
* Groups on one rank and gloo groups are left alone, also when the default group is registered.

slime maps the backend name ``nccl`` to ``mccl`` on MUSA devices inside its own patch; here the
backend that is asked for is the one that is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import c10d
from ..errors import NotInstalledError, ReloadpgError
from ..groups.proxy import ReloadableProcessGroup as _Group
from ..groups.registry import registry
from ..groups.wrappers import manage_world
from ..lifecycle.connect import Connect
from ..lifecycle.install import install, is_installed
from ..lifecycle.offload import offload
from ..lifecycle.reload import reload
from ..lifecycle.report import Report

__all__ = [
    "ReloadableProcessGroup",
    "destroy_process_groups",
    "monkey_patch_torch_dist",
    "register_default_process_group",
    "reload_process_groups",
]


def monkey_patch_torch_dist(**options: Any) -> None:
    """Make groups created from now on reloadable; the default group only once it is registered.

    Local; call it before the groups are created. Idempotent: where reloadpg is installed already,
    by whomever, that installation is used as it is.

    Args:
        options: passed on to :func:`reloadpg.install`, for example ``backends={"gloo"}`` to test
            without a GPU. ``world`` is False unless given.
    """
    if not is_installed():
        install(**{"world": False, **options})
    _give_group_attribute()


def register_default_process_group(timeout: timedelta) -> None:
    """Let the default group be released and rebuilt with the others from now on.

    Local; call it alike on every rank, after ``init_process_group``; idempotent. A gloo default
    group holds nothing to release and stays as it is.

    Args:
        timeout: timeout of the default group, now and after each reload.

    Raises:
        ReloadpgError: there is no default group yet; nothing was changed.
        NotInstalledError: ``monkey_patch_torch_dist`` was not called; nothing was changed.
    """
    if not dist.is_initialized():
        raise ReloadpgError(
            "register_default_process_group: torch.distributed is not initialized, so there is no "
            "default group yet; nothing was changed. Call it after init_process_group()."
        )
    with registry.lock:
        options = registry.options
        if options is None:
            raise NotInstalledError(
                "register_default_process_group: nothing is installed; nothing was changed. Call "
                "monkey_patch_torch_dist() first, before the groups are created."
            )
        registry.options = replace(options, selection=replace(options.selection, world=True))
        manage_world(None)
    world = c10d.world()
    if isinstance(world, _Group):
        world.set_default_timeout(timeout)


def destroy_process_groups() -> Report | None:
    """Release the communicators of all groups: :func:`reloadpg.offload`.

    Collective over all ranks; blocking, bounded; idempotent. Before ``monkey_patch_torch_dist``
    it does nothing and returns None, for actors that never train.
    """
    return offload() if is_installed() else None


def reload_process_groups(*, connect: Connect = "none") -> Report | None:
    """Make all groups work again: :func:`reloadpg.reload`.

    Collective over all ranks; blocking, bounded; idempotent; may be called again after a failure.
    Before ``monkey_patch_torch_dist`` it does nothing and returns None.

    Args:
        connect: as for :func:`reloadpg.reload`. ``eager`` connects each communicator on all its
            ranks, so that no barrier is needed before a first exchange between some of them.
    """
    return reload(connect=connect) if is_installed() else None


def _invalidate_process_groups() -> None:
    """Nothing: no handle to a group goes stale here. Local."""


class _AnyReloadableGroup(type):
    """``isinstance`` with the class below is true for every reloadable group."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Group)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Group)


class ReloadableProcessGroup(metaclass=_AnyReloadableGroup):
    """Substitute for :class:`reloadpg.ReloadableProcessGroup`, with slime's static methods.

    ``isinstance`` is true for every reloadable group. Instances are made by the patched
    ``torch.distributed`` functions alone.
    """

    destroy_process_groups = staticmethod(destroy_process_groups)
    reload_process_groups = staticmethod(reload_process_groups)
    invalidate_process_groups = staticmethod(_invalidate_process_groups)

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "reloadable groups are not made by hand: torch.distributed.new_group() returns them "
            "after monkey_patch_torch_dist(). Nothing was created."
        )


def _group_itself(group: _Group) -> _Group | None:
    return group if group.is_live else None


def _give_group_attribute(name: str = "group", of: Callable[..., Any] = _group_itself) -> None:
    """Give reloadable groups the attribute ``group`` that slime's wrappers have. Idempotent.

    Theirs holds the real group, which torch knows and the wrapper is not; miles' bridge shim swaps
    it in around object collectives (miles#1221). Ours is known to torch itself.
    """
    if name not in vars(_Group):
        setattr(_Group, name, property(of))
