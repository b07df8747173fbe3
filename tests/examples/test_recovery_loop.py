"""The loop of docs/recovery.md with real ranks: after a fault all of them repeat the step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers import worlds
from helpers.documents import ROOT, python_blocks
from helpers.fault_job import meet

import reloadpg
from reloadpg.testing import run_ranks

STEPS = 4
FAULTY = 1


def loop() -> Any:
    """The function ``repeat`` of the page."""
    (block,) = (b for b in python_blocks(ROOT / "docs" / "recovery.md") if "def repeat" in b.code)
    names: dict[str, Any] = {}
    exec(block.code.partition("reloadpg.install")[0], names)
    return names["repeat"]


class Training:
    """A model whose gradients are averaged over all ranks; one step fails once on one rank."""

    def __init__(self, fault: str) -> None:
        self.fault = fault if dist.get_rank() == FAULTY else ""
        self.log: list[int] = []
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        self.log.append(number)
        self._fail("begin", number)
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self._fail("after the collectives", number)
        self.optimizer.step()
        self._fail("end", number)

    def _fail(self, place: str, number: int) -> None:
        if self.fault == f"{place} of {number}":
            self.fault = ""
            raise RuntimeError(f"injected: {place}")

    def save(self) -> Any:
        return self.model.state_dict(), self.optimizer.state_dict()

    def restore(self, state: Any) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])


FAULTS = ("", "begin of 0", "after the collectives of 2", "end of 3")


def trained(_: int, world_size: int) -> list[tuple[list[Any], list[int], int]]:
    """One training for each fault, one after the other in the same job."""
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True)
    worlds.init()
    found = []
    for fault in FAULTS:
        meet(fault or "no fault", world_size)  # a fault is of one training, on all ranks
        training = Training(fault)
        loop()(training.step, STEPS, training.save, training.restore)
        weights = [parameter.tolist() for parameter in training.model.parameters()]
        found.append((weights, training.log, reloadpg.status().generation))
    return found


def test_the_step_is_repeated_and_the_result_is_that_of_an_undisturbed_run() -> None:
    """Bit by bit, also where the other ranks have completed the step, and the last one."""
    for undisturbed, *disturbed in run_ranks(trained, 3, timeout=240):
        for recoveries, (fault, run) in enumerate(zip(FAULTS[1:], disturbed, strict=True), start=1):
            weights, log, generation = run
            assert weights == undisturbed[0], fault
            assert generation == recoveries
            assert log.count(int(fault[-1])) == 2
            assert set(log) == set(range(STEPS))
