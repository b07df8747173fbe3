"""The policy: a two-block causal transformer that reads a digit and its own answer before it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from .task import DIGITS, LENGTH

__all__ = ["BLOCKS", "WIDTH", "Policy", "previous_actions"]

WIDTH = 64
HEADS = 4
BLOCKS = 2
_NONE = DIGITS
"""The answer before the first one."""


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """One block over positions ``start`` and after.

        Args:
            hidden: ``(batch, positions, WIDTH)``.
            cache: keys and values of all positions, ``(2, batch, LENGTH, WIDTH)``: those before
                ``start`` are read, those of ``hidden`` are written. None when all are here.
            start: the first position in ``hidden``.
        """
        batch, count, _ = hidden.shape
        query, key, value = self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1)
        if cache is not None:
            cache[0, :, start : start + count] = key
            cache[1, :, start : start + count] = value
            key, value = cache[:, :, : start + count]

        def heads(x: Tensor) -> Tensor:
            return x.reshape(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)

        # Attention is written out: the fused kernels' backward adds in no fixed order on a GPU,
        # and the demo compares bits.
        scores = heads(query) @ heads(key).transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        future = torch.ones(count, start + count, dtype=torch.bool, device=hidden.device)
        scores = scores.masked_fill(future.triu(start + 1), float("-inf"))
        mixed = (scores.softmax(dim=-1) @ heads(value)).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + self.project(mixed)
        return hidden + cast(Tensor, self.mlp(self.mlp_norm(hidden)))


class Policy(nn.Module):
    """Scores of the ten answers at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(DIGITS + DIGITS + 1 + LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, DIGITS, bias=False)

    def embed(self, digits: Tensor, previous: Tensor, start: int = 0) -> Tensor:
        """Digits, the answers before them and their positions as vectors of WIDTH."""
        positions = torch.arange(start, start + digits.shape[1], device=digits.device)
        features = [
            one_hot(digits, DIGITS),
            one_hot(previous, DIGITS + 1),
            one_hot(positions, LENGTH).expand(digits.shape[0], -1, -1),
        ]
        return cast(Tensor, self.read(torch.cat(features, dim=-1).to(self.read.weight.dtype)))

    def forward(
        self,
        digits: Tensor,
        previous: Tensor,
        caches: Tensor | None = None,
        start: int = 0,
    ) -> Tensor:
        hidden = self.embed(digits, previous, start)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, None if caches is None else caches[index], start)
        return cast(Tensor, self.head(self.norm(hidden)))


def previous_actions(actions: Tensor) -> Tensor:
    """The answers one position later: what the policy reads beside each digit."""
    first = torch.full_like(actions[:, :1], _NONE)
    return torch.cat([first, actions[:, :-1]], dim=1)
