"""Other holders of communication memory, which follow the offloads and reloads of a set.

A holder is released before the groups of its set, and restored when they are live on all ranks.
Collective holders are part of the plan on which the ranks agree. If an operation fails after its
first change, they count as failed on all ranks, as groups do, and the next reload restores them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from .. import c10d
from ..c10d import devices
from ..errors import InvalidOptionError, RebuildError, ReleaseError
from ..groups.managed import ManagedGroup
from ..groups.proxy import managed
from ..groups.sets import TRAINER, Chosen
from ..rendezvous.plan import GroupPlan
from ..reports import HolderReport
from .callbacks import register

logger = logging.getLogger("reloadpg")

HELD, RELEASED, FAILED = "held", "released", "failed"


@dataclass(eq=False)
class Holder:
    """A registered holder; see :func:`register_holder`."""

    name: str
    release: Callable[[], object]
    restore: Callable[[], object]
    measure: Callable[[], int | None] | None
    group: weakref.ref[ProcessGroup] | None
    collective: bool
    set_name: str
    state: str = HELD

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key, equal on all ranks that share the holder."""
        group = None if self.group is None else self.group()
        known = managed(group)
        return (not self.collective, () if known is None else known.construction.order, self.name)

    @property
    def is_gone(self) -> bool:
        """Whether its group was destroyed."""
        group = None if self.group is None else self.group()
        return self.group is not None and (group is None or not c10d.is_known(group))

    def bytes(self) -> int | None:
        try:
            return None if self.measure is None else self.measure()
        except Exception:
            logger.exception("the bytes of holder %s are unknown", self.name)
            return None

    def report(self, ms: float | None = None, size: int | None = None) -> HolderReport:
        size = self.bytes() if size is None else size
        return HolderReport(self.name, self.set_name, self.state, size, ms, self.collective)


_holders: list[Holder] = []
os.register_at_fork(after_in_child=_holders.clear)


def register_holder(
    name: str,
    *,
    release: Callable[[], object],
    restore: Callable[[], object],
    bytes: Callable[[], int | None] | None = None,  # noqa: A002 - what it returns
    group: ProcessGroup | None = None,
    collective: bool = False,
    set: str | None = None,  # noqa: A002 - as in other functions
) -> Callable[[], None]:
    """Register something that holds communication memory, and follows offloads and reloads.

    Local. ``release`` runs in each offload of the set, while its groups are live, before any of
    them is released; ``restore`` runs in the reload, when they are live on all ranks, before the
    callbacks of :func:`on_reload`. Both run in a separate thread with the caller's device, one
    holder after the other: collective ones first, in the order of their groups and names, which all
    ranks share. A wait for other ranks has the operation's timeout, which names the missing ranks
    and the holder.

    If an operation fails after its first change, collective holders and those with a group count as
    failed on all ranks. The next reload calls ``restore`` on all of them, also where ``release``
    has not run; it must then drop what is left. So does a recovery.

    Args:
        name: name for messages and reports; unique in the process.
        release: frees the memory. It must not destroy reloadable groups; ``restore`` may.
        restore: allocates it again.
        bytes: returns the bytes that it holds now, or None; fast, local.
        group: the group that it uses; None if it uses none.
        collective: whether the calls need all members of the group (of the job, without a group).
            The ranks then agree that all of them have the holder.
        set: the set of groups that it follows; by default that of the group, or ``"trainer"``.

    Returns:
        A function that removes the holder; idempotent.

    Raises:
        InvalidOptionError: an argument is invalid, or the name is taken; nothing was registered.
    """
    wrong = ""
    if not isinstance(name, str) or not name:
        wrong = f"{name!r} is not a name"
    elif any(holder.name == name for holder in _holders if not holder.is_gone):
        wrong = f"the name {name!r} is taken"
    elif not callable(release) or not callable(restore):
        wrong = "release and restore must be functions"
    elif group is not None and not isinstance(group, ProcessGroup):
        wrong = f"group={group!r} is not a process group"
    if wrong:
        raise InvalidOptionError(f"register_holder(): {wrong}; nothing was registered.")
    known = managed(group)
    of_group = TRAINER if known is None else known.set_name
    (set_name,) = Chosen.of((set or of_group,), "register_holder").names
    _holders[:] = [holder for holder in _holders if not holder.is_gone]
    reference = None if group is None else weakref.ref(group)
    entry = Holder(name, release, restore, bytes, reference, collective, set_name)
    return register(_holders, entry)


