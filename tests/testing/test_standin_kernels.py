"""Training on the stand-in device gives the results of torch's CPU kernels, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is no CUDA build"),
]


def _trained(device: str, name: str) -> list[Any]:
    torch.manual_seed(0)
    models = {
        "mlp": (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)), torch.randn(8, 16)),
        "transformer": (
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
            torch.randn(4, 8, 16),
        ),
        "embedding": (
            nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(64, 50)),
            torch.randint(50, (8, 8)),
        ),
    }
    model, x = (one.to(device) for one in models[name])
    losses = []
    for make in (
        lambda: torch.optim.AdamW(model.parameters(), foreach=True),
        lambda: torch.optim.AdamW(model.parameters(), fused=True),
        lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ):
        optimizer = make()
        for _ in range(2):
            out = model(x)
            loss = (
                nn.functional.cross_entropy(out, torch.arange(8, device=device))
                if name == "embedding"
                else out.square().mean()
            )
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return [losses, *(parameter.tolist() for parameter in model.parameters())]


@pytest.mark.ranks(1, standins=True)
@pytest.mark.parametrize("name", ["mlp", "transformer", "embedding"])
def test_training_steps_equal_those_of_the_cpu(name: str) -> None:
    """Forward, backward, clipping and three optimizers."""
    assert _trained("cuda", name) == _trained("cpu", name)
