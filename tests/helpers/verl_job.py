"""Workers of verl on two ranks, with engines that gather weights by collectives.

The workers are verl's own class (0.9.1), or classes with the calling sequence of its source.
"""

from __future__ import annotations

import asyncio
import enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.integrations.verl import offloaded_rollouts


class Dispatch(enum.Enum):
    """The necessary members of the enum in ``verl/single_controller/base/decorator.py``."""

    ONE_TO_ALL = 1
    DIRECT_ROLLOUT_METHOD = 7


class Execute(enum.Enum):
    """The same for this enum."""

    ALL = 0
    RANK_ZERO = 1


def register(dispatch_mode: Any, execute_mode: Any = Execute.ALL) -> Any:
    """Mark a method as the decorator of the same name in that file does."""

    def decorate(method: Any) -> Any:
        marks = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": True}
        method.attrs_3141562937 = marks
        return method

    return decorate


class Sequence:
    """A stand-in with the calls of ``ActorRolloutRefWorker`` in verl 0.9.1, in the same order.

    That class is in ``verl/workers/engine_workers.py``.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def update_weights(self, global_steps: Any = None, mode: str = "auto") -> None:
        if (mode if mode != "auto" else "naive") != "naive":
            weights, _ = self.actor.engine.get_per_tensor_param()
            await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)
            return
        if self.config.rollout.free_cache_engine:
            await self.rollout.resume(tags=["weights"])
        weights, _ = self.actor.engine.get_per_tensor_param(
            layered_summon=False, base_sync_done=True
        )
        await self.rollout.update_weights(weights, peft_config=None, base_sync_done=True)
        if self.config.rollout.free_cache_engine:
            await asyncio.to_thread(worlds.barrier)
            await self.rollout.resume(tags=["kv_cache"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute_log_prob(self, data: Any) -> Any:
        return self.actor.infer_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        self.actor.save_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self) -> None:
        self.profiler.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Any) -> Any:
        return func()


class Modes:
    """``rollout_mode`` and ``trainer_mode`` of ``verl/workers/fsdp_workers.py`` (0.7.0)."""

    async def rollout_mode(self) -> None:
        weights, _ = self.actor.engine.get_per_tensor_param()
        await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(weights, peft_config=None, base_sync_done=True)
        await self.rollout.resume(tags=["kv_cache"])

    async def trainer_mode(self) -> None:
        await self.rollout.release()

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def wake_up(self) -> bool:
        await self.rollout_mode()
        return True

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def sleep(self) -> bool:
        await self.trainer_mode()
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_sequences(self, prompts: Any) -> Any:
        asyncio.run(self.rollout_mode())
        output = self.rollout.generate_sequences(prompts=prompts)
        asyncio.run(self.trainer_mode())
        dist.all_reduce(output)
        return output


class Manager:
    """``FSDPVLLMShardingManager`` of ``verl/workers/sharding_manager/fsdp_vllm.py`` (0.5.0)."""

    def __init__(self, rollout: Any, engine: Any) -> None:
        self.rollout, self.engine = rollout, engine

    def __enter__(self) -> None:
        asyncio.run(self.rollout.resume(tags=["weights"]))
        asyncio.run(self.rollout.update_weights(self.engine.get_per_tensor_param()[0]))
        asyncio.run(self.rollout.resume(tags=["kv_cache"]))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        asyncio.run(self.rollout.release())


class Engine:
    """A model of which each rank has a part: to read it all needs the groups."""

    def get_per_tensor_param(self, **_: Any) -> Any:
        return self._parts(), None

    def _parts(self) -> Any:
        for name in ("first", "second"):
            parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, torch.full((1,), float(dist.get_rank() + 1)))
            yield name, torch.cat(parts)

    is_param_offload_enabled = False


class Rollout:
    """An engine that records its calls, and the state of the groups at each."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.fails = ""

    def note(self, what: str) -> None:
        self.seen.append(f"{what}: {reloadpg.status().state}")
        if what == self.fails:
            raise ConnectionError(f"{what} on purpose")

    async def resume(self, tags: Any) -> None:
        self.note(f"resume {' '.join(tags)}")

    async def update_weights(self, weights: Any, **_: Any) -> None:
        sums = {name: tensor.sum().item() for name, tensor in weights}
        assert sums == {"first": 3.0, "second": 3.0}, sums
        self.note("weights")

    async def release(self) -> None:
        self.note("release")

    def generate_sequences(self, prompts: Any) -> Any:
        self.note("generate")
        return torch.ones(1)


