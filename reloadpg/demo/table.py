"""How an iteration is shown: a line while the demo runs, a row of the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import table

__all__ = ["Row", "cycles_table", "mebibytes"]


def mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class Row:
    """One iteration, over all ranks.

    Attributes:
        cycle: number of the iteration, from 1.
        loss: mean of all ranks' losses.
        reward: mean reward of what was generated after training; 1 is the best.
        groups: groups offloaded, all ranks' together; None in a run that does not offload.
        released_bytes: memory that offloading them released, all ranks' together.
        offload_ms: time of the offload on the slowest rank.
        reload_ms: time of the reload on the slowest rank.
    """

    cycle: int
    loss: float
    reward: float
    groups: int | None = None
    released_bytes: int = 0
    offload_ms: float = 0.0
    reload_ms: float = 0.0

    @classmethod
    def of(cls, everyone: Sequence[dict[str, Any]]) -> Row:
        """From what each rank saw."""
        first = everyone[0]
        row = cls(first["cycle"], first["mean_loss"], first["reward"])
        if "groups_offloaded" not in first:
            return row
        released = [next(iter(seen["released_bytes"].values())) for seen in everyone]
        return cls(
            row.cycle,
            row.loss,
            row.reward,
            sum(seen["groups_offloaded"] for seen in everyone),
            sum(released),
            max(seen["offload_ms"] for seen in everyone),
            max(seen["reload_ms"] for seen in everyone),
        )

    def line(self, cycles: int) -> str:
        """The iteration in one line."""
        text = f"  cycle {self.cycle}/{cycles}: reward {self.reward:.2f}, loss {self.loss:+.4f}"
        if self.groups is None:
            return text
        return (
            f"{text}; {self.groups} groups offloaded in {self.offload_ms:.0f} ms, "
            f"{mebibytes(self.released_bytes)} freed, reloaded in {self.reload_ms:.0f} ms"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cycles_table(rows: Sequence[Row]) -> str:
    """All iterations. Groups and memory are all ranks' together, times the slowest rank's."""
    header = ("cycle", "groups", "released MiB", "offload ms", "reload ms", "reward")
    return table(
        header,
        [
            (
                row.cycle,
                row.groups,
                round(row.released_bytes / (1 << 20)),
                round(row.offload_ms),
                round(row.reload_ms),
                row.reward,
            )
            for row in rows
        ],
    )
