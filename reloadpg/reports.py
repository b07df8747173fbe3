"""Reports of operations and the status of a process: plain values that convert to JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .texts import counted, described, mebibytes, table

__all__ = [
    "Borrowed",
    "BypassedGroup",
    "RankFault",
    "GroupReport",
    "GroupStatus",
    "OperationStatus",
    "Report",
    "SetStatus",
    "Span",
    "Status",
]


@dataclass(frozen=True)
class GroupReport:
    """One group's part in an operation.

    Attributes:
        strategy: the strategy that released or restored it: ``recreate`` or ``suspend``; ``skip``
            for an unused communicator, which holds nothing to suspend and stays as it is.
        ms: wall time in milliseconds.
        reason: the reason for this strategy, if there was a choice.
        bytes: bytes that its communicator reported when it was released; None if the backend
            reports none.
        pinned_bytes: the part of them that a suspend has copied to pinned host memory.
    """

    name: str
    desc: str
    backend: str
    size: int
    strategy: str
    ms: float
    reason: str = ""
    bytes: int | None = None
    set: str = "trainer"
    pinned_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """A phase of an operation: name, start (relative to the operation) and length, in ms."""

    name: str
    start_ms: float
    ms: float

    @property
    def is_wait(self) -> bool:
        return self.name.startswith("wait.")


@dataclass(frozen=True)
class RankFault:
    """The fault that one rank reported to a recovery.

    Attributes:
        rank: the rank.
        reason: its error, or the argument of ``recover``; empty if another rank requested the
            recovery.
        where: the collective and the line of the program that raised it, if known.
        late: groups in which it had started fewer collectives than another member.
    """

    rank: int
    reason: str = ""
    where: str = ""
    late: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.where, self.reason.partition("\n")[0]]
        if self.late:
            groups = ", ".join(self.late)
            parts.append(f"had started fewer collectives than others in group {groups}")
        return f"rank {self.rank}: " + ("; ".join(filter(None, parts)) or "no fault")


@dataclass(frozen=True)
class Borrowed:
    """Something that other code has taken out of a reloadable group.

    Attributes:
        group: name of the group.
        what: ``backend``, ``communicator pointer``, ``window``, ``abort hook``, ``memory pool`` or
            ``symmetric memory``.
        by: the module that took it.
        where: file and line of the call; empty if unknown.
        generation: the generation of the group that it belongs to.
        ended: whether this generation has ended.
        raw: whether a use after the end of the generation is a use after free.
    """

    group: str
    what: str
    by: str
    where: str
    generation: int
    ended: bool = False
    raw: bool = False

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        state = ", which has ended" if self.ended else ""
        return (
            f"group {self.group!r}: {self.what} taken by {self.by}{place}, of generation "
            f"{self.generation}{state}"
        )

    @property
    def consequence(self) -> str:
        """A warning if it can no longer be used, or has no effect any more; otherwise empty."""
        if not self.ended:
            return ""
        if self.raw:
            return (
                f"{self}: a use of it is a use after free; it must be taken again after each reload"
            )
        if self.what == "backend":
            return f"{self}: it no longer belongs to the group; take it again after each reload"
        if self.what in ("abort hook", "memory pool"):
            return f"{self}: it is no longer registered; register it again after each reload"
        return ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The record of one call of ``offload``, ``reload`` or ``recover`` on this rank.

    Attributes:
        changed: False if there was nothing to do.
        generation: number of completed reloads of the job, of any set. A recovery counts as one.
        groups: the groups that were released or rebuilt, in order of completion.
        spans: phases and waits, in order of completion; ``wait.*`` is time spent waiting for other
            ranks.
        total_ms: wall time of the whole call, in milliseconds.
        note: why nothing was done, if nothing was done.
        memory: bytes in use ``before`` and ``after``, by source; see ``reloadpg.c10d.memory``.
            ``released_bytes`` is from the first source, except ``rss``.
        warnings: reasons why memory is not free, as text: also communicators that are still being
            destroyed, and what other code holds of ended generations.
        error: the error that the call raised; empty if it raised none.
        started_at: Unix time at the call, in seconds.
        rank, world_size: in the default group, None without one.
        faults: of ``recover``: the faults that ranks reported, at most 32, equal on all ranks.
            Ranks that were late in a group come first. Ranks without a fault are omitted.
        sets: the sets that it was called for: ``all``, or their names separated by commas.
        retries: of a reload, why each attempt but the last one failed.
    """

    operation: str
    changed: bool
    generation: int
    groups: tuple[GroupReport, ...] = ()
    spans: tuple[Span, ...] = ()
    total_ms: float = 0.0
    note: str = ""
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error: str = ""
    started_at: float = 0.0
    rank: int | None = None
    world_size: int | None = None
    faults: tuple[RankFault, ...] = ()
    sets: str = "all"
    retries: tuple[str, ...] = ()

    @property
    def phases_ms(self) -> dict[str, float]:
        """Wall time by phase, in milliseconds."""
        phases: dict[str, float] = {}
        for span in self.spans:
            phases[span.name] = phases.get(span.name, 0.0) + span.ms
        return phases

    @property
    def wait_ms(self) -> float:
        """Time spent waiting for other ranks, in milliseconds."""
        return sum(span.ms for span in self.spans if span.is_wait)

    @property
    def memory_source(self) -> str:
        """Source of ``released_bytes`` and ``restored_bytes``; empty if they are unknown.

        Resident memory (``rss``) is no source: it changes for many other reasons.
        """
        return next((source for source in self.memory.get("before", ()) if source != "rss"), "")

    def _change(self) -> int | None:
        source, after = self.memory_source, self.memory.get("after", {})
        return after[source] - self.memory["before"][source] if source in after else None

    @property
    def released_bytes(self) -> int | None:
        """Bytes that were released on this rank; None for a reload, or if unknown."""
        change = self._change() if self.operation == "offload" else None
        return None if change is None else -change

    @property
    def restored_bytes(self) -> int | None:
        """Bytes that the reload allocated on this rank; None for an offload, or if unknown.
        Communicators that connect at their first use allocate later.
        """
        return self._change() if self.operation == "reload" else None

    @property
    def pinned_bytes(self) -> int:
        """Bytes that an offload has copied to pinned host memory on this rank, to suspend groups.

        NCCL keeps such a copy of all that a suspend releases, until the reload.
        """
        return sum(group.pinned_bytes for group in self.groups)

    def to_dict(self) -> dict[str, float | int | str | bool]:
        """Scalars with flat names (``offload/total_ms``), for metrics loggers.

        The names of a call for some sets include them (``offload/engine/total_ms``). For all
        values, nested, use ``dataclasses.asdict``.
        """
        values: dict[str, float | int | str | bool | None] = {
            "total_ms": self.total_ms,
            "wait_ms": self.wait_ms,
            "groups": len(self.groups),
            **{f"{name}_ms": ms for name, ms in self.phases_ms.items()},
            "released_bytes": self.released_bytes,
            "restored_bytes": self.restored_bytes,
            "pinned_bytes": self.pinned_bytes or None,
            "warnings": len(self.warnings),
            "changed": self.changed,
            "failed": bool(self.error),
            "generation": self.generation,
        }
        of = self.operation if self.sets == "all" else f"{self.operation}/{self.sets}"
        return {f"{of}/{k}": v for k, v in values.items() if v is not None}

    def __str__(self) -> str:
        if self.error:
            return f"{self.operation}: failed after {self.total_ms:.1f} ms: {self.error}"
        if not self.changed:
            return f"{self.operation}: nothing to do ({self.note or 'already done'})"
        memory = ""
        for moved, verb in ((self.released_bytes, "released"), (self.restored_bytes, "restored")):
            if moved is not None:
                memory = f", {mebibytes(moved)} {verb} ({self.memory_source})"
        if self.pinned_bytes:
            memory += f", {mebibytes(self.pinned_bytes)} pinned on the host"
        return (
            f"{self.operation}{'' if self.sets == 'all' else f' of {self.sets}'}: "
            f"{counted(len(self.groups), 'group')} in {self.total_ms:.1f} ms"
            f"{memory}, generation {self.generation}"
            + "".join(f"; {fault}" for fault in self.faults)
        )