class Actor:
    """The trainer of a worker; all of its methods use the groups."""

    def __init__(self) -> None:
        self.engine = Engine()

    def infer_batch(self, data: Any) -> torch.Tensor:
        value = torch.ones(1)
        dist.all_reduce(value)
        return value

    def save_checkpoint(self, *_: Any) -> None:
        worlds.barrier()


class CheckpointEngine:
    """Sends weights to an engine on other hosts over the groups."""

    async def send_weights(self, weights: Any, global_steps: Any) -> dict[str, Any]:
        for _ in weights:
            pass
        return {}


class Config(SimpleNamespace):
    """A configuration with access by attribute and by ``get``."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def worker_of(cls: type) -> Any:
    """A worker in the state after ``__init__`` and ``init_model``, without a model or a device."""
    worker = cls.__new__(cls)
    checkpoint_engine = Config(backend="naive")
    worker.config = Config(
        rollout=Config(name="vllm", free_cache_engine=True, checkpoint_engine=checkpoint_engine)
    )
    worker.actor, worker.rollout, worker.checkpoint_engine = Actor(), Rollout(), CheckpointEngine()
    worker.layered_summon, worker.peft_merge, worker.base_sync_done = False, False, True
    worker.role, worker.enable_routing_replay = "actor_rollout", False
    worker.profiler = SimpleNamespace(
        start=lambda **_: worker.rollout.note("profile"),
        rank=0,
        check_enable=lambda: False,
    )
    return worker


def verls_own() -> type:
    """``ActorRolloutRefWorker`` of the package, without its calls of CUDA."""
    from verl.workers import engine_workers

    torch.cuda.synchronize = lambda device=None: None
    engine_workers.log_gpu_memory_usage = lambda *args, **kwargs: None
    worker: type = engine_workers.ActorRolloutRefWorker
    return worker


def of_workers(rank: int, size: int, real: bool) -> dict[str, Any]:
    """Return the calls that the engine recorded, by case."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    return of_worker(verls_own()) if real else {**of_worker(Sequence), "older": of_older()}


def of_worker(cls: type) -> dict[str, Any]:
    """Test the worker of 0.9; the hook uses verl's own class by default."""
    before = dict(vars(cls))
    handle = offloaded_rollouts(cls) if cls is Sequence else offloaded_rollouts()
    worker = worker_of(cls)
    engine, cases = worker.rollout, {}

    def noted(name: str) -> None:
        assert worker.rollout is engine
        cases[name] = [*engine.seen, f"after: {reloadpg.status().state}"]
        engine.seen.clear()

    def transfer(**kwargs: Any) -> None:
        asyncio.run(worker.update_weights(**kwargs))

    transfer(global_steps=1)
    worker.start_profile()
    worker.execute_func_rank_zero(lambda: engine.note("rank zero"))
    noted("generating")
    assert worker.compute_log_prob(None).item() == 2
    noted("trained")
    transfer()
    transfer()  # a validation, without a step in between
    noted("twice")
    worker.save_checkpoint("nowhere")
    noted("saved")
    engine.fails = "resume kv_cache"
    try:
        transfer()
    except ConnectionError as error:
        engine.note(str(error))
    noted("failed")
    engine.fails = ""
    worker.config.rollout.free_cache_engine = False
    transfer()
    noted("keeps its memory")
    transfer(mode="nccl")
    noted("elsewhere")
    transfer()
    handle.remove()
    handle.remove()
    noted("removed")
    transfer()
    noted("without hook")
    restored = dict(vars(cls)) == before
    return {"cases": cases, "cycles": handle.cycles, "restored": restored}


def of_older() -> dict[str, Any]:
    """Test the worker of 0.7 and the sharding manager of 0.5, without and with an error."""
    cases = {}
    with_modes = offloaded_rollouts(Modes)
    worker = worker_of(Modes)
    manager = Manager(worker.rollout, worker.actor.engine)
    with_managers = offloaded_rollouts(Manager)

    def noted(name: str, error: str = "") -> None:
        cases[name] = [*worker.rollout.seen, error, f"after: {reloadpg.status().state}"]
        worker.rollout.seen.clear()

    async def through_servers() -> None:
        await worker.wake_up()
        worker.rollout.note("generate")
        await worker.sleep()

    asyncio.run(through_servers())
    noted("servers")
    for fails in ("", "generate"):
        worker.rollout.fails, error = fails, ""
        try:
            assert worker.generate_sequences(None).item() == 2
        except ConnectionError as raised:
            error = str(raised)
        noted(f"worker {fails}", error)
        error = ""
        try:
            with manager:
                worker.rollout.generate_sequences(None)
        except ConnectionError as raised:
            error = str(raised)
        noted(f"manager {fails}", error)
    return {"cases": cases, "cycles": [with_modes.cycles, with_managers.cycles]}
