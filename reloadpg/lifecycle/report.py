"""Reports of operations and the status of a process: plain values, printable, JSON-able."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import counted, described, mebibytes, table

__all__ = [
    "BypassedGroup",
    "Fault",
    "GroupReport",
    "GroupStatus",
    "OperationStatus",
    "Report",
    "Reports",
    "SetStatus",
    "Span",
    "Status",
]

_NOT_OURS = frozenset({"callbacks", "collect", "device", "groups", "store"})
"""Phases of what communicators, devices, the network or the caller's code take."""


@dataclass(frozen=True)
class GroupReport:
    """One group's part in an operation.

    Attributes:
        name: its ``group_name``.
        desc: its ``group_desc``.
        backend: the backend string that it was created with.
        size: number of members.
        strategy: how it was released or brought back: ``recreate``, ``suspend``, or ``skip`` for
            a communicator that was never used, so that nothing was there to suspend.
        ms: wall time in milliseconds.
        start_ms: when its part began, in milliseconds since the start of the operation.
        reason: why this strategy, where there was a choice.
        bytes: what its communicator held by its own account when it was released; None if the
            backend gives none.
        set: the set that it belongs to.
    """

    name: str
    desc: str
    backend: str
    size: int
    strategy: str
    ms: float
    start_ms: float = 0.0
    reason: str = ""
    bytes: int | None = None
    set: str = "trainer"


@dataclass(frozen=True)
class Span:
    """A phase of an operation: name, start (since the operation's own) and length, in ms."""

    name: str
    start_ms: float
    ms: float

    @property
    def is_wait(self) -> bool:
        """Whether it was spent waiting for other ranks."""
        return self.name.startswith("wait.")


@dataclass(frozen=True)
class Fault:
    """What one rank brought to a recovery.

    Attributes:
        rank: the rank.
        reason: its error, or what it gave to ``recover``; empty if it was called in.
        where: the collective and the line of the program that raised it, as far as known.
        late: groups in which it had begun fewer collectives than another member.
        repeats: whether the step may be repeated; False for an error that ``retrying`` does not
            repeat.
    """

    rank: int
    reason: str = ""
    where: str = ""
    late: tuple[str, ...] = ()
    repeats: bool = True

    def __str__(self) -> str:
        parts = [self.where, self.reason.partition("\n")[0]]
        if self.late:
            parts.append(f"had begun fewer collectives than others in group {', '.join(self.late)}")
        return f"rank {self.rank}: " + ("; ".join(filter(None, parts)) or "called in")


