"""verl's workers offload their groups between a transfer of weights and the next training call.

The workers are verl's own class (0.9.1), or classes with the calling sequence of its source, with
engines that gather weights by collectives.
"""

from __future__ import annotations

import asyncio
import enum
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.errors import InvalidOptionError
from reloadpg.integrations import verl
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


TRANSFERRED = ["resume weights: live", "weights: live", "resume kv_cache: offloaded"]


def check_seen(engine: Rollout, state: str, *calls: str) -> None:
    """These calls came since the last check, each with its state, and the state is this one."""
    assert [*engine.seen, reloadpg.status().state] == [*calls, state]
    engine.seen.clear()


@pytest.mark.parametrize(
    "real",
    [
        pytest.param(False, id="sequence"),
        pytest.param(
            True,
            id="verl",
            marks=[pytest.mark.frameworks, pytest.mark.timeout(600), worlds.unbound_only],
        ),
    ],
)
@pytest.mark.ranks(2, timeout=400)
def test_groups_are_offloaded_from_a_transfer_to_the_next_call_that_trains(real: bool) -> None:
    """The KV cache gets their memory."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    cls = verls_own() if real else Sequence
    before = dict(vars(cls))
    handle = offloaded_rollouts() if real else offloaded_rollouts(cls)  # verl's own by default
    worker = worker_of(cls)
    engine = worker.rollout

    def transfer(**kwargs: Any) -> None:
        asyncio.run(worker.update_weights(**kwargs))
        assert worker.rollout is engine

    transfer(global_steps=1)
    worker.start_profile()
    worker.execute_func_rank_zero(lambda: engine.note("rank zero"))
    check_seen(engine, "offloaded", *TRANSFERRED, "profile: offloaded", "rank zero: offloaded")
    assert worker.compute_log_prob(None).item() == 2
    check_seen(engine, "live")
    transfer()
    transfer()  # a validation, without a step in between
    check_seen(engine, "offloaded", *TRANSFERRED, *TRANSFERRED)
    worker.save_checkpoint("nowhere")
    check_seen(engine, "live")
    # A transfer that fails leaves live groups.
    engine.fails = "resume kv_cache"
    with pytest.raises(ConnectionError, match="resume kv_cache on purpose"):
        transfer()
    check_seen(engine, "live", *TRANSFERRED)
    engine.fails = ""
    # An engine that keeps its memory has no KV cache to wake; one on other machines offloads none.
    worker.config.rollout.free_cache_engine = False
    transfer()
    check_seen(engine, "offloaded", "weights: live")
    transfer(mode="nccl")
    check_seen(engine, "live")
    # In the middle of a rollout.
    transfer()
    handle.remove()
    handle.remove()
    check_seen(engine, "live", "weights: live")
    transfer()
    check_seen(engine, "live", "weights: live")
    assert dict(vars(cls)) == before
    assert handle.cycles == 6


def test_a_class_that_is_not_of_verl_or_was_passed_before_is_refused() -> None:
    """Nothing is changed."""
    before = dict(vars(Sequence))
    with pytest.raises(InvalidOptionError, match=r"\(SimpleNamespace\).*nothing was changed"):
        verl.offloaded_rollouts(Sequence, type("SimpleNamespace", (), {}))
    assert dict(vars(Sequence)) == before
    handle = verl.offloaded_rollouts(Sequence)
    with pytest.raises(InvalidOptionError, match=r"\(Sequence\): already passed"):
        verl.offloaded_rollouts(Sequence)
    handle.remove()
    verl.offloaded_rollouts(Sequence).remove()


def test_without_verl_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(reloadpg.ReloadpgError, match=r"needs verl 0.9.*nothing was changed"):
        verl.offloaded_rollouts()
