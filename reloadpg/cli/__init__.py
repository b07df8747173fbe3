"""The command line: ``reloadpg`` and ``python -m reloadpg``. One module a subcommand.

Parsing needs the standard library alone, and a subcommand loads torch only when it runs, so that
``doctor`` can say what is wrong with an installation in which torch cannot be imported. With
``rich`` (extra ``cli``) a terminal gets live tables and progress bars; without it, and when the
output is no terminal, everything is plain text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .bench import add as add_bench
from .console import say
from .demo import add as add_demo
from .doctor import add as add_doctor
from .explain import add as add_explain
from .status import add as add_status

__all__ = ["main"]

SUBCOMMANDS = (add_demo, add_doctor, add_status, add_explain, add_bench)
"""Each adds one subcommand's parser, which sets ``run`` in the options that it parses."""


def parser() -> argparse.ArgumentParser:
    """The whole command line. Local, cheap: imports neither torch nor rich."""
    named = Path(sys.argv[0]).name == "reloadpg"
    top = argparse.ArgumentParser(
        prog="reloadpg" if named else "python -m reloadpg",
        description="Release NCCL communicators while they are not needed.",
    )
    subcommands = top.add_subparsers(title="commands", required=True)
    for add in SUBCOMMANDS:
        add(subcommands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: the command line without the program's name; None for this process's own.

    Returns:
        The exit code; 130 after Ctrl-C, 141 if nobody reads stdout any more.

    Raises:
        SystemExit: the arguments cannot be used (code 2), or help was asked for.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # What follows "--" belongs to the script that a subcommand runs, whatever it looks like.
    own, rest = given, None
    if "--" in given:
        at = given.index("--")
        own, rest = given[:at], given[at + 1 :]
    top = parser()
    options = top.parse_args(own)
    if rest is not None and not hasattr(options, "script_arguments"):
        top.error(f"unrecognized arguments: -- {' '.join(rest)}")
    if rest is not None:
        options.script_arguments = rest
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        say(f"\n{top.prog}: interrupted", sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read stdout has gone, as head does. The interpreter flushes it again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code