@dataclass(frozen=True)
class GroupStatus:
    """The state of one reloadable group.

    Attributes:
        ranks: global ranks of its members.
        backend: the backend string that it was created with.
        state: ``live``, ``offloaded`` or ``failed``.
        generation: the job's number of reloads, of any set, when its communicator was built; 0 if
            the original call has built it. It is not the number of this group's rebuilds: a group
            that is created after one reload has 2 after its first rebuild.
        timeout_s: its current timeout in seconds; None if its backend has none.
        last_error: why it failed; empty if it did not.
        strategy: strategy of the last release; empty before the first one.
        memory_bytes: bytes that its communicator reports; None if its backend reports none.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    state: str
    generation: int
    timeout_s: float | None
    last_error: str = ""
    strategy: str = ""
    memory_bytes: int | None = None
    set: str = "trainer"


@dataclass(frozen=True)
class SetStatus:
    """The state of one set of groups.

    Attributes:
        state: ``live``, ``offloaded`` or ``failed``: the worst state of its groups on this rank;
            without groups on this rank, the state after the last operation.
        groups: number of its reloadable groups on this rank.
        memory_bytes: bytes that its communicators on this rank report; None if none reports.
    """

    state: str
    groups: int
    memory_bytes: int | None = None


@dataclass(frozen=True)
class BypassedGroup:
    """A group that the options of ``install`` bypass, with the reason as text.

    Attributes:
        holds: for a group of one rank, whether it has a communicator that ``install(min_size=1)``
            would release.
        memory_bytes: bytes that this communicator reports; None if unknown.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    reason: str
    holds: bool = False
    memory_bytes: int | None = None


