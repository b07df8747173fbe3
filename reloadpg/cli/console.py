"""Input and output that the commands share: types of options, pages of text, progress.

A command describes its output once, as lines, tables and findings. It is written as plain text, or
on a terminal with ``rich`` in colours and in place. Results go to stdout; progress and errors go to
stderr.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..errors import columns, table

__all__ = [
    "CommandError",
    "Finding",
    "Line",
    "Page",
    "Table",
    "existing_file",
    "follow",
    "follow_lines",
    "natural",
    "new_file",
    "positive",
    "progress",
    "say",
    "seconds",
    "show",
    "terminal_size",
]

STYLES = {
    "good": "green",
    "note": "dim",
    "warning": "yellow",
    "bad": "bold red",
    "head": "bold",
}
"""Terminal style by tone."""

LEVELS = {"": "", "ok": "good", "note": "note", "warning": "warning", "problem": "bad"}
"""Tone of a finding by its level."""

PLAIN_REPORTS_S = 10.0
"""Seconds between two lines of plain progress."""


# -- types of options; what they raise becomes argparse's error -----------------------------------


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of 0 or more."""
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


def new_file(text: str) -> Path:
    """A file name in a directory that exists."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name in an existing directory")
    return path


def existing_file(text: str) -> Path:
    """A file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


# -- output ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of text.

    Attributes:
        text: the text.
        tone: a key of :data:`STYLES`, or empty.
        indent: indentation of continuation lines.
    """

    text: str
    tone: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Table:
    """Columns of values, numbers right-aligned; ``tones`` has one tone per row, or is empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    tones: Sequence[str] = ()


Page = Sequence[Line | Table]
"""Lines and tables, from top to bottom."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        level: ``ok``, ``note``, ``warning`` or ``problem``; empty for a plain statement.
        message: the result.
        remedy: the action to take; empty if none is needed.
    """

    check: str
    level: str
    message: str
    remedy: str = ""

    def lines(self, head: str, *, remedies: bool = True) -> Iterator[Line]:
        """Yield the message after a head, and the remedy below it."""
        yield Line(f"{head}{self.message}", LEVELS[self.level], len(head))
        if self.remedy and remedies:
            yield Line(f"{' ' * len(head)}-> {self.remedy}", "", len(head) + 3)


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
    """Write a page to stdout. Local."""
    console = _terminal(sys.stdout)
    if console is None:
        say(_plain(page))
    else:
        console.print(_drawn(page, console.size.width))


def follow(pages: Iterator[Page]) -> None:
    """Show pages one after the other: in place on a terminal, otherwise from top to bottom.

    A terminal is redrawn only if the page, or its size, has changed. Blocks until the iterator
    ends, which also controls the speed.
    """
    console = _terminal(sys.stdout)
    if console is None:
        for number, page in enumerate(pages):
            say(f"{'' if number == 0 else chr(10)}{_plain(page)}")
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        drawn: object = None
        for page in pages:
            if drawn != (page, console.size):
                drawn = (page, console.size)
                live.update(_drawn(page), refresh=True)


def terminal_size() -> tuple[int, int] | None:
    """Columns and lines of stdout's terminal; None if pages are not drawn in place."""
    console = _terminal(sys.stdout)
    return None if console is None else (int(console.size.width), int(console.size.height))


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show the progress of a long task; yields a function that takes the amount done.

    A bar on a terminal (or a spinner if the total is unknown); otherwise a line at the start, and
    one each ten seconds. Written to stderr. Call the function from one thread only.
    """
    console = _terminal(sys.stderr)
    if console is None:
        yield _plain_progress(what, total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    bars = [BarColumn(), MofNCompleteColumn()] if total is not None else []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *bars, Elapsed())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


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


def _plain_progress(what: str, total: int | None) -> Callable[[int], None]:
    say(f"{what} ...", sys.stderr)
    said = time.monotonic()

    def update(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= PLAIN_REPORTS_S:
            said = time.monotonic()
            say(f"{what}: {done}{'' if total is None else f' of {total}'}", sys.stderr)

    return update


# -- on a terminal, or plain ------------------------------------------------------------------


def _terminal(stream: TextIO) -> Any:
    """A rich console on the stream, if it is a terminal and rich is installed; otherwise None."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    return None if console.is_dumb_terminal else console


def _plain(page: Page) -> str:
    return "\n".join(
        table(part.header, part.rows) if isinstance(part, Table) else part.text for part in page
    )


def _drawn(page: Page, wrap_at: int | None = None) -> Any:
    """The page for rich; without ``wrap_at``, lines and rows are truncated at the edge."""
    from rich.console import Group
    from rich.text import Text

    drawn: list[Any] = []
    for part in page:
        if isinstance(part, Table):
            drawn.append(_drawn_table(part, wrap=wrap_at is not None))
            continue
        style = STYLES.get(part.tone, "")
        if wrap_at is None:
            drawn.append(Text(part.text, style=style, no_wrap=True, overflow="ellipsis"))
        else:
            drawn.append(Text(_wrapped(part, wrap_at), style=style))
    return Group(*drawn)


def _wrapped(line: Line, width: int) -> str:
    room = max(width, line.indent + 20)
    return textwrap.fill(line.text, room, subsequent_indent=" " * line.indent)


def _drawn_table(part: Table, *, wrap: bool) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style=STYLES["head"])
    found = columns(part.header, part.rows)
    for index, (texts, numeric) in enumerate(found):
        last = index == len(found) - 1
        drawn.add_column(
            texts[0],
            justify="right" if numeric else "left",
            # A narrow terminal truncates the last column, never a number.
            min_width=None if last else max(map(len, texts)),
            no_wrap=not (last and wrap),
            overflow="fold" if last and wrap else "ellipsis",
        )
    tones = part.tones or [""] * len(part.rows)
    for row, tone in enumerate(tones, start=1):
        drawn.add_row(*(Text(texts[row]) for texts, _ in found), style=STYLES.get(tone, ""))
    return drawn
