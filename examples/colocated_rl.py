"""Colocated reinforcement learning: the same ranks train a policy and generate with it.

Each iteration trains, releases the process groups, generates in the released memory, and rebuilds
the groups::

    torchrun --nproc-per-node 4 examples/colocated_rl.py
    torchrun --nproc-per-node 4 examples/colocated_rl.py --no-offload  # the same losses, bit by bit

The policy is a small transformer, sharded with FSDP2 and trained by clipped policy gradient. Its
task: read digits one by one and answer, each time, the largest digit so far. It is evaluated on the
groups of Megatron's parallel state, or on those of a DeviceMesh without megatron-core.

Everything about reloadpg is in three places: the import, ``install`` in :func:`join`, and
``offloaded`` in :meth:`ColocatedJob.rollout`. With GPUs the groups are NCCL's, one rank a GPU;
without, they are those of reloadpg's simulated accelerator, whose communicators hold real memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad

import reloadpg
from reloadpg.testing import simulated

DIGITS, LENGTH = 10, 8
WIDTH, BLOCKS = 64, 2
STEPS, SEQUENCES, EVALUATED = 12, 256, 64
LEARNING_RATE, CLIP, GRADIENT_NORM = 3e-3, 0.3, 1.0
TENSOR, PIPELINE = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"
DATA, EXPERT = "DATA_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), *layers)

    def forward(self, hidden: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Positions from ``start`` on; ``cache`` has the keys and values of those before."""
        stop = start + hidden.shape[1]
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        if cache is not None:
            cache[0, :, start:stop], cache[1, :, start:stop] = key, value
            key, value = cache[:, :, :stop]
        # Not a fused kernel: on a GPU its backward adds in no fixed order.
        scores = query @ key.transpose(-1, -2) * WIDTH**-0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
        hidden = hidden + self.project(mixed)
        return hidden + self.mlp(hidden)


