"""What an offload or a reload did, and how things stand: plain values, printable, JSON-able."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GroupReport", "GroupStatus", "Report", "Status", "table"]

_NOT_OURS = frozenset({"callbacks", "collect", "connect", "device", "store"})
"""Phases of what devices, the network or the caller's code take."""


@dataclass(frozen=True)
class GroupReport:
    """One group's part in an operation. Times in milliseconds."""

    name: str
    desc: str
    backend: str
    size: int
    strategy: str
    ms: float


@dataclass(frozen=True)
class Report:
    """What one call of ``offload`` or ``reload`` did on this rank.

    Attributes:
        operation: ``offload`` or ``reload``.
        changed: False if there was nothing to do.
        generation: number of completed reloads of the job.
        groups: the groups that were released or rebuilt, in the order in which it was done.
        phases_ms: wall time by phase, in milliseconds; ``wait.*`` is time spent waiting for
            other ranks.
        total_ms: wall time of the whole call, in milliseconds.
        note: why nothing was done, where nothing was.
    """

    operation: str
    changed: bool
    generation: int
    groups: tuple[GroupReport, ...] = ()
    phases_ms: Mapping[str, float] = ()  # type: ignore[assignment]
    total_ms: float = 0.0
    note: str = ""

    @property
    def overhead_ms(self) -> float:
        """The library's own share: total less groups, devices, store and waiting. Milliseconds."""
        outside = sum(
            ms
            for phase, ms in dict(self.phases_ms).items()
            if phase.startswith("wait.") or phase in _NOT_OURS
        )
        return self.total_ms - outside - sum(group.ms for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """All values, with plain types only."""
        return {
            **asdict(self),
            "phases_ms": dict(self.phases_ms),
            "overhead_ms": self.overhead_ms,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.operation}: nothing to do ({self.note or 'already so'})"
        return (
            f"{self.operation}: {len(self.groups)} groups in {self.total_ms:.1f} ms, "
            f"generation {self.generation}"
        )


@dataclass(frozen=True)
class GroupStatus:
    """How one reloadable group stands. ``timeout_s`` is its current timeout in seconds."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    state: str
    generation: int
    timeout_s: float | None
    last_error: str = ""


@dataclass(frozen=True)
class Status:
    """How this process stands; see :func:`reloadpg.status`.

    Attributes:
        installed: whether the patches are in place.
        initialized: whether a default group exists.
        rank: this process's rank in the default group, None before it exists.
        world_size: number of ranks, None before the default group exists.
        state: ``live``, ``offloaded`` or ``failed``: the worst of the groups'.
        generation: number of completed reloads.
        cycles: number of completed offloads.
        options: what ``install`` was given.
        groups: the reloadable groups, WORLD first.
        bypassed: number of groups that torch knows and this library leaves alone.
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

    def to_dict(self) -> dict[str, Any]:
        """All values, with plain types only."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        head = (
            f"reloadpg: {'installed' if self.installed else 'not installed'}, "
            f"{'rank ' + str(self.rank) if self.initialized else 'not initialized'}, "
            f"{self.state}, generation {self.generation}, {len(self.groups)} reloadable groups, "
            f"{self.bypassed} bypassed"
        )
        if not self.groups:
            return head
        rows = [
            (g.name, g.desc, len(g.ranks), g.backend, g.state, g.generation, g.timeout_s)
            for g in self.groups
        ]
        header = ("name", "desc", "size", "backend", "state", "generation", "timeout s")
        return f"{head}\n{table(header, rows)}"


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, numbers to the right, as wide as they need."""

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    cells = [[cell(value) for value in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [
        all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(header))
    ]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