def held_by(chosen: Chosen) -> list[Holder]:
    """List the holders of some sets, in the order that all ranks share. Local."""
    held = [h for h in list(_holders) if h.set_name in chosen and not h.is_gone]
    return sorted(held, key=lambda holder: holder.order)


def reports() -> tuple[HolderReport, ...]:
    return tuple(holder.report() for holder in list(_holders) if not holder.is_gone)


def plans(chosen: Chosen, size: int, *, whole: bool) -> list[GroupPlan]:
    """What must be equal on all ranks that share a collective holder."""
    result = []
    for holder in held_by(chosen):
        if holder.collective:
            group = None if holder.group is None else holder.group()
            ranks = range(size) if group is None else c10d.ranks_of(group)
            digest = hashlib.blake2b(
                repr((holder.name, tuple(ranks))).encode(), digest_size=5
            ).digest()
            state = "" if whole else str(holder.state == HELD)
            number = int.from_bytes(digest, "big")
            what = f"holder {holder.name}"
            result.append(GroupPlan(what, tuple(ranks), 0, state, number, holder.set_name, what))
    return result


_Operation = Any
"""An ``Operation``, whose module imports this one."""


def release(op: _Operation, phase: str) -> None:
    """Release the holders of an offload's sets, before a barrier. Blocking, with timeouts."""
    due = [holder for holder in reversed(held_by(op.changes.concerned)) if holder.state == HELD]
    for holder in due:
        _apply(op, phase, holder, RELEASED)
    if due:
        op.do(phase, devices.synchronize, "synchronizing the accelerator")


def restore(op: _Operation, phase: str) -> None:
    """Restore the holders of a reload's sets, before a barrier. Blocking, with timeouts."""
    skipped = [group.proxy for group in op.changes.skipped]
    for holder in to_restore(op.changes.concerned):
        group = None if holder.group is None else holder.group()
        if any(group is other for other in skipped):
            continue  # it is restored with the group
        _apply(op, phase, holder, HELD)


def to_restore(chosen: Chosen) -> list[Holder]:
    return [holder for holder in held_by(chosen) if holder.state != HELD]


def _apply(op: _Operation, phase: str, holder: Holder, state: str) -> None:
    call = holder.release if state == RELEASED else holder.restore
    doing = f"{'releasing' if state == RELEASED else 'restoring'} holder {holder.name}"
    size = holder.bytes() if state == RELEASED else None
    begun = time.perf_counter()

    def work() -> None:
        try:
            call()
        except Exception as cause:
            failure = ReleaseError if state == RELEASED else RebuildError
            raise failure(
                f"{op.name} failed at holder {holder.name} on rank {op.world.rank()}: "
                f"{type(cause).__name__}: {cause}"
            ) from cause

    holder.state = FAILED  # until it has returned
    with op.record.timed("holders"):
        op.do(phase, work, doing)
    holder.state = state
    op.round.advance()
    op.record.holders.append(holder.report((time.perf_counter() - begun) * 1e3, size))


def fail(chosen: Chosen, groups: Iterable[ManagedGroup] | None = None) -> None:
    """Mark the holders whose groups have failed, so that the next reload restores them. Local."""
    known = None if groups is None else [*groups]
    for holder in held_by(chosen):
        group = None if holder.group is None else holder.group()
        concerned = known is None or group is None or managed(group) in known
        if (holder.collective or group is not None) and concerned:
            holder.state = FAILED
