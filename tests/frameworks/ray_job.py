"""Actors of test_ray.py, which train, and the Ray that they run in."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

RANKS = 4
PAIRS = ((0, 2), (1, 3))
BOUND_S = 180.0


class Trainer:
    """A user's actor: only the methods for the tests use reloadpg."""

    def start(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.pair = [dist.new_group(ranks) for ranks in PAIRS][dist.get_rank() % 2]
        self.world = dist.group.WORLD

    def use(self) -> dict[str, Any]:
        """Sum 2**rank over each group; return the sums or the errors."""
        import torch
        import torch.distributed as dist

        seen: dict[str, Any] = {"same": dist.group.WORLD is self.world}
        for name, group in {"world": self.world, "pair": self.pair}.items():
            tensor = torch.tensor([2.0 ** dist.get_rank()])
            try:
                dist.all_reduce(tensor, group=group)
            except RuntimeError as error:
                seen[name] = type(error).__name__
            else:
                seen[name] = tensor.item()
        seen["generation"] = self.pair.generation
        return seen

    def variables(self) -> dict[str, str]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        return {name: os.environ[name] for name in names}

    def refuse(self) -> None:
        """Make the next offload fail on this rank."""
        import reloadpg

        def callback() -> None:
            remove()
            raise ValueError("a buffer is still in use")

        remove = reloadpg.on_offload(callback)

    def die(self) -> None:
        """End this process during the next offload."""
        import reloadpg

        reloadpg.on_offload(lambda: os._exit(1))

    def state(self) -> str:
        import reloadpg

        return reloadpg.status().state

    def busy(self, pipe: str) -> str:
        """Block until the driver writes to the pipe."""
        return Path(pipe).read_text()

    def stop(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def runs(process: psutil.Process) -> bool:
    """Whether a process is running. An orphan that has ended may remain a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def a_ray(variables: dict[str, str]) -> Iterator[Path]:
    """Run Ray in this block; yield its folder. All of its processes must end with it."""
    # Short: Ray's sockets are in this folder.
    with tempfile.TemporaryDirectory(prefix="rpg-", dir="/tmp") as folder:
        os.environ["HOME"] = folder  # Ray writes an access token there
        import ray

        ray.init(
            num_cpus=RANKS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            logging_level="ERROR",
            log_to_driver=False,
            _temp_dir=f"{folder}/ray",
            runtime_env={"env_vars": variables},
        )
        try:
            started = psutil.Process().children(recursive=True)
            yield Path(folder)
            started += psutil.Process().children(recursive=True)
        finally:
            ray.shutdown()
        assert len(set(started)) > RANKS
        deadline = time.monotonic() + BOUND_S
        while left := list(filter(runs, set(started))):  # those of dead actors, too
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def train(config: dict[str, Any]) -> None:
    """A user's training loop for Ray Train: cycles after every step."""
    import ray.train.torch
    import torch
    import torch.distributed as dist

    import reloadpg

    rank, cycles, losses = dist.get_rank(), [], []
    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        batch = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if reloadpg.is_installed():
            with reloadpg.offloaded() as report:
                cycles.append([len(report.groups), reloadpg.status().state])
    ray.train.report({"loss": losses[-1]})
    weights = [parameter.tolist() for parameter in model.parameters()]
    facts = {"losses": losses, "weights": weights, "cycles": cycles}
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(facts))


def fit(
    rank: int, size: int, variables: dict[str, str], folder: Path
) -> tuple[list[Any], list[str]]:
    """Run `train` on two workers of Ray Train; return their results, and the types of errors.

    Call it in a separate process: Ray starts once in each.
    """
    errors: list[str] = []
    folder.mkdir()
    # Workers inherit the environment of the driver, which is a rank: Ray makes its own store.
    with a_ray({**variables, "TORCHELASTIC_USE_AGENT_STORE": "False"}) as storage:
        import ray.train.torch

        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"folder": str(folder)},
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=str(storage), name="run"),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            failures = error.worker_failures
            errors += [type(error).__name__]
            errors += [f"{rank}: {type(failures[rank])}" for rank in sorted(failures)]
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())], errors
