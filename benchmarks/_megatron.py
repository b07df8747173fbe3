"""The groups that a Megatron-style trainer makes: every rank makes the calls for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

TENSOR, PIPELINE, EXPERT = 8, 4, 8


def rank_lists(world_size: int, *, wide: bool = False) -> Iterator[list[int]]:
    """The rank lists of one model's groups, in the order in which Megatron-LM makes them.

    Tensor parallel 8, pipeline parallel 4, expert parallel 8, the rest data parallel. Context and
    expert-tensor parallel are 1: their groups are created anyway, as in Megatron.

    Args:
        world_size: a multiple of 64.
        wide: also the tensor x data parallel groups, whose size is a quarter of the job's.
    """
    dense = _Grid(world_size, tp=TENSOR, cp=1, dp=world_size // (TENSOR * PIPELINE), pp=PIPELINE)
    experts = _Grid(world_size, tp=1, ep=EXPERT, dp=world_size // (EXPERT * PIPELINE), pp=PIPELINE)
    yield from dense.along("dp")
    yield from dense.along("cp", "dp")
    yield from dense.along("cp")
    yield from dense.along("tp", "pp")
    yield from dense.along("tp")
    yield from dense.along("pp")
    for ranks in dense.along("pp"):
        yield [ranks[0], ranks[-1]]  # embedding
        yield [ranks[0]]  # position embedding
    if wide:
        yield from dense.along("tp", "cp", "dp")
        yield from dense.along("tp", "dp")
    yield from dense.along("tp", "cp")
    yield from experts.along("ep")
    yield from experts.along("tp")
    yield from experts.along("tp", "ep")
    yield from experts.along("tp", "ep", "pp")
    yield from experts.along("dp")


class _Grid:
    """Ranks numbered along named axes, the first axis fastest."""

    def __init__(self, world_size: int, **sizes: int) -> None:
        self.axes = list(sizes)
        self.ranks = torch.arange(world_size).view([sizes[axis] for axis in reversed(self.axes)])

    def along(self, *axes: str) -> Iterator[list[int]]:
        """The groups of ranks that differ along these axes only."""
        last = len(self.axes) - 1
        kept = [last - i for i, axis in enumerate(self.axes) if axis not in axes]
        inner = [last - i for i, axis in enumerate(self.axes) if axis in axes]
        table = self.ranks.permute(kept[::-1] + inner[::-1])
        size = 1
        for dimension in inner:
            size *= self.ranks.shape[dimension]
        for row in table.reshape(-1, size):
            yield row.tolist()
