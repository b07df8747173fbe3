"""megatron-core trains a small GPT, tensor 2 x pipeline 2, through its own schedule and cycles.

megatron-core is in the ``test`` extra; without it these tests fail, they are not skipped. What of
CUDA is answered by the CPU, and that nothing else is, is written in ``gpt_job``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.gpt_job import PRELOAD, GptTraining, cuda_on_cpu

import reloadpg

STEPS = 8
AFTER_STEPS = (1, 3, 4)


@dataclass
class Trained:
    """The results of one rank's training, which must be equal with and without cycles."""

    losses: list[list[float]]
    """Of each step's microbatches; only on the last stage."""
    norms: list[float]
    weights: dict[str, Any]


def train(store: dist.Store, rank: int, between: Callable[[GptTraining], None]) -> Trained:
    """Run one job; call `between` after some steps."""
    worlds.init(store=store, rank=rank, world_size=4)
    training = GptTraining()
    # The 1F1B schedule of megatron-core.
    assert training.schedule.__name__ == "forward_backward_pipelining_without_interleaving"
    assert [group.size() for group in training.groups.values()] == [2, 2]
    losses, norms = [], []
    for step in range(STEPS):
        of_step, norm = training.step(step)
        losses.append(of_step)
        norms.append(norm)
        if step in AFTER_STEPS:
            between(training)
    trained = Trained(losses, norms, training.weights())
    training.end()
    return trained


def no_cycle(training: GptTraining) -> None:
    """The groups are those of torch."""
    for group in training.groups.values():
        assert not isinstance(group, reloadpg.ReloadableProcessGroup)


def cycle(training: GptTraining) -> None:
    """Every group is offloaded and reloaded."""
    for group in training.groups.values():
        assert isinstance(group, reloadpg.ReloadableProcessGroup)
    with reloadpg.offloaded() as report:
        assert {group.state for group in reloadpg.status().groups} == {"offloaded"}
    assert {group.state for group in reloadpg.status().groups} == {"live"}
    assert len(report.groups) >= 8


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=200, preload=PRELOAD)
def test_training_with_cycles_is_bit_equal_to_training_without(rank: int) -> None:
    """Losses, gradient norms and weights of every rank, dropout and tied embedding included.

    The job runs twice in the same processes, since importing megatron-core is slow.
    """
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    with cuda_on_cpu():
        plain = train(dist.PrefixStore("plain", store), rank, no_cycle)
        with reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta(seconds=60)):
            assert train(dist.PrefixStore("cycled", store), rank, cycle) == plain
    # So that the comparison proves something: the losses fall, and stages and parts differ.
    if rank < 2:
        assert plain.losses == [[]] * STEPS
    else:
        assert [len(losses) for losses in plain.losses] == [4] * STEPS
        assert sum(plain.losses[-1]) < sum(plain.losses[0])
    store.set(f"trained {rank}", pickle.dumps(plain))
    every = [pickle.loads(store.get(f"trained {one}")) for one in range(4)]
    first, part, last, other = every
    assert last.losses == other.losses
    assert first.weights != part.weights
    assert len({one.norms[0] for one in every}) == 1
    tied = "embedding.word_embeddings.weight", "output_layer.weight"
    assert first.weights[tied[0]] == last.weights[tied[1]]
