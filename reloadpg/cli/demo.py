"""``reloadpg demo``: the options; the demo itself is :mod:`reloadpg.demo`."""

from __future__ import annotations

import argparse
from typing import Any

from .console import new_file, positive

__all__ = ["add"]


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "demo",
        help="a reinforcement-learning loop that offloads its groups in each iteration",
        description=(
            "Run a colocated reinforcement-learning loop on this machine: train, offload the "
            "process groups, generate in the memory that was freed, reload. Run it again without "
            "reloadpg and compare the losses bit by bit. Exit code 1 if anything differs."
        ),
    )
    parser.add_argument(
        "--ranks", type=positive, help="processes (default: 4; on GPUs one a GPU, 4 at most)"
    )
    parser.add_argument(
        "--cycles", type=positive, default=6, help="iterations (default: %(default)s)"
    )
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cuda", "simulated"),
        default="auto",
        help="what to run on (default: the GPUs of this machine, or else the simulated one)",
    )
    parser.add_argument(
        "--json", type=new_file, metavar="PATH", help="also write all that each rank saw"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..demo.command import demo

    return demo(options.ranks, options.cycles, options.accelerator, options.json)
