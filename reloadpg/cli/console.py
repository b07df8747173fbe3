"""Input and output that the commands share: types of options, pages of text.

A command describes its output as lines, tables and findings: in colours on a terminal, as plain
text elsewhere. Results go to stdout and errors to stderr, so that a pipe gets the result alone.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..texts import table

STYLES = {"good": "32", "note": "2", "warning": "33", "bad": "1;31", "head": "1"}
"""Style on a terminal, as in its control sequences, by tone."""

LEVELS = {"": "", "ok": "good", "note": "note", "warning": "warning", "problem": "bad"}
"""Tone of a finding by its level."""


# -- types of options; what they raise becomes argparse's error -----------------------------------


def positive(text: str) -> int:
    return _whole(text, 1)


def natural(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds, at most a day."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


# -- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of text.

    Attributes:
        tone: a key of :data:`STYLES`, or empty.
        indent: where it continues if it is longer than a terminal is wide; None to cut it off.
    """

    text: str
    tone: str = ""
    indent: int | None = 0

    def drawn(self, width: int) -> str:
        """The line as a terminal of this width shows it."""
        text = self.text
        if len(text) > width:
            if self.indent is None:
                text = f"{text[: width - 3]}..."
            else:
                indent = " " * min(self.indent, width // 2)
                text = textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)
        style = STYLES.get(self.tone)
        return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


Page = Sequence[Line]
"""Lines, one below the other."""


def tabled(
    header: Sequence[str], rows: Sequence[Sequence[object]], tones: Sequence[str] = ()
) -> list[Line]:
    """Columns of values as lines, numbers to the right; the last column continues below itself."""
    head, rule, *body = table(header, rows).split("\n")
    indent = len(rule.rstrip("-"))
    tones = tones or [""] * len(body)
    shown = (Line(text, tone, indent) for text, tone in zip(body, tones, strict=True))
    return [Line(head, "head"), Line(rule, "note"), *shown]


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

    def lines(self, head: str) -> Iterator[Line]:
        """Yield the message after a head, and the remedy below it."""
        yield Line(f"{head}{self.message}", LEVELS[self.level], len(head))
        for line in self.remedy.splitlines():
            yield Line(f"{' ' * len(head)}-> {line}", "", len(head) + 3)


class CommandError(Exception):
    """A command failed; the message is shown without a traceback."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Write a line and flush. Local."""
    stream = sys.stdout if stream is None else stream
    stream.write(f"{text}\n")
    stream.flush()


def show(page: Page) -> None:
    """Write a page: plain text, one line each, where stdout is no terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        say("\n".join(line.drawn(width) for line in page))
    else:
        say("\n".join(line.text for line in page))


@contextmanager
def follow_lines(tell: Callable[[str], object]) -> Iterator[Path]:
    """Yield a file; ``tell`` is called with each line that a process appends to it."""
    with tempfile.TemporaryDirectory(prefix="reloadpg-lines-") as directory:
        path = Path(directory, "lines")
        path.touch()
        over = threading.Event()

        def watch() -> None:
            # If stdout was closed, the command's next line raises the error.
            with path.open() as file, suppress(BrokenPipeError):
                ending = False
                while not ending:
                    ending = over.wait(0.1)
                    for line in file:
                        tell(line.rstrip("\n"))

        watcher = threading.Thread(target=watch, name="lines", daemon=True)
        watcher.start()
        try:
            yield path
        finally:
            over.set()
            watcher.join()
