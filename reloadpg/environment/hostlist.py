"""SLURM's compressed lists, read in Python so that ``scontrol`` is not needed on compute nodes.

Two forms: host lists (``rack[1-2]node[08-11,20]-ib,login``) and counts (``4(x2),3``).
Checked against ``scontrol show hostnames`` of SLURM 22.05, which refuses suffixes (``n[1-2]-ib``),
and orders three or more brackets otherwise; the first host, where ranks meet, is always the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

__all__ = ["count_hosts", "expand_counts", "expand_hostlist", "first_host"]

MAX_HOSTS = 1 << 20
"""Longer expansions are refused: a list such as ``n[0-999999999]`` is a mistake, not a cluster."""

_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]*", re.ASCII)


def expand_hostlist(text: str) -> list[str]:
    """Host names of a SLURM host list; the last bracket counts fastest.

    Local, pure.

    Raises:
        ValueError: the list is empty, malformed, or longer than :data:`MAX_HOSTS`.
    """
    total = count_hosts(text)
    if total > MAX_HOSTS:
        raise ValueError(f"host list {text!r} has {total} hosts; at most {MAX_HOSTS} are read")
    return list(_hosts(text))


def first_host(text: str) -> str:
    """The first host of a SLURM host list, without expanding the rest. Local, pure."""
    return next(_hosts(text))


def count_hosts(text: str) -> int:
    """Number of hosts in a SLURM host list, without expanding it. Local, pure."""
    total = 0
    for entry in _entries(text):
        size = 1
        for part in _parts(entry, text):
            if isinstance(part, list):
                size *= sum(high - low + 1 for low, high, _ in part)
        total += size
    return total


def expand_counts(text: str) -> list[int]:
    """Task counts per node: ``"4(x2),3"`` gives ``[4, 4, 3]``. Local, pure.

    Raises:
        ValueError: malformed, or more than :data:`MAX_HOSTS` nodes.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in {text!r} is not a task count such as 4 or 4(x2)")
        repeat = int(match[2] or 1)
        if repeat < 1 or len(counts) + repeat > MAX_HOSTS:
            raise ValueError(f"{item!r} in {text!r} repeats {repeat} times")
        counts.extend([int(match[1])] * repeat)
    return counts


def _hosts(text: str) -> Iterator[str]:
    for entry in _entries(text):
        choices = [
            [part] if isinstance(part, str) else _Numbers(part) for part in _parts(entry, text)
        ]
        if len(choices) == 1:
            yield from choices[0]
        else:
            yield from _product(choices)


def _product(choices: list[list[str] | _Numbers]) -> Iterator[str]:
    # Not itertools.product: it expands every operand before it yields the first host.
    for head in choices[0]:
        if len(choices) == 1:
            yield head
        else:
            for tail in _product(choices[1:]):
                yield head + tail


class _Numbers:
    """The numbers of one bracket as zero-padded text, made one at a time."""

    def __init__(self, ranges: list[tuple[int, int, int]]) -> None:
        self._ranges = ranges

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(
            (f"{number:0{width}d}" for number in range(low, high + 1))
            for low, high, width in self._ranges
        )


def _entries(text: str) -> Iterator[str]:
    """Split at the commas that are outside brackets."""
    depth = 0
    start = 0
    for position, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"host list {text!r} has unbalanced or nested brackets")
        if char == "," and depth == 0:
            yield _entry(text[start:position], text)
            start = position + 1
    if depth:
        raise ValueError(f"host list {text!r} has unbalanced or nested brackets")
    yield _entry(text[start:], text)


def _entry(entry: str, text: str) -> str:
    if not entry:
        raise ValueError(f"host list {text!r} has an empty entry")
    return entry


def _parts(entry: str, text: str) -> Iterator[str | list[tuple[int, int, int]]]:
    """Literal pieces and brackets of one entry, in order."""
    for index, piece in enumerate(re.split(r"\[([^\]]*)\]", entry)):
        if index % 2:
            yield [_range(item, text) for item in piece.split(",")]
        elif not _NAME.fullmatch(piece):
            raise ValueError(f"host list {text!r}: {piece!r} is not part of a host name")
        elif piece:
            yield piece


def _range(item: str, text: str) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"host list {text!r}: {item!r} is not a number or a range")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ValueError(f"host list {text!r}: the range {item!r} descends")
    return low, high, len(match[1])
