"""Which ranks form which parallel group, by the rules of Megatron's parallel state."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. What is left of the ranks is data-parallel.

    Attributes:
        ranks: number of ranks.
        tensor: tensor-parallel size of the dense layers; experts are not split.
        pipeline: number of pipeline stages.
        expert: number of expert-parallel ranks.
    """

    ranks: int
    tensor: int
    pipeline: int
    expert: int

    @classmethod
    def of(cls, ranks: int) -> Layout:
        """Two tensor-parallel ranks, then two stages, as far as the ranks can be divided."""
        tensor = 2 if ranks % 2 == 0 else 1
        pipeline = 2 if ranks % (2 * tensor) == 0 else 1
        return cls(ranks, tensor, pipeline, ranks // pipeline)

    @property
    def dense(self) -> dict[str, int]:
        """Sizes for the dense layers, in Megatron's order: the first varies fastest."""
        data = self.ranks // (self.tensor * self.pipeline)
        return {"tp": self.tensor, "cp": 1, "ep": 1, "dp": data, "pp": self.pipeline}

    @property
    def experts(self) -> dict[str, int]:
        """Sizes for the expert layers."""
        data = self.ranks // (self.expert * self.pipeline)
        return {"tp": 1, "cp": 1, "ep": self.expert, "dp": data, "pp": self.pipeline}

    def groups(self) -> list[tuple[str, list[int]]]:
        """Description and ranks of all groups, in the order in which Megatron makes them."""

        def dense(names: str) -> list[list[int]]:
            return _groups(self.dense, names)

        def expert(names: str) -> list[list[int]]:
            return _groups(self.experts, names)

        kinds = [
            ("DATA_PARALLEL_GROUP_WITH_CP", dense("dp-cp")),
            ("DATA_PARALLEL_GROUP", dense("dp")),
            ("CONTEXT_PARALLEL_GROUP", dense("cp")),
            ("MODEL_PARALLEL_GROUP", dense("tp-pp")),
            ("TENSOR_MODEL_PARALLEL_GROUP", dense("tp")),
            ("PIPELINE_MODEL_PARALLEL_GROUP", dense("pp")),
            ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", dense("tp-dp-cp")),
            ("TENSOR_AND_DATA_PARALLEL_GROUP", dense("tp-dp")),
            ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", dense("tp-cp")),
            ("EXPERT_MODEL_PARALLEL_GROUP", expert("ep")),
            ("EXPERT_TENSOR_PARALLEL_GROUP", expert("tp")),
            ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", expert("tp-ep")),
            ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", expert("tp-ep-pp")),
            ("EXPERT_DATA_PARALLEL_GROUP", expert("dp")),
            ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", [list(range(self.ranks))]),
        ]
        groups = []
        for desc, rank_lists in kinds:
            for ranks in rank_lists:
                groups.append((desc, ranks))
                if desc == "PIPELINE_MODEL_PARALLEL_GROUP":
                    # The first and the last stage hold the embedding, the first alone the
                    # position embedding.
                    groups.append(("EMBEDDING_GROUP", sorted({ranks[0], ranks[-1]})))
                    groups.append(("POSITION_EMBEDDING_GROUP", ranks[:1]))
        return groups


def _groups(sizes: dict[str, int], names: str) -> list[list[int]]:
    """All groups that span the named dimensions, such as ``tp-pp``; ranks in rising order."""
    dims = list(reversed(sizes))  # the last dimension of a tensor varies fastest
    chosen = [dims.index(name) for name in dims if name in names.split("-")]
    rest = [index for index in range(len(dims)) if index not in chosen]
    grid = torch.arange(prod(sizes.values())).reshape([sizes[name] for name in dims])
    width: int = prod([sizes[dims[index]] for index in chosen])
    lists: list[list[int]] = grid.permute(*rest, *chosen).reshape(-1, width).tolist()
    return lists