@dataclass(frozen=True)
class Report:
    """The record of one call of ``offload``, ``reload`` or ``recover`` on this rank.

    Attributes:
        operation: ``offload``, ``reload`` or ``recover``.
        changed: False if there was nothing to do.
        generation: number of completed reloads of the job, of any set.
        groups: the groups that were released or rebuilt, in the order in which it was done.
        spans: phases and waits in the order in which they ended; ``wait.*`` is time spent
            waiting for other ranks.
        total_ms: wall time of the whole call, in milliseconds.
        note: why nothing was done, where nothing was.
        memory: bytes in use by moment (``before``, each phase, ``after``) and source; see
            ``reloadpg.lifecycle.memory``. ``released_bytes`` is taken from the first source.
        warnings: what keeps memory from coming back, in words.
        error: the error that the call raised; empty if it raised none.
        started_at: Unix time at the call, in seconds.
        rank: this process's rank in the default group, None without one.
        world_size: number of ranks, None without a default group.
        unfinished: what operations that failed have left running, in words: communicators that
            are still being destroyed, or created; what they hold is not free.
        moments_ms: when each moment of ``memory`` was, in milliseconds since the start.
        faults: of ``recover``, what ranks brought to it, those first that were late in a group;
            the same on all ranks, and at most 32. Ranks that were only called in are left out.
        replaced: of ``recover``, the ranks that came to it with a new process, by ``rejoin``; the
            same on all ranks.
        sets: the sets that it was called for: ``all``, or their names with commas between.
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
    unfinished: tuple[str, ...] = ()
    moments_ms: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    replaced: tuple[int, ...] = ()
    sets: str = "all"

    @property
    def phases_ms(self) -> dict[str, float]:
        """Wall time by phase, in milliseconds."""
        phases: dict[str, float] = {}
        for span in self.spans:
            phases[span.name] = phases.get(span.name, 0.0) + span.ms
        return phases

    @property
    def overhead_ms(self) -> float:
        """The library's own share: total less groups, devices, store and waiting. Milliseconds."""
        outside = [span.ms for span in self.spans if span.is_wait or span.name in _NOT_OURS]
        return self.total_ms - sum(outside)

    @property
    def wait_ms(self) -> float:
        """Time spent waiting for other ranks, in milliseconds."""
        return sum(span.ms for span in self.spans if span.is_wait)

    @property
    def memory_source(self) -> str:
        """Source of ``released_bytes`` and ``restored_bytes``; empty if nothing measures them."""
        return next(iter(self.memory.get("before", ())), "")

    @property
    def released_bytes(self) -> int | None:
        """Bytes that came back on this rank; None for a reload, or if nothing measures them."""
        return self._change() if self.operation == "offload" else None

    @property
    def restored_bytes(self) -> int | None:
        """Bytes that the reload took on this rank; None for an offload, or if nothing measures
        them. Communicators that connect at their first use take theirs later.
        """
        change = self._change() if self.operation == "reload" else None
        return None if change is None else -change

    @property
    def moved_bytes(self) -> int | None:
        """``released_bytes`` of an offload, ``restored_bytes`` of a reload."""
        return self.released_bytes if self.operation == "offload" else self.restored_bytes

    def _change(self) -> int | None:
        source = self.memory_source
        before, after = self.memory.get("before", {}), self.memory.get("after", {})
        return before[source] - after[source] if source and source in after else None

    @property
    def skipped(self) -> tuple[GroupReport, ...]:
        """The groups whose communicators were never used, so that nothing was done to them."""
        return tuple(group for group in self.groups if group.strategy == "skip")

    def to_dict(self) -> dict[str, float | int | str | bool]:
        """Scalars under flat names (``offload/total_ms``), as loggers of metrics take them.

        Everything is in :meth:`details`.
        """
        strategies = [group.strategy for group in self.groups]
        values: dict[str, float | int | str | bool | None] = {
            "total_ms": self.total_ms,
            "overhead_ms": self.overhead_ms,
            "groups": len(self.groups),
            "groups_ms": sum(group.ms for group in self.groups),
            "slowest_group_ms": max((group.ms for group in self.groups), default=0.0),
            **{f"groups_{name}": strategies.count(name) for name in dict.fromkeys(strategies)},
            **{f"{name}_ms": ms for name, ms in self.phases_ms.items()},
            "released_bytes": self.released_bytes,
            "restored_bytes": self.restored_bytes,
            "warnings": len(self.warnings),
            "changed": self.changed,
            "failed": bool(self.error),
            "generation": self.generation,
        }
        return {f"{self.operation}/{k}": v for k, v in values.items() if v is not None}

    def details(self) -> dict[str, Any]:
        """All values, nested, with plain types only."""
        return {
            **asdict(self),
            "memory": {moment: dict(by_source) for moment, by_source in self.memory.items()},
            "moments_ms": dict(self.moments_ms),
            "phases_ms": self.phases_ms,
            "overhead_ms": self.overhead_ms,
            "memory_source": self.memory_source,
            "released_bytes": self.released_bytes,
            "restored_bytes": self.restored_bytes,
        }

    def to_json(self) -> str:
        """:meth:`details` as JSON."""
        return json.dumps(self.details())

    def __str__(self) -> str:
        if self.error:
            return f"{self.operation}: failed after {self.total_ms:.1f} ms: {self.error}"
        if not self.changed:
            return f"{self.operation}: nothing to do ({self.note or 'already so'})"
        moved, memory = self.moved_bytes, ""
        if moved is not None:
            verb = "released" if self.operation == "offload" else "restored"
            memory = f", {mebibytes(moved)} {verb} ({self.memory_source})"
        return (
            f"{self.operation}{'' if self.sets == 'all' else f' of {self.sets}'}: "
            f"{counted(len(self.groups), 'group')} in {self.total_ms:.1f} ms"
            f"{memory}, generation {self.generation}"
            + "".join(f"; {fault}" for fault in self.faults)
        )


