"""Training that goes through faults ends bit-equal with training that went through none."""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import faulty_gloo
import pytest
import torch
import torch.distributed as dist
import worlds
from fault_job import IMPATIENCE, PATIENCE, connections, cut
from gpt_job import PRELOAD, GptTraining, cuda_on_cpu
from recovery_job import interfere, stop_interfering
from sampling import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reloadpg
from reloadpg.testing import run_ranks

WIDTH = 16
KINDS = ("forward", "backward", "end", "cut", "recovery", "collective", "skipped", "stalled")
"""What one rank does in a step: raise in the forward or backward pass or at the end; lose its
connections, and then also fail in the recovery; call a collective that raises there alone; take no
part in a collective; stand still for longer than the timeout of the others' collectives."""


class Injected(Exception):
    """The error of a fault that the test brings about."""


class Fault:
    """What goes wrong on one rank in one step; nothing if it has no kind."""

    def __init__(self, kind: str = "", faulty: bool = False) -> None:
        self.kind = kind
        self.faulty = faulty

    def takes(self, kind: str) -> bool:
        """Whether this rank is to do that now; true once."""
        found = self.faulty and self.kind == kind
        if found:
            self.kind = ""
        return found

    def at(self, place: str) -> Callable[..., None]:
        """A hook at a place of the model."""

        def hook(*_: object) -> None:
            if self.takes(place):
                raise Injected(place)
            if place == "forward" and self.takes("collective"):
                dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)  # not of floats: raises
            if place == "forward" and self.takes("stalled"):
                end = time.monotonic() + PATIENCE.total_seconds()
                while not reloadpg.fault_pending() and time.monotonic() < end:
                    time.sleep(0.05)

        return hook

    def begin_step(self) -> None:
        if self.takes("recovery"):
            interfere("recover.group0", self._in_recovery)
            cut(connections())
        if self.takes("cut"):
            cut(connections())

    def _in_recovery(self) -> None:
        raise Injected("in the recovery")

    def end_step(self, group: Any) -> None:
        """Sum over a group at the end of the step, as trainers do with the losses for a log."""
        self.at("end")()
        if self.takes("skipped"):
            return
        with impatience([group] if self.kind == "skipped" else []):
            dist.all_reduce(torch.ones(1), group=group)


@contextmanager
def impatience(groups: list[Any]) -> Iterator[None]:
    """Within this block collectives of the groups have a short timeout."""
    for group in groups:
        _set_pg_timeout(IMPATIENCE, group)
    try:
        yield
    finally:
        for group in groups:
            with suppress(RuntimeError):
                _set_pg_timeout(PATIENCE, group)


class Training:
    """One rank's training with DDP or FSDP2: a model, and the fault that is to come."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fault = Fault()
        self.group: Any = dist.group.WORLD
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.make()

    def make(self) -> None:
        """Make the model and its optimizer anew, as after a fault."""
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        layers += [copy.deepcopy(layers[0]) for _ in range(3)]
        model: Any = torch.nn.Sequential(*layers)
        layers[1].register_forward_pre_hook(lambda *_: self.fault.at("forward")())
        layers[2].register_full_backward_pre_hook(lambda *_: self.fault.at("backward")())
        if self.kind == "ddp":  # its buckets stay as they are, and with them the order of sums
            model = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            for layer in layers:
                fully_shard(layer, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def snapshot(self) -> Any:
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def restore(self, snapshot: Any) -> None:
        self.make()
        weights, state = snapshot
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        self.optimizer.load_state_dict(copy.deepcopy(state))

    def drop(self) -> None:
        """Let go of the model: DDP holds work, which keeps gloo's connections open."""
        del self.model, self.optimizer
        gc.collect()

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
        inputs = torch.randn(8, WIDTH, generator=generator)
        self.optimizer.zero_grad()
        (self.model(inputs) - inputs.roll(1, 1)).pow(2).mean().backward()
        self.optimizer.step()

    def weights(self) -> Any:
        whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters())
        return [tensor.detach().tolist() for tensor in whole]


