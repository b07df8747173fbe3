"""``reloadpg demo``: run ``examples/colocated_rl.py`` with and without reloadpg, and compare.

The example prints losses and evaluations with all digits and, at the end, a hash of the weights, so
runs that print the same lines have the same results, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..texts import counted
from .console import CommandError, positive, say

EXAMPLES = tuple(parent / "examples" / "colocated_rl.py" for parent in Path(__file__).parents[1:3])
"""Paths of the example: in an installed package, and in the source tree."""

FREED = re.compile(r"last rollout: [1-9]\d* groups offloaded in \d+ ms, [1-9]\d* MiB freed.*")
"""What the example prints in addition if it uses reloadpg."""


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="a reinforcement-learning loop that offloads its groups in each iteration",
        description=(
            "Run a colocated reinforcement-learning loop on this machine: train, offload the "
            "process groups, generate in the released memory, reload. Run it again without "
            "reloadpg and compare the losses bit by bit. Exit code 1 if anything differs."
        ),
        epilog="Example: reloadpg demo --ranks 2 --cycles 2",
    )
    ranks = "processes (default: 4; on GPUs one per GPU, at most 4)"
    parser.add_argument("--ranks", type=positive, metavar="N", help=ranks)
    iterations = "iterations (default: %(default)s)"
    parser.add_argument("--cycles", type=positive, default=6, metavar="N", help=iterations)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if find_spec("numpy") is None:
        raise CommandError("numpy is missing; nothing was started. pip install 'reloadpg[demo]'")
    devices = _cuda_devices()
    ranks = min(options.ranks or 4, devices or sys.maxsize)
    example = next(path for path in EXAMPLES if path.is_file())
    place = f"NCCL, one rank per GPU ({counted(devices, 'GPU')} here)" if devices else ""
    say(f"reloadpg demo: {counted(ranks, 'rank')}, {counted(options.cycles, 'iteration')}")
    say(f"  runs on: {place or 'the simulated accelerator, on the CPU'}")
    say("  task:    say the largest digit so far; reward is the share of right answers")
    say(f"  program: {example}\n\nFirst with reloadpg:")
    run = _lines_of(example, ranks, options.cycles, devices)
    say("\nThen without reloadpg, on fresh ranks:")
    reference = _lines_of(example, ranks, options.cycles, devices, "--no-offload")
    if problem := difference(run, reference):
        say(f"\nFAILED: {problem}")
        return 1
    say("\nPassed: losses, evaluations and final weights are bit-identical in both runs.")
    return 0


def _cuda_devices() -> int:
    """Number of GPUs that NCCL can use here. Creates no CUDA context."""
    import torch
    import torch.distributed as dist

    usable = torch.cuda.is_available() and dist.is_nccl_available()
    return torch.cuda.device_count() if usable else 0


def difference(run: Sequence[str], reference: Sequence[str]) -> str:
    """How a run differs from one without reloadpg, or that it freed nothing; empty if neither."""
    *same, freed = run
    for line, other in zip_longest(same, reference, fillvalue="nothing"):
        if line != other:
            return f"with reloadpg '{line}', without '{other}'"
    return "" if FREED.fullmatch(freed) else f"no memory was freed ({freed})"


def _lines_of(example: Path, ranks: int, cycles: int, devices: int, *options: str) -> list[str]:
    """Run the example on fresh ranks; show and return the lines that rank 0 prints."""
    from ..testing import RanksFailedError, run_ranks

    variables: dict[str, str | None] = {
        "RELOADPG_AUTOINSTALL": None,  # the example installs, or must not
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        **({} if devices else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    arguments = [str(example), "--iterations", str(cycles), *options]
    try:
        printed = run_ranks(
            _rank, ranks, args=(arguments,), timeout=600.0 + 60.0 * cycles, env=variables
        )
    except RanksFailedError as error:
        details = str(error).partition("\n")[2].strip()
        raise CommandError(f"a rank failed; all have been ended\n{details}", 1) from None
    lines: list[str] = printed[0].splitlines()
    say("\n".join(f"  {line}" for line in lines))
    return lines


def _rank(rank: int, world_size: int, arguments: list[str]) -> str:
    """Run the example as one rank of a job; return what it prints."""
    warnings.simplefilter("ignore")
    sys.argv = arguments
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(arguments[0], run_name="__main__")
    return printed.getvalue()
