"""What one run of the demo's job is told: the same for all its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        ranks: number of ranks.
        cycles: number of iterations of the loop.
        offload: whether groups are offloaded while the rollout engine generates; without it the
            run does not install reloadpg at all.
        accelerator: ``cuda`` or ``simulated``.
        steps: optimizer steps in each iteration.
        rollouts: sequences that each rank generates in each iteration.
        probes: sequences, the same on all ranks, that show whether all generate alike.
        seed: of weights, digits and noise.
        launcher: process without which the ranks end; by default the one that makes the settings.
    """

    ranks: int
    cycles: int
    offload: bool
    accelerator: str
    steps: int = 12
    rollouts: int = 256
    probes: int = 16
    seed: int = 1234
    launcher: int = field(default_factory=os.getpid)