def groups_of_one_rank(bypassed: Sequence[BypassedGroup]) -> str:
    """Say how many bypassed groups of one rank have a communicator; empty if none has."""
    held = [group for group in bypassed if group.holds]
    if not held:
        return ""
    known = [group.memory_bytes for group in held if group.memory_bytes is not None]
    memory = f" of {mebibytes(sum(known))}" if known else ""
    several, first = len(held) > 1, held[0]
    return (
        f"{counted(len(held), 'bypassed group')} of one rank "
        f"{'have communicators' if several else 'has a communicator'}{memory}, first group "
        f"{first.name!r} ({described(first.desc, first.ranks)}); install(min_size=1) on all ranks "
        f"makes {'them' if several else 'it'} reloadable"
    )


@dataclass(frozen=True)
class OperationStatus:
    """The progress of a running offload or reload on this rank.

    Attributes:
        sequence: number of the operation in this job, equal on all ranks that are in it; 0 before
            the first request to the store.
        phase: the next barrier, as in the waits of a :class:`Report`; empty after the last one.
        waiting: whether this rank has arrived there and waits for other ranks.
        started_at: Unix time of the call, in seconds.
        since: Unix time at which this rank arrived at the barrier, or began its work before it.
        doing: the current work of this rank, as text; empty while it waits.
        groups_done: number of groups that are done in the current or last step (releasing,
            suspending, rebuilding or connecting).
        groups: number of groups in that step; 0 before the first.
    """

    operation: str
    sequence: int
    phase: str
    waiting: bool
    started_at: float
    since: float
    doing: str = ""
    groups_done: int = 0
    groups: int = 0

    def __str__(self) -> str:
        waited = max(0.0, time.time() - self.since)
        at = f", before barrier {self.phase!r}" if self.phase else ""
        what = "waiting for other ranks" if self.waiting else self.doing or "working"
        done = f"; {self.groups_done} of {self.groups} groups done" if self.groups else ""
        return f"{self.operation} is running{at}: {what} for {waited:.1f} s{done}"