class Reports(list[Report]):
    """The reports of many ranks, in rank order; printed as a table, one row a rank."""

    def __str__(self) -> str:
        rows = [
            (
                one.rank,
                one.operation,
                len(one.groups),
                one.total_ms,
                one.wait_ms,
                _moved(one),
                one.generation,
                one.error.partition("\n")[0] or ("" if one.changed else one.note or "already so"),
            )
            for one in self
        ]
        header = ("rank", "operation", "groups", "ms", "waiting ms", "MiB", "generation", "note")
        return table(header, rows)


def _moved(report: Report) -> float | None:
    """MiB that came back, or that were taken, on this rank."""
    moved = report.moved_bytes
    return None if moved is None else round(moved / 2**20, 2) + 0.0


@dataclass(frozen=True)
class GroupStatus:
    """The state of one reloadable group.

    Attributes:
        name: its ``group_name``.
        desc: its ``group_desc``.
        ranks: global ranks of its members.
        backend: the backend string that it was created with.
        state: ``live``, ``offloaded`` or ``failed``.
        generation: the job's count of reloads when its communicator was built.
        timeout_s: its current timeout in seconds; None if its backend has none.
        last_error: why it failed; empty if it did not.
        strategy: how it was last released; empty if it never was.
        memory_bytes: what its communicator holds by its own account; None if its backend gives
            none.
        cycles: how often it was offloaded.
        last_offload_ms, last_reload_ms: its part in the last of each; None before the first.
        set: the set that it belongs to.
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
    cycles: int = 0
    last_offload_ms: float | None = None
    last_reload_ms: float | None = None
    set: str = "trainer"


@dataclass(frozen=True)
class SetStatus:
    """The state of one set of groups.

    Attributes:
        state: ``live``, ``offloaded`` or ``failed``: the worst of its groups' on this rank; of a
            set without groups on this rank, what the last operation left.
        groups: number of its reloadable groups on this rank.
        generation: the job's count of reloads when the set was last reloaded.
        cycles: number of completed offloads.
    """

    state: str
    groups: int
    generation: int
    cycles: int


@dataclass(frozen=True)
class BypassedGroup:
    """A group that the options of ``install`` leave as torch made it.

    Attributes:
        name: its ``group_name``.
        desc: its ``group_desc``.
        ranks: global ranks of its members.
        backend: the backend string that it was created with.
        reason: why, in words.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    reason: str


