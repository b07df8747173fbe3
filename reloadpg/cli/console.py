"""Shared code of the commands: types of options, findings, output.

Output is plain text, the same on a terminal and in a pipe. Results go to stdout and errors to
stderr, so that a pipe gets the result alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# -- types of options; what they raise becomes argparse's error -----------------------------------


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


# -- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: ``ok``, ``note``, ``warning`` or ``problem``; empty for a plain statement.
        remedy: the action to take, a line each; empty if none is needed.
    """

    check: str
    level: str
    message: str
    remedy: str = ""

    def lines(self, head: str) -> list[str]:
        """The message after a head, and the remedy below it."""
        indent = " " * len(head)
        return [head + self.message, *(f"{indent}-> {line}" for line in self.remedy.splitlines())]


class CommandError(Exception):
    """A command failed; the message is shown without a traceback."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Write text as a line and flush. Local."""
    stream = sys.stdout if stream is None else stream
    stream.write(f"{text}\n")
    stream.flush()
