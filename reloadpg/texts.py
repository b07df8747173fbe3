"""Formats values for messages: ranks, counts, bytes, tables; warns. Imports no other module."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence

_INSIDE = frozenset({"reloadpg", "torch", "wrapt", "contextlib"})
"""Packages whose functions are called by a program, not written in it."""

_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)


def warn(text: str, category: type[Warning] = UserWarning, *, of_host: bool = False) -> None:
    """Warn at the line of the program that called into the library. Local.

    Args:
        of_host: it holds for all ranks of a host alike, so only the first of them warns.
    """
    if of_host and not is_first_of_host():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        frame = frame.f_back
    known = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or "<unknown>"
    file = frame.f_code.co_filename
    warnings.warn_explicit(text, category, file, frame.f_lineno, module, known)


def _package(variables: dict[str, object]) -> str:
    return str(variables.get("__name__") or "").partition(".")[0]


def is_first_of_host() -> bool:
    """Whether no launcher says that another rank of this host comes before this one. Local."""
    return next((os.environ[n] for n in _LOCAL_RANK if os.environ.get(n)), "0") == "0"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, with runs as ranges: ``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def named_ranks(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2-3``."""
    shown = format_ranks(ranks)
    return f"rank {shown}" if shown.isdecimal() else f"ranks {shown}"


def described(desc: str, ranks: Iterable[int]) -> str:
    """The description of a group; its ranks, where torch gave it none."""
    if desc not in ("", "undefined"):
        return desc
    shown = named_ranks(ranks)
    return shown if len(shown) <= 30 else f"{shown[:27]}..."


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mebibytes(size: float) -> str:
    """``1.5 MiB``; never ``-0.0``."""
    return f"{round(size / (1 << 20), 1) + 0.0:.1f} MiB"


def table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Lay out columns of text, numbers to the right, as wide as they need."""
    texts = [[_cell(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [
        all(isinstance(row[index], (int, float, type(None))) for row in rows)
        for index in range(len(header))
    ]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in texts
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean NAME?)`` for the known name that is nearest; empty if none is."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""