@dataclass(frozen=True)
class OperationStatus:
    """How far a running offload or reload is, on this rank.

    Attributes:
        operation: ``offload`` or ``reload``.
        sequence: number of the operation in this job, equal on all ranks that are in it; 0 while
            it has not begun to look for the others.
        phase: the next barrier, as in the waits of a :class:`Report`; empty after the last one.
        waiting: whether this rank has arrived there and waits for other ranks.
        started_at: Unix time of the call, in seconds.
        since: Unix time at which this rank arrived at the barrier, or else began to work towards
            it.
        doing: what this rank is working at, in words; empty while it waits.
        groups_done: number of groups that are done in the present step (releasing, suspending,
            rebuilding or connecting them), or in the last one.
        groups: number of groups of that step; 0 before the first.
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

    def details(self) -> dict[str, Any]:
        """All values, with plain types only."""
        return asdict(self)

    def __str__(self) -> str:
        waited = max(0.0, time.time() - self.since)
        at = f", before its barrier {self.phase!r}" if self.phase else ""
        what = "waits for other ranks" if self.waiting else self.doing or "works"
        done = f"; {self.groups_done} of {self.groups} groups are done" if self.groups else ""
        return f"{self.operation} is running{at}: {what} for {waited:.1f} s{done}"


@dataclass(frozen=True)
class Status:
    """The state of this process; see :func:`reloadpg.status`.

    Attributes:
        installed: whether the patches are in place.
        initialized: whether a default group exists.
        rank: this process's rank in the default group, None before it exists.
        world_size: number of ranks, None before the default group exists.
        state: ``live``, ``offloaded`` or ``failed``: the worst of the groups'.
        generation: number of completed reloads, of any set.
        cycles: number of completed offloads, of any set.
        options: what ``install`` was given.
        groups: the reloadable groups, WORLD first.
        bypassed: number of groups that the options of ``install`` leave alone.
        memory: bytes in use now by source; see ``reloadpg.lifecycle.memory``.
        foreign: patched names that somebody else has changed since, with what they hold.
        last_error: the error that the last operation raised; empty if it raised none.
        unmanaged: by name, the groups that the options of ``install`` select and that are not
            reloadable, with the reason: they keep their communicators.
        unfinished: as in :class:`Report`.
        bypassed_groups: the groups that the options of ``install`` leave alone, each with the
            reason; empty while nothing is installed.
        running: the offload or reload that is in progress; None if there is none.
        sets: the sets of groups that this rank knows, by name.
        kept: communicators of a rollout engine in this process that are no process groups, by name,
            with what frees their memory: an offload leaves them as they are.
    """

    installed: bool
    initialized: bool
    rank: int | None
    world_size: int | None
    state: str
    generation: int
    cycles: int
    options: Mapping[str, Any]
    groups: tuple[GroupStatus, ...]
    bypassed: int
    memory: Mapping[str, int] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    last_error: str = ""
    unmanaged: Mapping[str, str] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()
    bypassed_groups: tuple[BypassedGroup, ...] = ()
    running: OperationStatus | None = None
    sets: Mapping[str, SetStatus] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that the live communicators hold by their own account; None if none gives one."""
        known = [g.memory_bytes for g in self.groups if g.memory_bytes is not None]
        return sum(known) if known else None

    @property
    def slowest_group(self) -> str:
        """Name of the group that took longest in the last offload and reload; empty before."""
        slowest = max(self.groups, key=_last_ms, default=None)
        return slowest.name if slowest is not None and _last_ms(slowest) else ""

    def to_dict(self) -> dict[str, float | int | str | bool]:
        """Scalars under flat names (``status/generation``), as loggers of metrics take them.

        Everything is in :meth:`details`.
        """
        states = [group.state for group in self.groups]
        values: dict[str, float | int | str | bool | None] = {
            "installed": self.installed,
            "initialized": self.initialized,
            "state": self.state,
            "generation": self.generation,
            "cycles": self.cycles,
            "groups": len(self.groups),
            **{f"groups_{state}": states.count(state) for state in dict.fromkeys(states)},
            "bypassed": self.bypassed,
            "unmanaged": len(self.unmanaged),
            "unfinished": len(self.unfinished),
            "memory_bytes": self.memory_bytes,
            "failed": bool(self.last_error),
            "running": self.running is not None,
        }
        return {f"status/{k}": v for k, v in values.items() if v is not None}

    def details(self) -> dict[str, Any]:
        """All values, nested, with plain types only."""
        return {
            **asdict(self),
            "options": dict(self.options),
            "memory": dict(self.memory),
            "unmanaged": dict(self.unmanaged),
            "kept": dict(self.kept),
            "sets": {name: asdict(one) for name, one in self.sets.items()},
            "memory_bytes": self.memory_bytes,
            "slowest_group": self.slowest_group,
        }

    def to_json(self) -> str:
        """:meth:`details` as JSON."""
        return json.dumps(self.details())

    def __str__(self) -> str:
        head = (
            f"reloadpg: {'installed' if self.installed else 'not installed'}, "
            f"{'rank ' + str(self.rank) if self.initialized else 'not initialized'}, "
            f"{self.state}, generation {self.generation}, "
            f"{counted(len(self.groups), 'reloadable group')}, {self.bypassed} bypassed"
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
        if len(self.sets) > 1:
            lines += [f"set {name}: {one.state}" for name, one in self.sets.items()]
        lines += [f"not a process group, kept: {text}" for text in self.kept.values()]
        rows = []
        for g in self.groups:
            desc = described(g.desc, g.ranks)
            row = (g.name, desc, g.set, len(g.ranks), g.backend, g.state, g.generation, g.timeout_s)
            rows.append(row)
        header = ("name", "desc", "set", "size", "backend", "state", "generation", "timeout s")
        return "\n".join([*lines, table(header, rows)] if rows else lines)


def _last_ms(group: GroupStatus) -> float:
    return (group.last_offload_ms or 0.0) + (group.last_reload_ms or 0.0)
