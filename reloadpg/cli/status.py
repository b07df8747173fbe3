"""``reloadpg status``: how the ranks of a running job stand, seen from outside."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from .console import Page, follow, say, show, terminal_size
from .job import JobView
from .options import positive, seconds
from .records import STATUS_DIR, Reading, read_directory, read_endpoints

__all__ = ["add"]


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "status",
        help="how the ranks of a running job stand",
        description=(
            "Show how each rank of a running job stands, and what does not fit together. The job "
            f"runs with {STATUS_DIR} set to a directory that this command can read, or serves "
            "torch's debug server on each rank. Exit code 1 if no rank could be read."
        ),
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the job's status directory (default: ${STATUS_DIR})",
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="ask a rank's debug server instead; once a rank",
    )
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="between two looks (default: 1)"
    )
    parser.add_argument(
        "--frames", type=positive, metavar="N", help="with --watch: end after N looks"
    )
    parser.add_argument(
        "--json", action="store_true", help="all that is known, as JSON; one line a look"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = options.directory or Path(os.environ.get(STATUS_DIR, ""))
    read: Callable[[], Reading]
    if options.endpoint:
        read = partial(read_endpoints, options.endpoint)
    elif options.directory is None and not os.environ.get(STATUS_DIR):
        say(
            f"reloadpg status: no job to look at. Name its status directory, set {STATUS_DIR} to "
            "it, or name the debug server of each rank with --endpoint HOST:PORT.",
            sys.stderr,
        )
        return 2
    else:
        read = partial(read_directory, directory)
    looks = _looks(read, options.interval, options.frames if options.watch else 1)
    last: list[JobView] = []
    try:
        if options.json:
            for view in looks:
                last[:] = [view]
                say(json.dumps(view.to_dict()))
        elif options.watch:
            follow(_pages(looks, last))
        else:
            last[:] = [next(looks)]
            show(last[0].page())
    except KeyboardInterrupt:
        say(stream=sys.stderr)  # the usual way to end a watch: no error
    return 0 if last and last[0].ranks else 1


def _looks(read: Callable[[], Reading], interval_s: float, frames: int | None) -> Iterator[JobView]:
    """One view after the other, at a steady pace."""
    due = time.monotonic()
    reading = Reading("")
    for number in count(1):
        reading = read().after(reading)
        yield JobView(reading)
        if number == frames:
            return
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _pages(looks: Iterator[JobView], last: list[JobView]) -> Iterator[Page]:
    for view in looks:
        last[:] = [view]
        yield view.page(*(terminal_size() or (None, None)))
