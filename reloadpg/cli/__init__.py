"""The command line: ``reloadpg`` and ``python -m reloadpg``. One module per subcommand.

Parsing needs the standard library alone, and a subcommand loads torch only when it runs. So
``doctor`` can diagnose an installation in which torch cannot be imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import __version__
from .console import CommandError, say
from .demo import add as add_demo
from .doctor import add as add_doctor
from .explain import add as add_explain
from .standins import add as add_standins
from .status import add as add_status

__all__ = ["main"]

SUBCOMMANDS = (add_demo, add_doctor, add_status, add_explain, add_standins)
"""Each adds one subcommand's parser. The parser sets defaults in the parsed options: ``run``, which
takes the options and returns the exit code; ``script_arguments`` if a script is run.
"""


def parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and the subcommands' parsers. Local; imports neither torch nor rich."""
    named = Path(sys.argv[0]).name == "reloadpg"
    top = argparse.ArgumentParser(
        prog="reloadpg" if named else "python -m reloadpg",
        description="Release NCCL communicators while they are not needed.",
    )
    top.add_argument("--version", action="version", version=f"reloadpg {__version__}")
    subcommands = top.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for add in SUBCOMMANDS:
        add(subcommands)
    return top, subcommands.choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand, of this process's command line by default; return the exit code.

    Without arguments it prints the help. The code is 130 after Ctrl-C. ``SystemExit`` is raised
    if the arguments are invalid (code 2), or help was requested.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    top, subcommands = parser()
    if not given:
        top.print_help()
        return 0
    options = _parsed(top, subcommands, given)
    try:
        code: int = options.run(options)
    except CommandError as error:
        say(f"reloadpg {options.command}: {error}", sys.stderr)
        return error.code
    except KeyboardInterrupt:
        say(f"\n{top.prog}: interrupted", sys.stderr)
        return 130
    return code


def _parsed(
    top: argparse.ArgumentParser,
    subcommands: Mapping[str, argparse.ArgumentParser],
    given: Sequence[str],
) -> argparse.Namespace:
    # Arguments after "--" belong to the script that a subcommand runs.
    at = given.index("--") if "--" in given else len(given)
    options, unknown = top.parse_known_args(given[:at])
    refuse = subcommands[options.command].error  # prints the usage of the subcommand
    runs_script = hasattr(options, "script_arguments")
    if at < len(given) and not runs_script:
        unknown += given[at:]
    if unknown:
        words = " ".join(unknown)
        hint = f"; arguments of the script follow --, as in: -- {words}" if runs_script else ""
        refuse(f"unrecognized arguments: {words}{hint}")
    if runs_script:
        options.script_arguments = list(given[at + 1 :])
    return options
