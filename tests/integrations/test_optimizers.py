"""Phases after every n-th optimizer step, and what the hooks of frameworks refuse."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from torch.nn.parallel import DistributedDataParallel

import reloadpg
from reloadpg.errors import InvalidOptionError, ReloadpgError
from reloadpg.integrations import deepspeed, lightning, optimizers, transformers

STEPS = 6


def train(rank: int, every: int) -> tuple[list[float], list[Any]]:
    """Train two optimizers, each of half of a DDP model; the first one's steps count."""
    torch.manual_seed(7)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1))
    )
    first, second = (torch.optim.AdamW(part.parameters(), lr=0.05) for part in model.module)

    def phase() -> None:
        assert reloadpg.status().state == "offloaded"
        with pytest.raises(reloadpg.GroupOffloadedError):
            dist.all_reduce(torch.ones(1))

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
    weights = [p.tolist() for p in model.parameters()]
    if handle is not None:
        handle.remove()
        handle.remove()
        first.step()  # counts no more
        assert handle.cycles == reloadpg.status().generation == STEPS // every
    return losses, weights


@pytest.mark.ranks(2)
def test_training_with_a_phase_after_each_second_step_equals_plain_training(rank: int) -> None:
    """To the last bit. The groups are offloaded in each phase."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    plain = train(rank, 0)
    assert reloadpg.status().generation == 0
    assert len(set(plain[0])) == STEPS
    assert train(rank, 2) == plain


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_only_the_steps_of_a_named_optimizer_count_and_only_within_the_handles_block() -> None:
    """7 of them make two cycles. A phase that raises leaves live groups, and does not count."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init("gloo")
    one, other = (torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1) for _ in range(2))
    with optimizers.every(3, optimizer=one) as handle:
        for _ in range(7):
            other.step()
            other.step()
            one.step()
    one.step()
    one.step()
    assert handle.cycles == 2

    def phase() -> None:
        raise KeyError("on purpose")

    turn = optimizers.OffloadedPhase(phase)
    with pytest.raises(KeyError, match="on purpose"):
        turn()
    assert worlds.sums_right(None)
    assert (turn.cycles, turn.calls) == (0, 1)


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": True}, {"every": 1.5}, {"phase": 3}, {"block": object()}]
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=r"nothing was registered"):
        optimizers.OffloadedPhase(**wrong)


def test_hooks_refuse_what_they_cannot_use() -> None:
    """The error names the argument, and says that nothing was done."""
    with pytest.raises(InvalidOptionError, match=r"when='never'.*one of step_end, epoch_end"):
        transformers.offloaded_phase(when="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"when='never'.*one of train_batch_end"):
        lightning.offloaded_phase(when="never")  # type: ignore[arg-type]
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


def test_a_deepspeed_engine_drops_its_handles_before_its_groups_are_offloaded() -> None:
    """By a call of the engine before the block, each time that it is entered."""
    order = Order()

    class Engine:
        def empty_partition_cache(self) -> None:
            order.seen.append("empty")

    around = deepspeed.offloaded(Engine(), block=order)
    for _ in range(2):
        with around:
            order.seen.append("body")
    assert order.seen == ["empty", "enter", "body", "exit"] * 2
