"""Cases that one process goes through in turn, each with environment variables of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["in_each", "variables"]


@contextmanager
def variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """A block in which the process has these variables; None removes one."""
    before = dict(os.environ)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def in_each(
    rank: int,
    world_size: int,
    environments: Mapping[str, Mapping[str, str | None]],
    function: Callable[[int, int], Any],
) -> dict[str, Any]:
    """What a function of a rank returns in each environment; it leaves no default group."""
    results = {}
    for name, changes in environments.items():
        with variables(changes):
            results[name] = function(rank, world_size)
        assert not dist.is_initialized()
    return results