@dataclass(frozen=True)
class Status:
    """The state of this process; see :func:`reloadpg.status`.

    Attributes:
        installed: whether the patches are in place.
        initialized: whether a default group exists.
        rank, world_size: in the default group, None before it exists.
        state: ``live``, ``offloaded`` or ``failed``: the worst state of the groups.
        generation: number of completed reloads of the job, of any set. A recovery counts as one.
        options: the options of ``install``.
        groups: the reloadable groups, WORLD first.
        memory: bytes in use now by source; see ``reloadpg.c10d.memory``.
        foreign: patched names that other code has changed since, with their current value.
        last_error: the error that the last operation raised; empty if it raised none.
        unmanaged: the groups that are selected but not reloadable, by name, with the reason. They
            keep their communicators.
        unfinished: communicators that are still being destroyed or created after a failed
            operation, as text; their memory is not free.
        bypassed_groups: the groups that bypass, each with the reason; empty if not installed.
        running: the running offload or reload, or None.
        sets: the sets of groups that this rank knows, by name.
        borrowed: what other code holds of the reloadable groups; see :class:`Borrowed`.
        off: whether nothing is installed because of ``RELOADPG=off``.
    """

    installed: bool
    initialized: bool
    rank: int | None
    world_size: int | None
    state: str
    generation: int
    options: Mapping[str, Any]
    groups: tuple[GroupStatus, ...]
    memory: Mapping[str, int] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    last_error: str = ""
    unmanaged: Mapping[str, str] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()
    bypassed_groups: tuple[BypassedGroup, ...] = ()
    running: OperationStatus | None = None
    sets: Mapping[str, SetStatus] = field(default_factory=dict)
    borrowed: tuple[Borrowed, ...] = ()
    off: bool = False

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that the live communicators report; None if none reports."""
        known = [g.memory_bytes for g in self.groups if g.memory_bytes is not None]
        return sum(known) if known else None

    def __str__(self) -> str:
        off = "off, by RELOADPG=off" if self.off else "not installed"
        head = (
            f"reloadpg: {'installed' if self.installed else off}, "
            f"{'rank ' + str(self.rank) if self.initialized else 'not initialized'}, "
            f"{self.state}, generation {self.generation}, "
            f"{counted(len(self.groups), 'reloadable group')}, {len(self.bypassed_groups)} bypassed"
        )
        lines = [head] if self.running is None else [str(self.running), head]
        if self.last_error:
            lines.append(f"last error: {self.last_error}")
        lines += self.unfinished
        lines += [f"not reloadable: group {n!r}: {reason}" for n, reason in self.unmanaged.items()]
        bypassed: dict[str, list[str]] = {}
        for one in self.bypassed_groups:
            shown = f"{one.name!r} ({described(one.desc, one.ranks)})"
            bypassed.setdefault(one.reason, []).append(shown)
        lines += [f"bypassed: group {', '.join(n)}: {reason}" for reason, n in bypassed.items()]
        lines += filter(None, [groups_of_one_rank(self.bypassed_groups)])
        if len(self.sets) > 1:
            lines += [f"set {name}: {one.state}" for name, one in self.sets.items()]
        lines += [f"borrowed: {one}" for one in self.borrowed]
        rows = []
        for g in self.groups:
            desc = described(g.desc, g.ranks)
            row = (g.name, desc, g.set, len(g.ranks), g.backend, g.state, g.generation, g.timeout_s)
            rows.append(row)
        header = ("name", "desc", "set", "size", "backend", "state", "generation", "timeout s")
        return "\n".join([*lines, table(header, rows)] if rows else lines)
