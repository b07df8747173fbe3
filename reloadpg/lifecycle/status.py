"""The status of this process: its installation, its job, and each of its groups."""

from __future__ import annotations

from .. import c10d
from ..groups.proxy import GroupState, ReloadableProcessGroup
from ..groups.registry import registry
from . import memory
from .operation import settings_of
from .report import BypassedGroup, GroupStatus, OperationStatus, Status

__all__ = ["running", "status"]


def running() -> OperationStatus | None:
    """Return how far this process's offload or reload is; None if none runs.

    Local, cheap, at any time, from any thread and from a signal handler; asks nothing of a
    communicator or a device.
    """
    found: OperationStatus | None = registry.progress()
    return found


def status() -> Status:
    """Return the status of this process: installation, generation, and each reloadable group.

    Local, cheap, at any time, from any thread and from a signal handler: before ``install``, while
    offloaded, after a failure. While an operation runs, the groups' ``memory_bytes`` are None: no
    communicator is asked for its memory while another thread releases it.
    """
    options = registry.options
    world = c10d.world()
    groups = registry.managed()
    job = registry.known_job
    states = [group.state for group in groups]
    worst = next(
        (s for s in (GroupState.FAILED, GroupState.OFFLOADED) if s in states), GroupState.LIVE
    )
    unfinished = job.unfinished if job else []
    return Status(
        installed=registry.patches is not None,
        initialized=world is not None,
        rank=world.rank() if world is not None else None,
        world_size=world.size() if world is not None else None,
        state=worst.value,
        generation=job.generation if job else 0,
        cycles=job.cycles if job else 0,
        options=settings_of(options) if options else {},
        groups=tuple(_group_status(group) for group in groups),
        bypassed=len(c10d.known_groups()) - len(groups),
        memory=memory.in_use(),
        foreign=tuple(registry.patches.foreign()) if registry.patches is not None else (),
        last_error=job.last_error if job else "",
        unmanaged={c10d.name_of(group): reason for group, reason in registry.unmanaged()},
        unfinished=tuple(str(one) for one in unfinished if not one.task.ended),
        bypassed_groups=tuple(
            BypassedGroup(
                c10d.name_of(group),
                c10d.desc_of(group),
                c10d.ranks_of(group),
                c10d.backend_of(group),
                bypass.reason,
            )
            for group, bypass in registry.bypassed()
        ),
        running=running(),
    )


def _group_status(group: ReloadableProcessGroup) -> GroupStatus:
    timeouts, history = group.current_timeouts(), group.history
    stats = None if registry.busy else group.memory_stats()
    selected = [timeouts[d].total_seconds() for d in group.construction.selected if d in timeouts]
    return GroupStatus(
        group.group_name,
        group.group_desc,
        group.construction.ranks,
        group.construction.backend,
        group.state.value,
        group.generation,
        selected[0] if selected else None,
        group.last_error,
        history.strategy,
        None if stats is None else stats.get("total", 0),
        history.cycles,
        history.offload_ms,
        history.reload_ms,
    )