class MegatronTraining:
    """One rank's training with megatron-core, tensor 2 x pipeline 2: its model stays for good."""

    def __init__(self) -> None:
        self.fault = Fault()
        self.gpt = GptTraining()
        self.group = self.gpt.groups["tensor"]
        layer = self.gpt.gpt.decoder.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_: self.fault.at("forward")())
        layer.mlp.register_full_backward_hook(lambda *_: self.fault.at("backward")())

    def snapshot(self) -> Any:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        return (
            [parameter.detach().clone() for parameter in self.gpt.gpt.parameters()],
            copy.deepcopy(self.gpt.optimizer.state_dict()),
            torch.get_rng_state(),
            copy.deepcopy(get_cuda_rng_tracker().get_states()),
        )

    def restore(self, snapshot: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        weights, optimizer, random_state, tracker = copy.deepcopy(snapshot)
        with torch.no_grad():
            for parameter, weight in zip(self.gpt.gpt.parameters(), weights, strict=True):
                parameter.copy_(weight)
        self.gpt.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random_state)
        get_cuda_rng_tracker().set_states(tracker)

    def drop(self) -> None:
        """Nothing: the model holds no work."""

    def step(self, number: int) -> None:
        self.gpt.step(number)

    def weights(self) -> Any:
        return self.gpt.weights()


def train(training: Any, steps: int, faults: dict[int, tuple[int, str]]) -> Any:
    """Train; the weights at the end, and the attempts at each step."""
    attempts, snapshot = [], None
    for step in reloadpg.retrying(range(steps), attempts=5, on=(Injected, RuntimeError)):
        with step:
            attempts.append((step.number, step.attempt))
            if step.attempt == 1:
                snapshot = training.snapshot()
                rank, kind = faults.get(step.number, (-1, ""))
                training.fault = Fault(kind, rank == dist.get_rank())
            else:
                stop_interfering()
                training.fault = Fault()
                training.restore(snapshot)
            try:
                stalled = training.fault.kind == "stalled"
                with impatience(list(_world.pg_map) if stalled else []):
                    training.fault.begin_step()
                    training.step(step.number)
                    training.fault.end_step(training.group)
            except (Injected, RuntimeError):
                training.drop()
                raise
    return training.weights(), attempts


def with_and_without(
    rank: int, size: int, kind: str, steps: int, faults: dict[int, tuple[int, str]]
) -> Any:
    """The same training twice in one job, first without a fault."""
    faulty_gloo.register()
    reloadpg.install(backends={"gloo", "faulty"}, timeout=PATIENCE)
    fails = any(fault == "recovery" for _, fault in faults.values())
    worlds.init("faulty" if fails else "gloo", timeout=PATIENCE)
    slowest: list[float] = []
    reloadpg.on_report(lambda report: slowest.append(report.total_ms / 1e3))
    with ExitStack() as stack:
        if kind == "megatron":
            stack.enter_context(cuda_on_cpu())
            training: Any = MegatronTraining()
        else:
            training = Training(kind)
        begin = training.snapshot()
        expected, _ = train(training, steps, {})
        training.restore(begin)
        weights, attempts = train(training, steps, faults)
    return weights == expected, attempts, reloadpg.status().generation, max(slowest)


@pytest.mark.parametrize(
    "case",
    sampled([("fsdp", 3), ("fsdp", 20), ("ddp", 20), ("megatron", 20)], ("fsdp", 3)),
    ids=str,
)
def test_training_ends_as_without_a_fault(case: tuple[str, int]) -> None:
    """Bit by bit, wherever a step fails and by whatever kind of fault, 20 drawn at random."""
    kind, count = case
    drawn = random.Random(count)
    kinds = [*KINDS, *drawn.choices(KINDS, k=20)] if count > 3 else ["backward", "cut", "end"]
    faults = {2 * i + 1: (drawn.randrange(4), one) for i, one in enumerate(kinds[:count])}
    steps = 2 * count + 2
    preload = PRELOAD if kind == "megatron" else ()
    results = run_ranks(
        with_and_without, 4, args=(kind, steps, faults), timeout=500, preload=preload
    )
    for equal, attempts, generation, slowest in results:
        assert equal
        assert attempts == results[0][1]
        assert {number for number, attempt in attempts if attempt > 1} == {*faults}
        assert generation == count
        assert slowest < PATIENCE.total_seconds()  # nobody waited for the timeout of a collective
