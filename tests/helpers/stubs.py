"""Placeholders for the names that the examples use and do not define.

Each stands for the user's code, and records the state in which the example calls it. The simulated
accelerator replaces ``nccl``: its groups are also reloadable by default.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import reloadpg
from reloadpg.testing import run_ranks, simulated

CYCLES = 3


def fully_shard(*args: Any, **kwargs: Any) -> Any:
    """Call FSDP2's function. Imported on use, since the import is slow."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(*args, **kwargs)


class Stubs:
    """One rank's placeholders, and the recorded calls."""

    def __init__(self) -> None:
        simulated.register()
        simulated.configure(bytes_per_communicator=1 << 20)
        self.seen: list[Any] = []
        self.model = nn.Linear(4, 4)
        self.llm: Any = self  # of a trainer whose vllm_generation this is
        self.group: Any = None
        self.path = Path(tempfile.gettempdir()) / "checkpoint"

    def namespace(self, *, libraries: bool) -> dict[str, Any]:
        """The namespace of a block.

        Args:
            libraries: whether it has the modules that a docstring uses without importing them.
        """
        placeholders = {
            "__name__": "example",
            "build_trainer": self.build_trainer,
            "data": range(CYCLES),
            "device": torch.device("cpu"),
            "engine": self,
            "evaluate": self.evaluate,
            "generate": self.generate,
            "model": self.model,
            "GRPOTrainer": self.trainer,
            "Trainer": self.trainer,
            "path": self.path,
            "prompts": range(CYCLES),
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "rollout": self.generate,
            "saver": self,
            "send_weights": self.build_trainer,
            "train": self.train,
            "trainer": SimpleNamespace(vllm_generation=self),
            "vllm": SimpleNamespace(LLM=lambda *args, **kwargs: self),
        }
        imported = {
            "dist": dist,
            "fully_shard": fully_shard,
            "reloadpg": reloadpg,
            "timedelta": timedelta,
            "torch": torch,
        }
        return {**placeholders, **(imported if libraries else {})}

    def trainer(self, *args: Any, **kwargs: Any) -> None:
        """``Trainer(..., callbacks=[...])``."""
        self.seen.append(("trainer", sorted(kwargs)))

    def build_trainer(self) -> nn.Module:
        self.group = dist.new_group(list(range(dist.get_world_size())), group_desc="trainer's")
        self._summed()
        return self.model

    def generate(self, batch: int) -> int:
        held = simulated.stats().held_bytes
        self.seen.append(("generate", reloadpg.status().state, held))
        return batch

    # -- rollout engine and memory saver ----------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        self.seen.append(("sleep", reloadpg.status().state))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.seen.append(("wake", reloadpg.status().state))

    def collective_rpc(self, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [True]

    def empty_partition_cache(self) -> None:
        """Of DeepSpeed's engine."""
        self.seen.append(("release", reloadpg.status().state))

    def pause(self, tag: str | None = None) -> None:
        self.seen.append(("pause", reloadpg.status().state))

    def resume(self, tag: str | None = None) -> None:
        self.seen.append(("resume", reloadpg.status().state))

    @contextmanager
    def disable(self) -> Iterator[None]:
        self.seen.append(("disable", reloadpg.status().state))
        yield

    def train(self, *given: Any) -> None:
        """``train(model, rollouts)``, ``train()`` or ``train(model, device)``."""
        if dist.get_world_size() > 2:
            self.seen.append(("mesh", self._step(given[0]), str(given[1])))
            return
        self.seen.append(("train", reloadpg.status().state, self._summed()))

    def evaluate(self, shard: int) -> str:
        self.seen.append(("evaluate", shard, dist.get_world_size(), self._summed()))
        return "results"

    def _summed(self) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=self.group)
        dist.all_reduce(tensor)
        return tensor.item()

    def _step(self, model: nn.Module) -> bool:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return all(parameter.grad is not None for parameter in model.parameters())


def run_block(rank: int, world_size: int, code: str, name: str) -> dict[str, Any]:
    """Run one rank of an example; return the recorded calls and the final state."""
    stubs = Stubs()
    if "docs/trainers" in name and "install()" not in code:  # lines of a script that has installed
        reloadpg.install()
        dist.init_process_group("sim")
    namespace = stubs.namespace(libraries="environment" in name)
    exec(compile(code.replace('"nccl"', '"sim"'), name, "exec"), namespace)
    return {
        "seen": stubs.seen,
        "failure": type(namespace.get("failure")).__name__,
        "state": reloadpg.status().state,
        "generation": reloadpg.status().generation,
        "groups": len(reloadpg.status().groups),
        "initialized": dist.is_initialized(),
        "results": namespace.get("results"),
        "report": namespace.get("report"),
        "used": namespace.get("used"),
        "metrics": _metrics() if "prometheus_client" in code else {},
    }


def _metrics() -> dict[str, float]:
    """What Prometheus reads of this process, by name and labels."""
    from prometheus_client import REGISTRY

    samples = [one for family in REGISTRY.collect() for one in family.samples]
    return {"/".join((one.name, *one.labels.values())): one.value for one in samples}


def main(path: str, name: str) -> None:
    """Run a block from a file on two ranks."""
    run_ranks(run_block, 2, args=(Path(path).read_text(), name), timeout=280)


if __name__ == "__main__":
    main(*sys.argv[1:])
