"""A loop that repeats a step on all ranks after a fault, as the recipe of docs/recovery.md does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import reloadpg
from helpers.fault_job import Injected

MOST = 5
"""Maximum number of attempts at a step."""


def repeat(
    step: Callable[[int, int], Any],
    count: int,
    recover: Callable[[], object] = reloadpg.recovery.recover,
) -> list[tuple[int, Any]]:
    """Run steps with collectives of all ranks; after a fault, recover and repeat on all ranks.

    Args:
        step: called with the number of the step and of the attempt, both the same on all ranks.
        count: number of steps.
        recover: called after a fault, in the handler of its error if there is one.

    Returns:
        For each step the number of attempts, and the result of the last one.
    """
    attempts: Counter[int] = Counter()
    results: dict[int, Any] = {}
    number = 0
    while number <= count:
        attempts[number] += 1
        assert attempts[number] <= MOST
        try:
            if number == count:  # no rank leaves the loop while another one repeats its last step
                dist.all_reduce(torch.ones(1, device=_device()))
            else:
                results[number] = step(number, attempts[number])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if not reloadpg.recovery.recovery_requested():
                number += 1
                continue
        except (RuntimeError, Injected):
            recover()
        else:
            recover()
        least = torch.tensor(number, device=_device())
        dist.all_reduce(least, op=dist.ReduceOp.MIN)  # another rank may be one step behind
        number = int(least)
    return [(attempts[number], results[number]) for number in range(count)]


def _device() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"
