"""``python -m reloadpg``: the command line. One function a subcommand adds its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file name in an existing directory")
    return path


def _demo(subcommands: Any) -> None:
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
        "--ranks", type=_positive, help="processes (default: 4; on GPUs one a GPU, 4 at most)"
    )
    parser.add_argument(
        "--cycles", type=_positive, default=6, help="iterations (default: %(default)s)"
    )
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cuda", "simulated"),
        default="auto",
        help="what to run on (default: the GPUs of this machine, or else the simulated one)",
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="PATH", help="also write all that each rank saw"
    )

    def run(options: argparse.Namespace) -> int:
        from .demo.command import demo

        return demo(options.ranks, options.cycles, options.accelerator, options.json)

    parser.set_defaults(run=run)


SUBCOMMANDS: tuple[Callable[[Any], None], ...] = (_demo,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: the command line without the program's name; None for this process's own.

    Returns:
        The exit code.

    Raises:
        SystemExit: the arguments cannot be used (code 2), or help was asked for.
    """
    parser = argparse.ArgumentParser(
        prog="python -m reloadpg",
        description="Release NCCL communicators while they are not needed.",
    )
    subcommands = parser.add_subparsers(title="commands", required=True)
    for add in SUBCOMMANDS:
        add(subcommands)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
