"""The rollout engine: generates with a whole copy of the weights, in memory that it is given.

It uses no process group. Weights, key-value cache and all are carved out of one buffer of the
size that offloading the groups has freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .policy import BLOCKS, WIDTH, Policy, previous_actions
from .task import DIGITS, LENGTH

__all__ = ["Rollouts", "generate"]

_ALIGNMENT = 256
"""Bytes. Every tensor starts alike in both runs: CPU kernels pick their path by alignment."""


@dataclass(frozen=True)
class Rollouts:
    """What the policy did: digits read, answers, and the log-probability of each answer."""

    digits: Tensor
    actions: Tensor
    logprobs: Tensor
    buffer_bytes: int

    def part(self, begin: int, end: int) -> Rollouts:
        """The sequences from ``begin`` up to ``end``."""
        rows = slice(begin, end)
        return Rollouts(
            self.digits[rows], self.actions[rows], self.logprobs[rows], self.buffer_bytes
        )


class _Buffer:
    """One allocation, given out in pieces."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Written to, not only asked for: an untouched allocation takes no memory under Linux.
        self.bytes = torch.full((size,), 0, dtype=torch.uint8, device=device)
        self.used = 0

    def carve(self, shape: tuple[int, ...]) -> Tensor:
        size = 4 * prod(shape)
        piece = self.bytes[self.used : self.used + size].view(torch.float32).view(shape)
        self.used += _padded(size)
        return piece


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def generate(
    weights: Mapping[str, Tensor],
    digits: Tensor,
    noise: Tensor,
    *,
    free_bytes: int,
    device: torch.device,
) -> Rollouts:
    """Answer every digit of every sequence, one position after the other.

    Local: it never touches a process group.

    Args:
        weights: the whole policy's weights, on the CPU.
        digits: ``(sequences, LENGTH)``, on the CPU.
        noise: ``(sequences, LENGTH, DIGITS)``, added to the scores before the best answer is
            taken: Gumbel noise samples from the policy, zeros take its best answer.
        free_bytes: size of the buffer to fill; less than the engine needs is rounded up.
        device: where to generate.
    """
    cache_shape = (BLOCKS, 2, len(digits), LENGTH, WIDTH)
    shapes = [cache_shape, *(tuple(weight.shape) for weight in weights.values())]
    needed = sum(_padded(4 * prod(shape)) for shape in shapes)
    buffer = _Buffer(max(needed, free_bytes), device)
    caches = buffer.carve(cache_shape)
    placed = {name: buffer.carve(tuple(w.shape)).copy_(w) for name, w in weights.items()}
    with torch.device("meta"):
        policy = Policy()
    policy.load_state_dict(placed, assign=True)

    digits, noise = digits.to(device), noise.to(device)
    actions = torch.zeros_like(digits)
    logprobs = torch.zeros(digits.shape, device=device)
    for position in range(LENGTH):
        now = slice(position, position + 1)
        previous = previous_actions(actions)[:, now]
        scores = policy(digits[:, now], previous, caches, position)[:, 0].log_softmax(dim=-1)
        actions[:, position] = (scores + noise[:, position]).argmax(dim=-1)
        logprobs[:, position] = scores.gather(1, actions[:, now])[:, 0]
    return Rollouts(digits, actions, logprobs, buffer.bytes.numel())


def gumbel(sequences: int, generator: torch.Generator) -> Tensor:
    """Noise that samples from the policy, drawn on the CPU: the same on every accelerator."""
    uniform = torch.rand((sequences, LENGTH, DIGITS), generator=generator)
    return -(-uniform.clamp_min(1e-20).log()).log()
