"""The status of this process: its installation, its job, and each of its groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import ProcessGroup

from ..c10d import backends, memory, nccl, tables
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState
from ..groups.registry import registry
from ..groups.selection import Selection
from ..groups.sets import TRAINER
from ..reports import BypassedGroup, GroupStatus, SetStatus, Status
from ..texts import counted
from .installation import installation
from .job import Job, jobs


def status() -> Status:
    """Return the status of this process: installation, generation, and each reloadable group.

    Local, cheap, at any time, from any thread and from a signal handler: before ``install``, while
    offloaded, after a failure. While an operation runs, the groups' ``memory_bytes`` are None,
    since another thread may be releasing the communicators.
    """
    lock: Any = registry.lock
    locked = lock.acquire(blocking=False)  # while it is held, no operation begins
    try:
        return _status(asks=locked and not jobs.busy)
    finally:
        if locked:
            lock.release()


def _status(asks: bool) -> Status:
    """Return the status; ``asks``: also the communicators, for their memory."""
    options, patches = installation.options, installation.patches
    world = tables.world()
    groups = registry.managed()
    shown = tuple(_group_status(group, asks) for group in groups)
    job = jobs.known
    unfinished = job.unfinished if job else []
    return Status(
        installed=patches is not None,
        initialized=world is not None,
        rank=world.rank() if world is not None else None,
        world_size=world.size() if world is not None else None,
        state=_worst(shown),
        generation=job.generation if job else 0,
        options=options.settings() if options else {},
        groups=shown,
        memory=memory.in_use(),
        foreign=tuple(patches.foreign()) if patches is not None else (),
        last_error=job.last_error if job else "",
        unmanaged={tables.name_of(group): reason for group, reason in registry.unmanaged()},
        unfinished=tuple(str(entry) for entry in unfinished if entry.runs()),
        bypassed_groups=bypassed_groups(asks),
        running=jobs.progress(),
        sets=_sets(job, shown),
        borrowed=tuple(one for group in groups for one in group.loans.held()),
        off=registry.off,
    )


def _worst(groups: Sequence[GroupStatus]) -> str:
    states = [group.state for group in groups]
    worst = (GroupState.FAILED.value, GroupState.OFFLOADED.value)
    return next((state for state in worst if state in states), GroupState.LIVE.value)


def _sets(job: Job | None, groups: Sequence[GroupStatus]) -> dict[str, SetStatus]:
    """The sets that this rank knows, from its groups, the rules, and operations."""
    if job is None:
        return {}
    rows = {}
    for name in sorted(registry.sets, key=lambda name: (name != TRAINER, name)):
        mine = [group for group in groups if group.set == name]
        state = job.sets[name]
        left = GroupState.OFFLOADED if state.offloaded else GroupState.LIVE
        worst = _worst(mine) if mine else left.value
        held = [group.memory_bytes for group in mine if group.memory_bytes is not None]
        rows[name] = SetStatus(worst, len(mine), sum(held) if held else None)
    return rows


def _held(stats: Mapping[str, int]) -> int:
    """Bytes on the device: NCCL's total includes bytes that a suspend has moved to the host."""
    moved = stats.get("suspend", 0) if stats.get("suspended") else 0
    return stats.get("total", 0) - moved


def _group_status(group: ManagedGroup, asks: bool) -> GroupStatus:
    timeouts, history = group.current_timeouts(), group.history
    stats = group.memory_stats() if asks else None
    selected = [timeouts[d].total_seconds() for d in group.construction.selected if d in timeouts]
    return GroupStatus(
        group.name,
        group.desc,
        group.construction.ranks,
        group.construction.backend,
        group.state.shown.value,
        group.generation,
        selected[0] if selected else None,
        group.last_error,
        history.strategy,
        None if stats is None else _held(stats),
        group.set_name,
    )


def bypassed_groups(asks: bool) -> tuple[BypassedGroup, ...]:
    """List the groups that bypass; ``asks``: look at the communicators of groups of one rank."""
    alone = registry.of_one_rank() if asks else {}
    return tuple(
        BypassedGroup(
            tables.name_of(group),
            tables.desc_of(group),
            tables.ranks_of(group),
            tables.backend_of(group),
            bypass.reason,
            *_communicator_of(group, alone.get(group, ())),
        )
        for group, bypass in registry.bypassed()
    )


def _communicator_of(group: ProcessGroup, selected: Sequence[str]) -> tuple[bool, int | None]:
    """Whether the group is known to have a communicator, and its bytes. Creates none."""
    with suppress(Exception):  # an error of a backend must not end the operation
        live = backends.live_backends(group, selected).values()
        stats = [backends.memory_stats(backend) for backend in live]
        if any(stats):
            return True, sum(_held(one) for one in stats if one)
        return any(map(nccl.devices_of, live)), None
    return False, None


def dropped_groups(held: Collection[ProcessGroup]) -> list[str]:
    """Warn of groups that only torch's tables refer to, and the caller's ``held``. Local."""
    if not (groups := registry.dropped(held)):
        return []
    are, them = ("are", "them") if len(groups) > 1 else ("is", "it")
    return [
        f"{counted(len(groups), 'group')} {are} referenced by torch's tables alone, and each "
        f"reload rebuilds {them}: {tables.labels_of(groups)}. Unless the program uses {them} by "
        "name, call torch.distributed.destroy_process_group(group) before it drops a group"
    ]


def not_reloadable() -> list[str]:
    """Name the groups that should be reloadable and are not, with the reason. Local."""
    return [
        f"not reloadable, keeps its communicator: {text}"
        for text in _by_reason(registry.unmanaged())
    ]


def nothing_released(selection: Selection) -> list[str]:
    """Return why an offload releases nothing if no group is reloadable. Local."""
    bypassed = registry.bypassed()
    if not bypassed:
        return []
    why = "; ".join(_by_reason((group, bypass.reason) for group, bypass in bypassed))
    remedies = " or ".join(dict.fromkeys(f"install({bypass.remedy})" for _, bypass in bypassed))
    return [
        f"nothing was released, since no group is reloadable: {why}. Installed with "
        f"{selection}; call {remedies} to make them reloadable."
    ]


def _by_reason(groups: Iterable[tuple[ProcessGroup, str]]) -> list[str]:
    by_reason: dict[str, list[ProcessGroup]] = {}
    for group, reason in groups:
        by_reason.setdefault(reason, []).append(group)
    return [f"group {tables.labels_of(those)}: {reason}" for reason, those in by_reason.items()]
