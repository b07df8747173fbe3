"""Where a group is in its life, and what was done with it so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["NEXT_CALL", "GroupState", "History"]


class GroupState(str, Enum):
    """Where a group is in its life."""

    LIVE = "live"
    OFFLOADED = "offloaded"
    FAILED = "failed"
    DESTROYED = "destroyed"

    def __str__(self) -> str:
        return self.value


NEXT_CALL = {
    GroupState.OFFLOADED: "Call reloadpg.reload() on all ranks, then use the group again.",
    GroupState.FAILED: (
        "Its last offload or reload did not finish. Call reloadpg.reload() on all ranks again."
    ),
    GroupState.DESTROYED: "It was destroyed and is not rebuilt; create a new group.",
}


@dataclass
class History:
    """What was done with a group so far.

    Attributes:
        strategy: how it was last released; empty before the first time.
        held_bytes: what its communicator held then by its own account, or None.
        suspended_bytes: what of that a suspend gives back.
        cycles: how often it was released.
        offload_ms, reload_ms: its part in the last of each; None before the first.
    """

    strategy: str = ""
    held_bytes: int | None = None
    suspended_bytes: int = 0
    cycles: int = 0
    offload_ms: float | None = None
    reload_ms: float | None = None
