"""Time bounds as callers give them: a timedelta, or seconds."""

from __future__ import annotations

import math
from datetime import timedelta

from reloadpg.errors import InvalidOptionError

__all__ = ["as_timedelta"]


def as_timedelta(value: timedelta | float, name: str) -> timedelta:
    """``value`` as a timedelta. Local, pure.

    Raises:
        InvalidOptionError: not a number of seconds above 0, or too long for a timedelta.
    """
    if isinstance(value, timedelta):
        bound = value
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _error(name, value)
    else:
        try:
            bound = timedelta(seconds=value)
        except OverflowError as error:
            raise _error(name, value) from error
    # torch counts in milliseconds: less than one is 0 to it, which it reads as "no time at all".
    if bound < timedelta(milliseconds=1):
        raise _error(name, value)
    return bound


def _error(name: str, value: object) -> InvalidOptionError:
    return InvalidOptionError(
        f"{name}={value!r} is not a time of at least one millisecond. Nothing was started. Give a "
        f"timedelta, or seconds."
    )
