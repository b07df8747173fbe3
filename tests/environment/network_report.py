"""Run in a network namespace: comes up on two ranks, and prints what it saw of ``os.environ``.

``python network_report.py '[NETWORK, [END, ...]]'``, with context, exception,
destroy or failure as END.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import reloadpg
from reloadpg.testing import run_ranks


def job(rank: int, world_size: int, network: Any, ends: list[str]) -> Any:
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reloadpg.environment.network").addHandler(handler)
    logging.getLogger("reloadpg").setLevel(logging.INFO)
    before = dict(os.environ)
    seen = []
    for end in ends:
        inside: dict[str, str] = {}
        lines.clear()
        with contextlib.suppress(ValueError, OSError, reloadpg.PeerFailedError):
            bring_up(network, end, lambda into=inside: into.update(changes(before)))
        seen.append((inside, changes(before), list(lines)))
    return seen


def changes(before: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def bring_up(network: Any, end: str, look: Callable[[], None]) -> None:
    options: dict[str, Any] = {"network": network, "init_timeout": 60}
    if end == "failure":

        def create(store: dist.Store, rank: int, size: int, _: object) -> None:
            look()
            store.set(f"{rank} has looked", "")  # the first failure ends the others' bring-up
            store.wait([f"{other} has looked" for other in range(size)], timedelta(minutes=1))
            raise OSError("no group today")

        dist.Backend.register_backend("broken", create, devices=["cpu"])
        reloadpg.init_distributed("cpu:broken", **options)
    context = reloadpg.init_distributed(**options)
    if end == "destroy":
        look()
        reloadpg.barrier(60, "both have looked")
        reloadpg.destroy_distributed()
        return
    with context:
        look()
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
        if end == "exception":
            raise ValueError("on all ranks")


if __name__ == "__main__":
    gloo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME")}
    print(json.dumps(run_ranks(job, 2, args=tuple(json.loads(sys.argv[1])), timeout=150, env=gloo)))