class Policy(nn.Module):
    """Scores of the ten answers at each position, from the digits and the answers before it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = DIGITS, DIGITS + 1, LENGTH  # a digit; the answer before it, or none; a position
        self.digit, self.before, self.place = (nn.Embedding(size, WIDTH) for size in sizes)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS, bias=False)

    def embed(self, digits: Tensor, answers: Tensor, start: int = 0) -> Tensor:
        before = pad(answers, (1, -1), value=DIGITS)[:, start:]
        places = torch.arange(start, digits.shape[1], device=digits.device)
        return self.digit(digits[:, start:]) + self.before(before) + self.place(places)

    def forward(
        self, digits: Tensor, answers: Tensor, caches: Tensor | None = None, start: int = 0
    ) -> Tensor:
        hidden = self.embed(digits, answers, start)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, None if caches is None else caches[index], start)
        return self.head(self.norm(hidden))

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Policy:
        """A policy with these weights, unsharded. Local."""
        with torch.device("meta"):
            policy = cls()
        policy.load_state_dict(weights, assign=True)
        return policy


class Rollouts(NamedTuple):
    digits: Tensor
    answers: Tensor
    logprobs: Tensor

    def rewards(self) -> Tensor:
        """1 for each right answer; guessing earns 0.1 on average."""
        return (self.answers == self.digits.cummax(dim=1).values).float()


@torch.no_grad()
def generate(
    weights: Mapping[str, Tensor], digits: Tensor, random: Generator, free_bytes: int
) -> Rollouts:
    """Answer ``digits`` with the whole policy, one position after the other. Local.

    Answers are sampled with ``random``. The key-value cache takes all of ``free_bytes``.
    """
    shape = (BLOCKS, 2, len(digits), LENGTH, WIDTH)
    # Zeros are written: under Linux, memory that is only asked for is not taken.
    memory = torch.zeros(max(prod(shape), free_bytes // 4), device=digits.device)
    caches, policy = memory[: prod(shape)].view(shape), Policy.of(weights)
    answers, logprobs = torch.zeros_like(digits), torch.zeros(digits.shape, device=digits.device)
    for now in range(LENGTH):
        scores = policy(digits[:, : now + 1], answers[:, : now + 1], caches, now)[:, 0]
        scores = scores.log_softmax(dim=-1)
        # The Gumbel trick, drawn on the CPU: the same on every accelerator.
        noise = torch.empty(scores.shape).exponential_(generator=random)
        answers[:, now] = (scores - noise.log().to(scores.device)).argmax(dim=-1)
        logprobs[:, now] = scores.gather(1, answers[:, now : now + 1])[:, 0]
    return Rollouts(digits, answers, logprobs)


def parallel_groups(device: torch.device) -> dict[str, Any]:
    """The groups of a Megatron-style trainer by description. Collective over all ranks."""
    ranks = dist.get_world_size()
    tensor = 2 if ranks % 2 == 0 else 1
    pipeline = 2 if ranks % (2 * tensor) == 0 else 1
    if importlib.util.find_spec("megatron") is None:
        shape, names = (pipeline, ranks // pipeline // tensor, tensor), (PIPELINE, DATA, TENSOR)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        groups = {name: mesh.get_group(name) for name in names}
        return {**groups, EXPERT: dist.new_subgroups(ranks // pipeline)[0]}
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=ranks // pipeline,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    values = vars(parallel_state).values()  # Megatron keeps the groups in its module
    return {value.group_desc: value for value in values if isinstance(value, dist.ProcessGroup)}


class ColocatedJob:
    """The trainer and the rollout engine of one rank. Methods are collective."""

    def __init__(self, device: torch.device, *, offload: bool, seed: int = 1234) -> None:
        self.device, self.offload, self.ranks = device, offload, dist.get_world_size()
        self.report: reloadpg.Report | None = None
        shape, names = (self.ranks,), ("shard",)
        if self.ranks >= 4 and self.ranks % 2 == 0:  # two ranks share a copy of the policy
            shape, names = (self.ranks // 2, 2), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.groups = {f"mesh {name}": mesh.get_group(name) for name in names}
        self.groups |= parallel_groups(device)
        torch.manual_seed(seed)
        self.evaluated = torch.randint(DIGITS, (EVALUATED, LENGTH)).to(device)
        self.policy = Policy().to(device)
        for module in (*self.policy.blocks, self.policy):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        self.random = Generator().manual_seed(seed + 1 + dist.get_rank())

    def run(self, iterations: int) -> None:
        """Train, then generate with the new weights; the first rollouts are guesses."""
        rollouts = self.generate(self.weights())
        for iteration in range(1, iterations + 1):
            steps = self.train(rollouts)
            weights = self.weights()
            evaluation = self.evaluate(weights)
            rollouts = self.rollout(weights)
            loss = self.mean(torch.tensor([loss for loss, _ in steps]))
            self.log(iteration, loss, evaluation, self.mean(rollouts.rewards()))

    def rollout(self, weights: Mapping[str, Tensor]) -> Rollouts:
        """Generate in the memory of the process groups."""
        if not self.offload:
            return self.generate(weights)
        with reloadpg.offloaded() as self.report:  # on all ranks; reloaded at the end of the block
            return self.generate(weights, self.report.released_bytes or 0)

    def generate(self, weights: Mapping[str, Tensor], free_bytes: int = 0) -> Rollouts:
        digits = torch.randint(DIGITS, (SEQUENCES, LENGTH), generator=self.random)
        return generate(weights, digits.to(self.device), self.random, free_bytes)

    def weights(self) -> dict[str, Tensor]:
        """The whole policy, gathered from its shards: the rollout engine has no groups for it."""
        named = self.policy.named_parameters()
        return {name: parameter.detach().full_tensor() for name, parameter in named}

    def digest(self) -> str:
        """A hash of the weights: equal for equal bits."""
        values = [value.cpu().numpy().tobytes() for value in self.weights().values()]
        return hashlib.sha256(b"".join(values)).hexdigest()

    def train(self, rollouts: Rollouts) -> list[tuple[float, float]]:
        """Take some optimizer steps; this rank's loss and the gradient norm of each."""
        rewards = rollouts.rewards()
        advantages = (rewards - rewards.mean(dim=0)) / (rewards.std() + 1e-6)
        return [self.step(rollouts, advantages) for _ in range(STEPS)]

    def step(self, rollouts: Rollouts, advantages: Tensor) -> tuple[float, float]:
        """Take a clipped policy-gradient step (PPO, arXiv:1707.06347); loss and gradient norm."""
        self.optimizer.zero_grad()
        scores = self.policy(rollouts.digits, rollouts.answers).log_softmax(dim=-1)
        logprobs = scores.gather(2, rollouts.answers.unsqueeze(-1)).squeeze(-1)
        ratio = (logprobs - rollouts.logprobs).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        return loss.item(), norm.full_tensor().item()

    @torch.no_grad()
    def evaluate(self, weights: Mapping[str, Tensor]) -> float:
        """Cross-entropy, laid out as Megatron does: stages of blocks, and a split output layer."""
        tensor, pipeline, data = (self.groups[name] for name in (TENSOR, PIPELINE, DATA))
        policy, stage, stages = Policy.of(weights), pipeline.rank(), pipeline.size()
        digits = self.evaluated.chunk(data.size())[data.rank()]
        right = digits.cummax(dim=1).values
        hidden = policy.embed(digits, right)
        if stage > 0:
            dist.recv(hidden, group_src=stage - 1, group=pipeline)
        for block in policy.blocks[stage * BLOCKS // stages : (stage + 1) * BLOCKS // stages]:
            hidden = block(hidden)
        if stage < stages - 1:
            dist.send(hidden, group_dst=stage + 1, group=pipeline)
        columns = policy.head.weight.chunk(tensor.size(), dim=-1)[tensor.rank()]
        scores = policy.norm(hidden).chunk(tensor.size(), dim=-1)[tensor.rank()] @ columns.T
        dist.all_reduce(scores, group=tensor)
        loss = cross_entropy(scores.flatten(0, 1), right.flatten())
        dist.broadcast(loss, group_src=stages - 1, group=pipeline)  # the last stage's counts
        return self.total(loss.item(), data) / data.size()

    def mean(self, values: Tensor) -> float:
        return self.total(values.double().mean().item()) / self.ranks

    def total(self, value: float, group: Any = None) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=group)
        return tensor.item()

    def log(self, iteration: int, loss: float, evaluation: float, reward: float) -> None:
        if dist.get_rank() == 0:
            numbers = f"reward {reward:.3f}, loss {loss!r}, evaluation {evaluation!r}"
            print(f"iteration {iteration}: {numbers}", flush=True)


def join(*, offload: bool) -> torch.device:
    """Join the job that torchrun describes; this rank's device."""
    if offload:
        # Groups of one rank hold a communicator too, and small jobs have many of them.
        reloadpg.install(min_size=1)
    if not torch.cuda.is_available():
        simulated.register()
        simulated.configure(bytes_per_communicator=8 << 20)
        dist.init_process_group(simulated.NAME)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # two runs are compared bit by bit
    dist.init_process_group("nccl")
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and generate on the same ranks.")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--no-offload", action="store_true", help="do not use reloadpg at all")
    options = parser.parse_args()
    device = join(offload=not options.no_offload)
    job = ColocatedJob(device, offload=not options.no_offload)
    job.run(options.iterations)
    digest = job.digest()
    if dist.get_rank() == 0:
        print(f"weights: SHA-256 {digest}")
    if job.report is not None and dist.get_rank() == 0:
        freed, ms = (job.report.released_bytes or 0) / 2**20, job.report.total_ms
        groups = f"{len(job.report.groups)} groups offloaded in {ms:.0f} ms"
        print(f"last rollout: {groups}, {freed:.0f} MiB freed on this rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
