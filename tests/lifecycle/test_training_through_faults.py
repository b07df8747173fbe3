"""The result of training with faults is bit-identical to that of training without."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import faulty_gloo, worlds
from helpers.fault_job import (
    PATIENCE,
    Injected,
    connections,
    cut,
    eventually,
    fail,
    impatience,
    interfere,
    stop_interfering,
)
from helpers.gpt_job import PRELOAD, GptTraining, cuda_on_cpu
from helpers.sampling import sampled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reloadpg
from reloadpg.testing import run_ranks, standins

WIDTH = 16
KINDS = ("forward", "backward", "end", "cut", "recovery", "collective", "skipped", "stalled")
"""The fault of one rank in a step: it raises in the forward or backward pass or at the end; loses
its connections (and also fails in the recovery); calls a collective that raises on this rank only;
skips a collective; or stalls for longer than the timeout of the others' collectives. With a scaler
of gradients, it can also raise between two calls of the scaler (``unscaled``)."""


class Fault:
    """The fault of one rank in one step; none if it has no kind."""

    def __init__(self, kind: str = "", faulty: bool = False, device: str = "cpu") -> None:
        self.kind = kind
        self.faulty = faulty
        self.device = device

    def takes(self, kind: str) -> bool:
        """Whether this rank has this kind of fault now; true once."""
        found = self.faulty and self.kind == kind
        if found:
            self.kind = ""
        return found

    def at(self, place: str) -> Callable[..., None]:
        """Return a hook for a place in the model."""

        def hook(*_: object) -> None:
            if self.takes(place):
                raise Injected(place)
            if place == "forward" and self.takes("collective"):
                tensor = torch.ones(3, device=self.device)
                dist.all_reduce(tensor, op=dist.ReduceOp.BAND)  # not of floats: raises
            if place == "forward" and self.takes("stalled"):
                eventually(reloadpg.recovery.recovery_requested)

        return hook

    def begin_step(self) -> None:
        if self.takes("recovery"):
            if self.device == "cuda":
                self._inject("fail", "init")
            else:
                interfere("recover.group0", fail)
            self._cut()
        if self.takes("cut"):
            self._cut()

    def _cut(self) -> None:
        if self.device == "cuda":
            self._inject("async", "collective")
        else:
            cut(connections())

    def _inject(self, action: Any, call: Any) -> None:
        standins.inject(standins.Fault(action, call, rank=dist.get_rank(), times=1))

    def end_step(self, group: Any) -> None:
        """Sum over a group at the end of the step, as trainers do to log losses."""
        self.at("end")()
        if self.takes("skipped"):
            return
        with impatience(*[group] * (self.kind == "skipped")):
            dist.all_reduce(torch.ones(1, device=self.device), group=group)


class Training:
    """One rank's training of a model with DDP or FSDP2, and its next fault.

    Kinds: ``ddp``; ``amp``, DDP with a scaler of gradients, dropout, batch norm and a schedule;
    ``fsdp``; ``accumulate``, FSDP2 that reduces the gradients of every second step.
    """

    def __init__(self, kind: str, device: str) -> None:
        self.kind = kind
        self.device = device
        self.fault = Fault()
        self.group: Any = dist.group.WORLD
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        layers += [copy.deepcopy(layers[0]) for _ in range(3)]
        layers[1].register_forward_pre_hook(lambda *_: self.fault.at("forward")())
        layers[2].register_full_backward_pre_hook(lambda *_: self.fault.at("backward")())
        if kind == "amp":
            layers.insert(
                1, torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(WIDTH))
            )
        model: Any = torch.nn.Sequential(*layers).to(device)
        if kind in ("ddp", "amp"):
            # Buckets of one layer each, rebuilt after the first step.
            model = DistributedDataParallel(model, bucket_cap_mb=1e-3)
        else:
            mesh = init_device_mesh(device, (dist.get_world_size(),))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(device, growth_interval=3, enabled=kind == "amp")
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.seen: dict[str, Any] = {"inputs": torch.zeros(WIDTH, device=device), "losses": []}

    @property
    def state(self) -> tuple[Any, ...]:
        """The state that an unfinished step may have changed."""
        return self.model, self.optimizer, self.scaler, self.schedule, self.seen

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
        inputs = torch.randn(8, WIDTH, generator=generator).to(self.device)
        accumulates = self.kind == "accumulate"
        if accumulates:
            self.model.set_requires_gradient_sync(number % 2 == 1)
        self.seen["inputs"] += inputs[0]
        loss = (self.model(inputs) - inputs.roll(1, 1)).pow(2).mean()
        self.scaler.scale(loss).backward()
        self.seen["losses"].append(loss.item())
        if accumulates and number % 2 == 0:
            return
        self.scaler.unscale_(self.optimizer)
        self.fault.at("unscaled")()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()

    def weights(self) -> Any:
        whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters())
        found = [tensor.detach().tolist() for tensor in whole]
        found += [buffer.tolist() for buffer in self.model.buffers()]
        return [found, self.seen["inputs"].tolist(), self.seen["losses"], self.scaler.get_scale()]


class MegatronTraining:
    """One rank's training with megatron-core, tensor 2 x pipeline 2."""

    device = "cpu"

    def __init__(self) -> None:
        self.fault = Fault()
        self.gpt = GptTraining()
        self.group = self.gpt.groups["tensor"]
        layer = self.gpt.gpt.decoder.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_: self.fault.at("forward")())
        layer.mlp.register_full_backward_hook(lambda *_: self.fault.at("backward")())

    @property
    def state(self) -> tuple[Any, ...]:
        """The state, including megatron's generators for tensor parallelism."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        return self.gpt.gpt, self.gpt.optimizer, get_cuda_rng_tracker()

    def step(self, number: int) -> None:
        self.gpt.step(number)

    def weights(self) -> Any:
        return self.gpt.weights()


def train(training: Any, steps: int, faults: dict[int, tuple[int, str]]) -> Any:
    """Train; return the final weights and the attempts at each step."""
    attempts = []
    for step in reloadpg.recovery.retrying(
        range(steps), attempts=5, on=(Injected, RuntimeError, ValueError), state=training.state
    ):
        with step:
            attempts.append((step.number, step.attempt))
            rank, kind = faults.get(step.number, (-1, "")) if step.attempt == 1 else (-1, "")
            stop_interfering()
            training.fault = Fault(
                kind, rank == dist.get_rank(), getattr(training, "device", "cpu")
            )
            stalled = training.fault.kind == "stalled"
            with impatience(*(_world.pg_map if stalled else ())):
                training.fault.begin_step()
                training.step(step.number)
                training.fault.end_step(training.group)
    return training.weights(), attempts


def trained(
    rank: int,
    size: int,
    kind: str,
    steps: int,
    faults: dict[int, tuple[int, str]],
    device: str = "cpu",
) -> Any:
    """Train with faults; return also the generation, and the faults with a long recovery."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        reloadpg.install(recoverable=True, timeout=PATIENCE)
        dist.init_process_group("nccl", timeout=PATIENCE)
    else:
        faulty_gloo.register()
        reloadpg.install(backends={"gloo", "faulty"}, timeout=PATIENCE)
        fails = any(fault == "recovery" for _, fault in faults.values())
        worlds.init("faulty" if fails else "gloo", timeout=PATIENCE)
    slow: set[int] = set()  # the faults after which a rank waited for a collective's timeout

    def note(report: reloadpg.Report) -> None:
        if report.total_ms >= 1e3 * PATIENCE.total_seconds():
            slow.add(report.generation - (not report.error))

    reloadpg.on_report(note)
    with ExitStack() as stack:
        if kind == "megatron":
            stack.enter_context(cuda_on_cpu())
        training: Any = MegatronTraining() if kind == "megatron" else Training(kind, device)
        weights, attempts = train(training, steps, faults)
    return weights, attempts, reloadpg.status().generation, slow


