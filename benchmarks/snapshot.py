"""Measure what ``retrying(state=...)`` costs a step: the copy of a model and of its optimizer.

One process on the CPU trains no model: it takes the snapshot of one with AdamW's state again and
again, as each step does, and also copies both with ``copy.deepcopy`` as a loop by hand would.
Each is a median. The first snapshot, which makes the buffers, is given by itself.

Usage: python benchmarks/snapshot.py [--json PATH] [--quick]
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from _output import command_line, machine, write_json

from reloadpg.recovery.snapshot import Snapshot


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Median time of some calls."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(found)


def main() -> None:
    parser = command_line(__doc__, check=False)
    options = parser.parse_args()
    width, times = (128, 3) if options.quick else (1024, 15)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    size = 3 * sum(one.numel() * one.itemsize for one in model.parameters())
    snapshot = Snapshot((model, optimizer))
    found = {
        "mib": size / 2**20,
        "first_ms": milliseconds(snapshot.take, 1),
        "take_ms": milliseconds(snapshot.take, times),
        "restore_ms": milliseconds(snapshot.restore, times),
        "deepcopy_ms": milliseconds(
            lambda: copy.deepcopy((model.state_dict(), optimizer.state_dict())), times
        ),
    }
    print(machine())
    print(", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
