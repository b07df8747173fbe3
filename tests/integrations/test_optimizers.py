"""Phases after every n-th optimizer step, and what the hooks of frameworks refuse."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import worlds
from torch.nn.parallel import DistributedDataParallel

import reloadpg
from reloadpg.errors import InvalidOptionError, ReloadpgError
from reloadpg.integrations import deepspeed, lightning, optimizers, transformers, trl
from reloadpg.testing import run_ranks

STEPS = 6


def train(rank: int, every: int) -> dict[str, Any]:
    """Two optimizers, each of half of a DDP model; the first one's steps count."""
    torch.manual_seed(7)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1))
    )
    first, second = (torch.optim.AdamW(part.parameters(), lr=0.05) for part in model.module)
    seen: list[str] = []

    def phase() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            seen.append(f"{type(error).__name__} {reloadpg.status().state}")

    handle = optimizers.every(every, phase) if every else None
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()
        losses.append(loss.item())
    result = {"losses": losses, "weights": [p.tolist() for p in model.parameters()]}
    if handle is not None:
        handle.remove()
        handle.remove()
        first.step()  # counts no more
        assert handle.cycles == len(seen)
    return {"result": result, "seen": seen, "generation": reloadpg.status().generation}


def plain_and_cycled(rank: int, size: int) -> list[dict[str, Any]]:
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    return [train(rank, 0), train(rank, 2), named(rank), raising(rank)]


def named(rank: int) -> dict[str, Any]:
    """The steps of one optimizer, while another one steps too."""
    one, other = (torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1) for _ in range(2))
    with optimizers.every(3, optimizer=one) as handle:
        for _ in range(7):
            other.step()
            other.step()
            one.step()
    one.step()
    one.step()
    return {"cycles": handle.cycles}


def raising(rank: int) -> dict[str, Any]:
    """A phase that raises on all ranks: the groups are back, the error goes on."""

    def phase() -> None:
        raise KeyError("on purpose")

    turn = optimizers.OffloadedPhase(phase)
    with pytest.raises(KeyError, match="on purpose"):
        turn()
    value = torch.ones(1)
    dist.all_reduce(value)
    return {"sum": value.item(), "cycles": turn.cycles, "calls": turn.calls}


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_ranks(plain_and_cycled, 2, timeout=120)


def test_training_is_equal_to_the_last_bit(ranks: list[list[dict[str, Any]]]) -> None:
    """After each second step the groups go and come back: three times."""
    for plain, cycled, *_ in ranks:
        assert cycled["result"] == plain["result"]
        assert len(set(plain["result"]["losses"])) == STEPS
        assert cycled["seen"] == ["GroupOffloadedError offloaded"] * 3
        assert (plain["generation"], cycled["generation"]) == (0, 3)


def test_the_steps_of_a_named_optimizer_count(ranks: list[list[dict[str, Any]]]) -> None:
    """7 of them make two cycles; none after the handle's block."""
    for _, _, seen, _ in ranks:
        assert seen["cycles"] == 2


def test_a_phase_that_raises_leaves_live_groups(ranks: list[list[dict[str, Any]]]) -> None:
    """Its error goes on and the cycle does not count."""
    for *_, seen in ranks:
        assert seen == {"sum": 2.0, "cycles": 0, "calls": 1}


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": True}, {"every": 1.5}, {"phase": 3}, {"block": object()}]
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=r"nothing was registered"):
        optimizers.OffloadedPhase(**wrong)


def test_hooks_refuse_what_they_cannot_use() -> None:
    """Each says what it was given, and that nothing was done."""
    with pytest.raises(InvalidOptionError, match=r"when='never'.*one of step_end, epoch_end"):
        transformers.offloaded_phase(when="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"when='never'.*one of train_batch_end"):
        lightning.offloaded_phase(when="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"rollout=None.*nothing was wrapped"):
        trl.offloaded_rollout(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"offloaded\(Linear\).*deepspeed.initialize"):
        deepspeed.offloaded(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("module", "names"),
    [(transformers, ["transformers"]), (lightning, ["lightning.pytorch", "pytorch_lightning"])],
)
def test_without_the_framework_the_error_says_what_to_install(
    module: Any, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module itself can be imported without it."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    extra = module.__name__.rsplit(".", 1)[-1]
    with pytest.raises(ReloadpgError, match=rf"not installed; nothing was.*reloadpg\[{extra}\]"):
        module.offloaded_phase()


class Order:
    """A block that notes when it was entered and left."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __enter__(self) -> None:
        self.seen.append("enter")

    def __exit__(self, *_: object) -> None:
        self.seen.append("exit")


def test_a_rollout_is_prepared_with_live_groups() -> None:
    """First the weights, then the block, in it the rollout, with what TRL gave."""
    order = Order()
    rollout = trl.offloaded_rollout(
        lambda prompts, trainer: order.seen.append(f"rollout {prompts} {trainer}") or "done",
        prepare=lambda trainer: order.seen.append(f"prepare {trainer}"),
        block=order,
    )
    assert rollout("prompts", "trainer") == "done"
    assert order.seen == ["prepare trainer", "enter", "rollout prompts trainer", "exit"]


def test_a_deepspeed_engine_drops_its_handles_before_its_groups_go() -> None:
    """The engine's own call, before the block; entered again and again."""
    order = Order()

    class Engine:
        def empty_partition_cache(self) -> None:
            order.seen.append("empty")

    around = deepspeed.offloaded(Engine(), block=order)
    for _ in range(2):
        with around:
            order.seen.append("body")
    assert order.seen == ["empty", "enter", "body", "exit"] * 2
