"""Operators on the stand-in device give the results of torch's CPU kernels, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reloadpg.testing import run_ranks

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


def _on_both(rank: int, size: int) -> dict[str, Any]:
    return {
        name: [_trained(device, name) for device in ("cpu", "cuda")]
        for name in ("mlp", "transformer", "embedding")
    }


def test_training_steps_equal_those_of_the_cpu() -> None:
    """Forward, backward, clipping and three optimizers, bit by bit."""
    (seen,) = run_ranks(_on_both, 1, standins=True)
    for on_cpu, on_device in seen.values():
        assert on_device == on_cpu


def _details(rank: int, size: int) -> dict[str, Any]:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    out = torch.empty(0, device="cuda")
    torch.add(x, x, out=out)
    torch.manual_seed(3)
    first = [torch.rand(3, device="cuda").tolist() for _ in range(2)]
    torch.manual_seed(3)
    again = [torch.rand(3, device="cuda").tolist() for _ in range(2)]
    scaler = torch.amp.GradScaler("cuda")
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1)
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.linear(weight, torch.ones(2, 3, device="cuda")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    y = x.clone()
    kept = y.add_(1) is y and y.t().mul_(2).data_ptr() == y.data_ptr()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = x * 2
    torch.cuda.current_stream().wait_stream(side)
    try:
        torch.ops.aten._fused_dropout(x, 0.5)
    except NotImplementedError as error:
        refused = str(error)
    return {
        "repr": repr(x),
        "out": out.tolist(),
        "strided copy": x.t().contiguous().tolist(),
        "converted": x.to(torch.int64).tolist(),
        "picked": x[x > 2].tolist(),
        "same draws": first == again,
        "new draws": first[0] != first[1],
        "scaled": [weight.tolist(), scaler.get_scale()],
        "in place": [kept, y.tolist()],
        "stream": (late + 1).tolist(),
        "refused": refused,
    }


def test_operators_beyond_training_give_the_results_of_the_cpu() -> None:
    """Printing, out=, strides, conversion, selection, random values, in-place, streams, refusal."""
    (seen,) = run_ranks(_details, 1, standins=True)
    assert "device='cuda:0'" in seen["repr"]
    assert "[3., 4., 5.]" in seen["repr"]
    assert seen["out"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert seen["strided copy"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert seen["converted"] == [[0, 1, 2], [3, 4, 5]]
    assert seen["picked"] == [3.0, 4.0, 5.0]
    assert seen["same draws"]
    assert seen["new draws"]
    # The gradient, 2 * 65536, is no float16: the step is left out and the scale halved.
    assert seen["scaled"] == [[1.0, 1.0, 1.0], 32768.0]
    assert seen["in place"] == [True, [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]]
    assert seen["stream"] == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]
    assert "no CPU kernel" in seen["refused"]
