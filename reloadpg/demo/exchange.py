"""What the parallel groups do in each iteration: each one is used, and checked by value."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy, one_hot

from .parallel import ParallelGroups
from .policy import Policy, previous_actions
from .task import rewards

__all__ = ["all_reduced_sum", "evaluate", "expert_rewards", "wrong_sums"]


def all_reduced_sum(group: ProcessGroup | None, value: float, device: torch.device) -> float:
    """The sum of a number over a group. Collective."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def wrong_sums(groups: Mapping[str, ProcessGroup], device: torch.device) -> list[str]:
    """All-reduce the rank's number through every group, and say where the sum is wrong.

    Collective; all ranks pass their groups in one order. A group that came back with other
    members, or as WORLD, gives another sum than that of its own ranks.
    """
    wrong = []
    for name, group in groups.items():
        due = sum(rank + 1 for rank in dist.get_process_group_ranks(group))
        got = all_reduced_sum(group, dist.get_rank() + 1, device)
        if got != due:
            wrong.append(f"{name}: {got:g} instead of {due}")
    return wrong


@torch.no_grad()
def evaluate(
    weights: Mapping[str, Tensor], digits: Tensor, parallel: ParallelGroups, device: torch.device
) -> float:
    """The policy's cross-entropy on given digits, computed as Megatron lays a model out.

    Each pipeline stage runs its blocks and sends the result on; the last one splits the output
    layer over its tensor-parallel ranks; data-parallel replicas take a part of the digits each.
    Collective over all ranks.
    """
    with torch.device("meta"):
        policy = Policy()
    policy.load_state_dict({name: w.to(device) for name, w in weights.items()}, assign=True)
    pipeline, tensor, data = parallel.pipeline, parallel.tensor, parallel.data
    stage, stages = pipeline.rank(), pipeline.size()
    peers = dist.get_process_group_ranks(pipeline)

    mine = digits.to(device).chunk(data.size())[data.rank()]
    right = mine.cummax(dim=1).values
    hidden = policy.embed(mine, previous_actions(right))
    if stage > 0:
        dist.recv(hidden, src=peers[stage - 1], group=pipeline)
    blocks = list(policy.blocks)
    share = -(-len(blocks) // stages)
    for block in blocks[stage * share : (stage + 1) * share]:
        hidden = block(hidden)
    loss = torch.zeros((), device=device)
    if stage < stages - 1:
        dist.send(hidden.contiguous(), dst=peers[stage + 1], group=pipeline)
    else:
        inputs = policy.norm(hidden).chunk(tensor.size(), dim=-1)[tensor.rank()]
        columns = policy.head.weight.chunk(tensor.size(), dim=-1)[tensor.rank()]
        scores = inputs @ columns.T
        dist.all_reduce(scores, group=tensor)
        loss = cross_entropy(scores.flatten(0, 1), right.flatten())
    dist.broadcast(loss, src=peers[-1], group=pipeline)
    return all_reduced_sum(data, loss.item(), device) / data.size()


def expert_rewards(digits: Tensor, actions: Tensor, expert: ProcessGroup) -> Tensor:
    """Rewards of this rank's sequences, given by the experts to which they are sent.

    A sequence goes to the expert that its first digit names; all-to-all there, all-to-all back.
    Collective over the group.
    """
    chosen = digits[:, 0] % expert.size()
    order = chosen.argsort(stable=True)
    sent = one_hot(chosen, expert.size()).sum(dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=expert)
    there, here = sent.tolist(), received.tolist()

    def exchange(rows: Tensor, out: list[int], back: list[int]) -> Tensor:
        arrived = rows.new_empty((sum(out), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), out, back, group=expert)
        return arrived

    judged = rewards(exchange(digits[order], here, there), exchange(actions[order], here, there))
    result = torch.empty(digits.shape, device=digits.device)
    result[order] = exchange(judged, there, here)
    return result