@pytest.mark.parametrize(
    "case",
    [
        # The state of FSDP2 within a step differs between versions of torch.
        pytest.param(("fsdp", 4), marks=[pytest.mark.matrix, pytest.mark.slow]),
        pytest.param(("accumulate", 4), marks=[pytest.mark.matrix, pytest.mark.slow]),
        *sampled(
            [(kind, 4) for kind in ("ddp", "amp")]
            + [(kind, 50) for kind in ("fsdp", "ddp", "accumulate", "amp")]
            + [("megatron", 20)],
            ("amp", 4),
        ),
    ],
    ids=str,
)
def test_training_ends_as_without_a_fault(case: tuple[str, int]) -> None:
    """The results are bit-identical; the faults and their steps are random.

    No rank waits for a collective's timeout, unless gloo has lost a send.
    """
    kind, count = case
    _compare(kind, _drawn(kind, count), "cpu")


@pytest.mark.standins
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.parametrize("kind", ["ddp", "amp", "fsdp", "accumulate"])
def test_training_on_nccl_ends_as_without_a_fault(kind: str) -> None:
    """Torch's ProcessGroupNCCL over the stand-ins; no rank waits for a collective's timeout.

    ``TRAINING_FAULTS`` is the number of faults; by default there is one of each kind.
    """
    count = int(os.environ.get("TRAINING_FAULTS", len(KINDS)))
    _compare(kind, _drawn(kind, count), "cuda")


def _drawn(kind: str, count: int) -> dict[int, tuple[int, str]]:
    """Draw random faults: the rank and the kind, by step."""
    drawn = random.Random(count)
    kinds = [*KINDS, *drawn.choices(KINDS, k=50)]
    if count == 4:
        kinds = ["backward", "cut", "end", "forward"]
    if kind == "amp":
        kinds[0] = "unscaled"
    return {2 * i + i % 2: (drawn.randrange(4), one) for i, one in enumerate(kinds[:count])}


def _compare(kind: str, faults: dict[int, tuple[int, str]], device: str) -> None:
    """Compare training with these faults and without."""
    steps = 2 * len(faults) + 2
    preload = PRELOAD if kind == "megatron" else ()
    nccl = {"standins": True} if device == "cuda" else {}
    expected, found = (
        run_ranks(
            trained, 4, args=(kind, steps, some, device), timeout=500, preload=preload, **nccl
        )
        for some in ({}, faults)
    )
    kinds = [faults[step][1] for step in sorted(faults)]
    for rank, (weights, attempts, generation, slow) in enumerate(found):
        assert weights == expected[rank][0]
        assert attempts == found[0][1]
        assert {number for number, attempt in attempts if attempt > 1} == {*faults}
        assert generation == len(faults)
        # Gloo loses a send whose connection is cut while it is written.
        assert {kinds[one] for one in slow} <= ({"cut", "recovery"} if device == "cpu" else set())
