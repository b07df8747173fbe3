"""Interrupts of this rank's main thread in the library, after a number of lines or of calls."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


def interrupt_at(line: int, code: Collection[CodeType]) -> list[int]:
    """Raise a KeyboardInterrupt at a line of these functions, counted from their first call.

    Returns the number of lines that are left; not positive once it was raised. The caller ends it
    with ``sys.settrace(None)``.
    """
    left = [line]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in code:
            return None
        if event in ("line", "return"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    return left


@contextmanager
def interrupted_at_call(number: int) -> Iterator[None]:
    """Raise a KeyboardInterrupt at a call of a function of the library in this block."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if frame.f_globals.get("__name__", "").startswith("reloadpg."):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def raised_at_call(number: int, error: BaseException, after: CodeType) -> Iterator[list[int]]:
    """Raise an error at a call of a function of the library, counted from the call of ``after``.

    As a signal handler raises it. Only in this thread. The list has the number of calls that were
    left; it is not positive once the error was raised.
    """
    left = [number]
    begun = False

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal begun
        if begun and frame.f_globals.get("__name__", "").startswith("reloadpg."):
            left[0] -= 1
            if left[0] == 0:
                raise error
        begun = begun or frame.f_code is after

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(None)
