"""Tracebacks for users: with their own frames, and library frames folded."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from ..texts import counted

_PACKAGE = Path(__file__).parents[1]
_RUNNER = tuple(f'  File "{_PACKAGE}/testing/{name}.py"' for name in ("_rank", "plugin"))
"""The frames that call a rank's function, in a stack of faulthandler. All below them are frames of
the runner, too."""
_STDLIB = Path(sysconfig.get_path("stdlib"))


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


def without_runner(lines: Iterable[str]) -> list[str]:
    """Remove the runner's frames from stacks that faulthandler wrote.

    They are the outermost ones, at the end. What is removed would otherwise take the place of the
    innermost ones, where the user's code crashed.
    """
    kept, is_runner = [], False
    for line in lines:
        is_runner = line.startswith("  File ") and (is_runner or line.startswith(_RUNNER))
        if not is_runner and not line.startswith("Extension modules: "):
            kept.append(line)
    return kept


class _Frames(list[traceback.FrameSummary]):
    """The frames of one traceback, as ``TracebackException`` formats them."""

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        folds = groupby(self, lambda frame: frame is not self[-1] and bool(_library(frame)))
        for is_library, several in folds:
            frames = list(several)
            if is_library and len(frames) > 1:
                packages = ", ".join(dict.fromkeys(map(_library, frames)))
                lines.append(f"  ... {counted(len(frames), 'frame')} of {packages}\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format()
        return lines


def _library(frame: traceback.FrameSummary) -> str:
    """The package of a frame; empty for the user's code."""
    path = Path(frame.filename)
    if _PACKAGE in path.parents:
        return "reloadpg"
    for root in ("site-packages", "dist-packages"):
        if root in path.parts:
            return path.parts[path.parts.index(root) + 1].removesuffix(".py")
    return "Python" if frame.filename.startswith("<frozen") or _STDLIB in path.parents else ""
