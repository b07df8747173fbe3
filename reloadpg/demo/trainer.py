"""The trainer: the policy sharded with FSDP2 on a DeviceMesh, trained by policy gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .policy import Policy, previous_actions
from .rollout import Rollouts

__all__ = ["Trainer", "surrogate_loss"]

_LEARNING_RATE = 3e-3
_CLIP = 0.3
_GRADIENT_NORM = 1.0


def surrogate_loss(policy: Any, rollouts: Rollouts, advantages: Tensor) -> Tensor:
    """The clipped policy-gradient loss (PPO, arXiv:1707.06347)."""
    scores = policy(rollouts.digits, previous_actions(rollouts.actions)).log_softmax(dim=-1)
    logprobs = scores.gather(2, rollouts.actions.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - rollouts.logprobs).exp()
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    loss: Tensor = -torch.min(ratio * advantages, clipped * advantages).mean()
    return loss


class Trainer:
    """Policy, optimizer and mesh of one rank."""

    def __init__(self, ranks: int, device: torch.device, seed: int) -> None:
        self.mesh = _mesh(ranks, device)
        torch.manual_seed(seed)
        self.policy: Any = Policy().to(device)
        for block in self.policy.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.policy, mesh=self.mesh)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=_LEARNING_RATE)

    def mesh_groups(self) -> dict[str, ProcessGroup]:
        """The mesh's groups by dimension."""
        names = self.mesh.mesh_dim_names or ()
        return {f"mesh {name}": self.mesh.get_group(name) for name in names}

    def step(self, rollouts: Rollouts, advantages: Tensor) -> tuple[float, float]:
        """One optimizer step; this rank's loss and the norm of the whole gradient. Collective."""
        self.optimizer.zero_grad()
        loss = surrogate_loss(self.policy, rollouts, advantages)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), _GRADIENT_NORM)
        self.optimizer.step()
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return loss.item(), whole.item()

    def weights(self) -> dict[str, Tensor]:
        """The whole policy, gathered from its shards, on the CPU. Collective over the mesh."""
        return {
            name: parameter.detach().full_tensor().cpu()
            for name, parameter in self.policy.named_parameters()
        }


def _mesh(ranks: int, device: torch.device) -> DeviceMesh:
    """Two ranks share a copy of the policy, where there are two such pairs; otherwise all do."""
    if ranks >= 4 and ranks % 2 == 0:
        shape, names = (ranks // 2, 2), ("dp_replicate", "dp_shard")
        return init_device_mesh(device.type, shape, mesh_dim_names=names)
    return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
