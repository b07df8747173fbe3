"""The task: read digits one by one and say, each time, the largest digit so far."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DIGITS", "LENGTH", "draw", "rewards"]

DIGITS = 10
LENGTH = 8


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Digits to read, ``(count, LENGTH)``, on the CPU: every accelerator then gets the same."""
    return torch.randint(DIGITS, (count, LENGTH), generator=generator)


def rewards(digits: Tensor, actions: Tensor) -> Tensor:
    """1 for each right answer and 0 for each wrong one; guessing earns 0.1 on average."""
    return (actions == digits.cummax(dim=1).values).float()
