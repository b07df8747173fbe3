"""Tracebacks for users: with their own frames, and library frames folded."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import counted

__all__ = ["folded_traceback"]

_PACKAGE = Path(__file__).parents[1]
_STDLIB = Path(sysconfig.get_path("stdlib"))
_SHOWN = 1
"""Maximum number of consecutive library frames that are not folded."""


def folded_traceback(error: BaseException) -> str:
    """Format an exception with its causes; several library frames in a row become one line.

    Local. The last frame of each traceback stays: it is where the error was raised.
    """
    found = traceback.TracebackException.from_exception(error)
    pending = [found]
    while pending:
        one = pending.pop()
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        frames: Any = _Frames(one.stack)
        one.stack = frames
    return "".join(found.format())


class _Frames(list[traceback.FrameSummary]):
    """The frames of one traceback, as ``TracebackException`` formats them."""

    def format(self, **options: Any) -> list[str]:
        return [line for line in self._lines() if line]

    def _lines(self) -> Iterator[str]:
        *above, last = self or [None]
        known = [(frame, _library(frame)) for frame in above if frame is not None]
        for is_library, several in groupby(known, key=lambda one: bool(one[1])):
            frames, packages = zip(*several, strict=True)
            if is_library and len(frames) > _SHOWN:
                of = ", ".join(dict.fromkeys(packages))
                yield f"  ... {counted(len(frames), 'frame')} of {of}\n"
            else:
                yield from traceback.StackSummary.from_list(list(frames)).format()
        if last is not None:
            yield from traceback.StackSummary.from_list([last]).format()


def _library(frame: traceback.FrameSummary) -> str:
    """The package of a frame; empty for the user's code."""
    path = Path(frame.filename)
    if _PACKAGE in path.parents:
        return "reloadpg"
    for root in ("site-packages", "dist-packages"):
        if root in path.parts:
            return path.parts[path.parts.index(root) + 1].removesuffix(".py")
    return "Python" if frame.filename.startswith("<frozen") or _STDLIB in path.parents else ""
