"""``explain``: which groups would be reloadable, why not the others, and the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..groups.selection import BYPASS, Selection

__all__ = ["COMMUNICATOR_BYTES", "SOURCE", "Decision", "Explanation", "decide"]

COMMUNICATOR_BYTES = (500_000_000, 1_600_000_000)
"""What one NCCL communicator takes of a GPU, from the least to the most that was measured."""

SOURCE = (
    "0.5 to 1.6 GB a communicator and GPU, as others measured it: 544 MB with 2 ranks and 688 MB "
    "with more on A100, 576 MiB on GB200, about 256 MiB more with NVLS on 8 Hopper GPUs, up to "
    "512 MiB more for network buffers"
)


@dataclass(frozen=True)
class Decision:
    """One group of the rank.

    Attributes:
        name: torch's name of it, ``WORLD`` for the default group.
        desc: its description.
        ranks: global ranks of the members.
        backend: the backend as asked for.
        selected: the device types whose backend would be released; empty if the group bypasses.
        reason: why it bypasses, or what stays of it.
        destroyed: whether the script destroyed it again.
    """

    name: str
    desc: str
    ranks: Sequence[int]
    backend: str
    selected: tuple[str, ...]
    reason: str
    destroyed: bool

    @property
    def reloadable(self) -> bool:
        return bool(self.selected)


def decide(
    groups: Iterable[Mapping[str, Any]], policy: Selection, *, script_installs: bool
) -> list[Decision]:
    """What the policy says of each group that a run noted."""
    decided = []
    for group in groups:
        devices: dict[str, str] = group["devices"]
        size = len(group["ranks"])
        selected = policy.selected(devices, size)
        reason = _reason(policy, devices, size, selected)
        if group["is_world"] and not policy.world:
            selected, reason = (), "install(world=False)"
        elif script_installs and not group["installed"] and not group["is_world"]:
            selected, reason = (), "created before reloadpg.install()"
        decided.append(
            Decision(
                "WORLD" if group["is_world"] else group["name"],
                "" if group["is_world"] or group["desc"] == "undefined" else group["desc"],
                group["ranks"],
                group["backend"],
                selected,
                reason,
                group.get("destroyed", False),
            )
        )
    return decided


def _reason(
    policy: Selection, devices: Mapping[str, str], size: int, selected: Sequence[str]
) -> str:
    if selected:
        kept = [f"{device}:{devices[device]}" for device in devices if device not in selected]
        return f"{', '.join(kept)} stays" if kept else ""
    if size < policy.min_size:
        smaller = f"smaller than min_size={policy.min_size}"
        return f"single rank ({smaller})" if size == 1 else f"{size} ranks: {smaller}"
    names = sorted(set(devices.values()))
    if policy.backends is not None:
        return f"{', '.join(names)}: not in install(backends={sorted(policy.backends)})"
    if set(names) <= BYPASS:
        return f"{', '.join(names)} holds no memory of an accelerator"
    return f"{', '.join(names)} serves no accelerator here"


@dataclass(frozen=True)
class Explanation:
    """All groups of one rank, and what follows from them."""

    rank: int
    world_size: int
    policy: Selection
    decisions: Sequence[Decision]
    others: int

    @property
    def reloadable(self) -> list[Decision]:
        return [one for one in self.decisions if one.reloadable]

    @property
    def bypassed(self) -> Counter[str]:
        """Number of groups that bypass, by reason."""
        return Counter(one.reason for one in self.decisions if not one.reloadable)

    @property
    def communicators(self) -> int:
        """NCCL communicators of the rank that an offload would release."""
        return sum(
            any(name.startswith("nccl") for name in _backends(one))
            for one in self.reloadable
            if not one.destroyed
        )

    @property
    def memory_bytes(self) -> tuple[int, int]:
        """What these communicators take of the rank's GPU, least and most. An estimate."""
        least, most = COMMUNICATOR_BYTES
        return self.communicators * least, self.communicators * most

    def to_dict(self) -> dict[str, Any]:
        """All of it, with plain types only."""
        backends = self.policy.backends
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "policy": {
                "backends": None if backends is None else sorted(backends),
                "min_size": self.policy.min_size,
                "world": self.policy.world,
            },
            "groups": [
                {**asdict(one), "reloadable": one.reloadable, "ranks": list(one.ranks)}
                for one in self.decisions
            ],
            "groups_of_others": self.others,
            "bypassed": dict(self.bypassed),
            "memory": {
                "communicators": self.communicators,
                "least_bytes": self.memory_bytes[0],
                "most_bytes": self.memory_bytes[1],
                "estimated_from": SOURCE,
            },
        }


def _backends(one: Decision) -> list[str]:
    pairs = [pair.rpartition(":") for pair in one.backend.split(",")]
    return [name for device, _, name in pairs if not device or device in one.selected]
