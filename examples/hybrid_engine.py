"""A hybrid engine as verl has one: trainer and rollout engine in the same processes, in turns::

    torchrun --nproc-per-node 2 examples/hybrid_engine.py

``colocated`` keeps the order of both sides. Into the block: release the groups, pause the memory
saver, wake the engine's weights; then the weights are synchronized while the trainer's memory stays
paused, and the key-value cache wakes last. Out of it: the engine sleeps, the saver resumes, the
groups are reloaded.

On GPUs: ``vllm.LLM(..., enable_sleep_mode=True)`` or ``sglang.Engine(...)`` in place of ``Engine``,
``MemorySaver()`` around the process's own ``torch_memory_saver``, ``backend="nccl"`` and no
``backends`` for ``install``. Both classes here have the calls of the real ones. Here, without a
GPU, the groups are gloo's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reloadpg
from reloadpg.integrations import MemorySaver, colocated

GPU = torch.cuda.is_available()
WIDTH, ITERATIONS = 16, 3


class Engine:
    """Stand for a rollout engine, asleep at first: vLLM's two calls, and a copy of the weights."""

    def __init__(self) -> None:
        self.awake: set[str] = set()
        self.weights: Tensor | None = None

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or ("weights", "kv_cache"))

    def sleep(self, level: int = 1) -> None:
        self.awake.clear()
        self.weights = None

    def generate(self, prompts: Tensor) -> Tensor:
        if self.awake != {"weights", "kv_cache"} or self.weights is None:
            raise RuntimeError(f"generate: awake are {sorted(self.awake)}")
        return prompts @ self.weights.T


class Saver:
    """Stand for ``torch_memory_saver``: it would unmap the trainer's tensors."""

    def pause(self, tag: str | None = None) -> None: ...

    def resume(self, tag: str | None = None) -> None: ...

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield


def main() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    reloadpg.install(backends=None if GPU else {"gloo"})
    dist.init_process_group("nccl" if GPU else "gloo")
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, saver = Engine(), MemorySaver(Saver())
    rollout = colocated(engine, saver=saver, wake_tags=["weights"], connect="eager")
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(ITERATIONS):
        prompts = torch.randn(32, WIDTH, generator=random).to(device)
        # Sharded parameters cannot be gathered once their memory is paused: stage them before.
        staged = model.weight.full_tensor().detach().cpu()
        with rollout:
            with saver.groups_live():  # the groups work here, beside paused memory
                received = staged.to(device)
                dist.broadcast(received, src=0)
                engine.weights = received
            rollout.wake_up(["kv_cache"])
            samples = engine.generate(prompts)
            state = reloadpg.status().state
        loss = (model(prompts) - samples.sign()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            steps = ", ".join(name for name, _ in rollout.steps)
            print(f"step {step}: loss {total.item() / dist.get_world_size():.6f}, groups {state}")
            print(f"  {steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
