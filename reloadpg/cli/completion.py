"""``reloadpg completion``: print a script for a shell that completes commands and options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from .console import say

SCRIPT = """\
{zsh}_reloadpg() {{
    local words=()
    COMPREPLY=()
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    else
        words=({commands} --version --help)
    fi
    COMPREPLY=($(compgen -W "${{words[*]}}" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _reloadpg reloadpg
"""
"""For bash, and for zsh with ``bashcompinit``: files are completed where no word fits."""

ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description="Print a script for a shell that completes commands, options and files.",
        epilog='Example: eval "$(reloadpg completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that evaluates it")
    parser.set_defaults(run=lambda options: _run(options, subcommands.choices))


def _run(options: argparse.Namespace, commands: Mapping[str, argparse.ArgumentParser]) -> int:
    cases = "\n".join(
        f"            {name}) words=({' '.join(_words(parser))}) ;;"
        for name, parser in commands.items()
    )
    zsh = ZSH if options.shell == "zsh" else ""
    say(SCRIPT.format(zsh=zsh, cases=cases, commands=" ".join(commands)).rstrip("\n"))
    return 0


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a command, and the values of its arguments that have choices."""
    parser.epilog = None  # its example may have options of other programs
    text = parser.format_help()
    options = re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
    choices = re.findall(r"\{([\w,-]*)\}", text)
    return list(dict.fromkeys([*options, *",".join(choices).split(",")]))
