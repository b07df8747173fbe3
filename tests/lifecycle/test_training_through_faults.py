"""Training that goes through faults ends bit-equal with training that went through none."""

from __future__ import annotations

import copy
import gc
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from fault_job import PATIENCE, cut, sockets
from recovery_job import interfere
from sampling import sampled
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reloadpg
from reloadpg.lifecycle.recreate import Rebuilds, Releases
from reloadpg.rendezvous.round import Round
from reloadpg.testing import run_ranks

WIDTH = 16
ORIGINALS = Releases.release, Rebuilds.rebuild, Round._reach
PLACES = ("forward", "backward", "end", "cut", "recovery")


class Injected(Exception):
    """The error of a fault that the test brings about."""


def connections() -> set[int]:
    """The descriptors of this process's connections, except those to the store."""
    port, found = int(os.environ["MASTER_PORT"]), set()
    for descriptor in sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                ports = {one.getsockname()[1], one.getpeername()[1]}
                if port not in ports:
                    found.add(descriptor)
    return found


class Training:
    """One rank's training: a model, and what is to be brought about in it next."""

    def __init__(self, kind: str, mesh: DeviceMesh) -> None:
        self.kind = kind
        self.mesh = mesh
        self.next = ""
        self.make()

    def make(self) -> None:
        """Make the model and its optimizer anew, as after a fault."""
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
        layers += [copy.deepcopy(layers[0]) for _ in range(3)]
        model: Any = torch.nn.Sequential(*layers)
        layers[1].register_forward_pre_hook(self._at("forward"))
        layers[2].register_full_backward_pre_hook(self._at("backward"))
        if self.kind == "ddp":  # its buckets stay as they are, and with them the order of sums
            model = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            for layer in layers:
                fully_shard(layer, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def _at(self, place: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self.next == place:
                self.next = ""
                raise Injected(place)

        return hook

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
        if self.next in ("cut", "recovery"):
            if self.next == "recovery":
                interfere("recover.group0", self._at_recovery)
            self.next = ""
            cut(connections())
        (self.model(inputs) - inputs.roll(1, 1)).pow(2).mean().backward()
        self.optimizer.step()
        self._at("end")()

    def _at_recovery(self) -> None:
        raise Injected("in the recovery")

    def weights(self) -> list[Any]:
        whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters())
        return [tensor.detach().tolist() for tensor in whole]


def train(
    kind: str, mesh: DeviceMesh, steps: int, faults: dict[int, tuple[int, str]]
) -> tuple[list[Any], list[tuple[int, int]]]:
    """Train; the weights at the end, and the attempts at each step."""
    training, attempts, snapshot = Training(kind, mesh), [], None
    for step in reloadpg.retrying(range(steps), attempts=5, on=(Injected, RuntimeError)):
        with step:
            attempts.append((step.number, step.attempt))
            if step.attempt == 1:
                snapshot = training.snapshot()
                rank, training.next = faults.get(step.number, (-1, ""))
                if rank != dist.get_rank():
                    training.next = ""
            else:
                Releases.release, Rebuilds.rebuild, Round._reach = ORIGINALS  # type: ignore[method-assign]
                training.restore(snapshot)
            try:
                training.step(step.number)
            except (Injected, RuntimeError):
                training.drop()
                raise
    return training.weights(), attempts


def with_and_without(
    rank: int, size: int, kind: str, steps: int, faults: dict[int, tuple[int, str]]
) -> Any:
    """The same training twice in one job, first without a fault."""
    reloadpg.install(backends={"gloo"}, timeout=PATIENCE)
    worlds.init("gloo", timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (size,))
    expected, _ = train(kind, mesh, steps, {})
    weights, attempts = train(kind, mesh, steps, faults)
    return weights == expected, attempts, reloadpg.status().generation


@pytest.mark.parametrize(
    "case", sampled([("fsdp", 3), ("fsdp", 20), ("ddp", 8)], ("fsdp", 3)), ids=str
)
def test_training_ends_as_without_a_fault(case: tuple[str, int]) -> None:
    """Bit by bit, wherever a step fails: in forward, backward, at its end, in the network."""
    kind, count = case
    drawn = random.Random(count)
    places = [*PLACES, *drawn.choices(PLACES, k=20)] if count > 3 else ["backward", "cut", "end"]
    faults = {2 * i + 1: (drawn.randrange(4), place) for i, place in enumerate(places[:count])}
    steps = 2 * count + 2
    results = run_ranks(with_and_without, 4, args=(kind, steps, faults), timeout=280)
    for equal, attempts, generation in results:
        assert equal
        assert attempts == results[0][1]
        assert {number for number, attempt in attempts if attempt > 1} == {*faults}
        assert generation == count
