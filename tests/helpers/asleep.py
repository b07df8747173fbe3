"""Runs an unmodified training script and ends it after a step, with its groups asleep or not.

Usage: ``python asleep.py WAY ASLEEP SCRIPT ARGUMENT...``. Where ``ASLEEP`` is 1, reloadpg is
installed and the groups are offloaded before the end. It runs in a hook after an optimizer step,
when no collective is in flight.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import reloadpg

AFTER_STEP = 3


class Ended(BaseException):
    """Ends the script as if it had returned."""


def give_up() -> NoReturn:
    raise ValueError("of the program")


WAYS: dict[str, Callable[[], object]] = {
    "exception": give_up,
    "exit": lambda: sys.exit(3),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
"""The ways to end within a step; ``return`` ends the script as if it were shorter."""


def wait_for_all() -> None:
    """Wait until all ranks are here, by the store of the test, which outlives them."""
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    if store.add("asleep", 1) == size:
        store.set("all are asleep", "")
    store.wait(["all are asleep"])


def main() -> None:
    way, asleep, script, *arguments = sys.argv[1:]
    steps = 0

    def end_after_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == AFTER_STEP:
            dist.barrier()
            if asleep == "1":
                reloadpg.offload()
            wait_for_all()  # the rank that ends first may be the store's server
            if way == "return":
                raise Ended
            WAYS[way]()

    if asleep == "1":
        reloadpg.install(backends={"gloo"}, timeout=60)
    register_optimizer_step_post_hook(end_after_step)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except Ended:
        return
    raise RuntimeError(f"{script} took {steps} steps")


if __name__ == "__main__":
    main()
