"""The Ray program of test_ray.py: actors that train, and a driver that offloads them."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest import mock

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


class Recoverable:
    """A trainer that continues after one of its ranks was replaced."""

    def train(self, dies: int) -> dict[str, Any]:
        import signal

        import torch
        import torch.distributed as dist

        import reloadpg

        reloadpg.install(backends={"gloo"}, recoverable=True)
        dist.init_process_group("gloo")
        pair = [dist.new_group(ranks) for ranks in PAIRS][dist.get_rank() % 2]
        rejoined = reloadpg.rejoin().changed
        weight, before, log = torch.zeros(1), torch.zeros(1), []
        for step in reloadpg.retrying(range(4)):
            with step as number:
                log.append((number, step.replaced))
                if step.attempt > 1:
                    weight.copy_(before)
                if step.replaced:
                    source = next(r for r in range(RANKS) if r not in step.replaced)
                    dist.broadcast(weight, source)
                before = weight.clone()
                update = torch.tensor([2.0 ** dist.get_rank() * (number + 1)])
                dist.all_reduce(update, group=pair)
                if (dist.get_rank(), number, rejoined) == (dies, 2, False):
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(update)
                weight += update
        return {"rejoined": rejoined, "weight": weight.item(), "log": log}


def caught(call: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return {
            "type": type(error).__name__,
            "is a TimeoutError": isinstance(error, TimeoutError),
            "text": str(error),
            "cause": type(getattr(error.__cause__, "cause", error.__cause__)).__name__,
            "rank": getattr(error, "rank", None),
            "errors": sorted(getattr(error, "errors", ())),
            "waiting": list(getattr(error, "waiting", ())),
        }
    return {"type": "nothing"}


def runs(process: psutil.Process) -> bool:
    """Whether a process is running. An orphan that has ended may remain a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def drive(
    rank: int, world_size: int, variables: dict[str, str], part: Literal["loop", "replace"]
) -> dict[str, Any]:
    """Run the driver: start Ray, run one part, end Ray; return the observations."""
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
            from reloadpg.integrations import ray as ours

            seen = _loop(ray, ours, Path(folder)) if part == "loop" else _replace(ray, ours)
            started += psutil.Process().children(recursive=True)
        finally:
            ray.shutdown()
        deadline = time.monotonic() + BOUND_S
        while (left := list(filter(runs, set(started)))) and time.monotonic() < deadline:
            time.sleep(0.05)
        seen["started"], seen["left"] = len(set(started)), [str(process) for process in left]
        return seen


def _loop(ray: Any, ours: Any, folder: Path) -> dict[str, Any]:
    ours.GRACE_S = BOUND_S  # all calls end before it
    seen: dict[str, Any] = {}
    actors = [ray.remote(Trainer).options(num_cpus=1).remote() for _ in range(RANKS)]

    def everywhere(method: str, *args: Any) -> list[Any]:
        return ray.get([getattr(a, method).remote(*args) for a in actors], timeout=BOUND_S)

    seen["none"] = caught(ours.offload_all, [])
    seen["twice"] = caught(ours.offload_all, [actors[0], actors[0]])
    seen["numbers"] = caught(ours.offload_all, [1, 2])
    seen["dict"] = caught(ours.offload_all, [{}])
    seen["class"] = caught(ours.offload_all, [ray.remote(Trainer)])
    seen["one"] = caught(ours.offload_all, actors[0])
    seen["timeout"] = caught(ours.offload_all, actors, timeout="1")
    seen["store"] = caught(ours.setup_actors, actors, store="Driver")
    seen["connect"] = caught(ours.reload_all, actors, connect="zz")
    ours.setup_actors(actors, timeout=timedelta(seconds=2 * BOUND_S))  # includes their start
    seen["variables"] = everywhere("variables")
    everywhere("start")
    seen["second set-up"] = caught(ours.setup_actors, actors, timeout=BOUND_S)
    seen["uses"] = [everywhere("use")]
    seen["reports"] = []
    for _ in range(3):
        offloads = ours.offload_all(actors, timeout=BOUND_S)
        seen["uses"].append(everywhere("use"))
        reloads = ours.reload_all(actors, timeout=BOUND_S, connect="eager")
        seen["uses"].append(everywhere("use"))
        seen["reports"].append(
            [(r.operation, r.changed, r.generation, len(r.groups)) for r in offloads + reloads]
        )

    # An actor whose own code fails.
    ray.get(actors[2].refuse.remote(), timeout=BOUND_S)
    seen["failed"] = caught(ours.offload_all, actors, timeout=BOUND_S)
    seen["use after failure"] = everywhere("use")

    # An actor that is busy, until the driver writes to the pipe.
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    busy = actors[1].busy.remote(str(pipe))
    wait = ray.wait

    def wait_for_the_others(refs: list[Any], *, timeout: float) -> Any:
        """The short timeout applies only to the last actor, so the others always respond."""
        return wait(refs, timeout=BOUND_S if len(refs) > 1 else timeout)

    with mock.patch.object(ray, "wait", wait_for_the_others):
        seen["late"] = caught(ours.offload_all, actors, timeout=1.0)
    seen["state after delay"] = ray.get(actors[0].state.remote(), timeout=BOUND_S)
    pipe.write_text("continue")
    ray.get(busy, timeout=BOUND_S)
    seen["offload after delay"] = [r.changed for r in ours.offload_all(actors, timeout=BOUND_S)]
    ours.reload_all(actors, timeout=BOUND_S)
    seen["use after delay"] = everywhere("use")

    # The same actors in a new job, in which one of them dies.
    everywhere("stop")
    ours.setup_actors(actors, timeout=BOUND_S)
    everywhere("start")
    seen["use in the second job"] = everywhere("use")
    ray.get(actors[3].die.remote(), timeout=BOUND_S)
    ours.GRACE_S = 1.0  # the test waits for it twice, since the others hang
    seen["died"] = caught(ours.offload_all, actors, timeout=BOUND_S)
    seen["dead"] = caught(ours.offload_all, actors, timeout=BOUND_S)
    return seen


def _replace(ray: Any, ours: Any) -> dict[str, Any]:
    """The actor of rank 0 dies during training and is replaced."""
    plain = {"env_vars": {"RELOADPG_AUTOINSTALL": "0"}}
    remote = ray.remote(Recoverable).options(num_cpus=1, runtime_env=plain)
    job = ours.setup_actors(
        [remote.remote() for _ in range(RANKS)], timeout=2 * BOUND_S, store="driver"
    )
    results = [actor.train.remote(0) for actor in job.actors]
    seen: dict[str, Any] = {}
    try:
        ray.get(results[0], timeout=2 * BOUND_S)
    except ray.exceptions.RayActorError as error:
        seen["replaced died"] = type(error).__name__
    new = remote.remote()
    seen["no rank"] = caught(ours.replace_actor, job, RANKS, new)
    seen["same actor"] = caught(ours.replace_actor, job, 0, job.actors[1])
    seen["no store"] = caught(ours.replace_actor, ours.ActorJob(job.actors, [], "", 0), 0, new)
    ours.replace_actor(job, 0, new, timeout=2 * BOUND_S)
    results[0] = job.actors[0].train.remote(0)
    seen["trained"] = ray.get(results, timeout=2 * BOUND_S)
    return seen
