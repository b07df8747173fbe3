"""Environment variables that this library reads, and the checks of arguments. Imports no torch."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from .errors import InvalidOptionError
from .texts import did_you_mean

_SHORTEST, _LONGEST = timedelta(milliseconds=1), timedelta(days=365)
"""Torch counts in whole milliseconds; longer ones overflow between Python, C++ and the store."""

STATUS_DIR = "RELOADPG_STATUS_DIR"
"""Environment variable: where the ranks of a job keep their status files."""

GRACE = "RELOADPG_GRACE_S"
"""Environment variable: seconds after a failure within which the other ranks must respond."""

LOG_WAIT = "RELOADPG_LOG_WAIT_S"
"""Environment variable: seconds of a wait before the first message. Later messages come after 2, 4,
8 times as long."""

NCCL = "RELOADPG_NCCL"
"""Environment variable: NVIDIA's host code of NCCL, which :mod:`reloadpg.testing.standins` runs."""

OFF = "RELOADPG"
"""Environment variable: ``off`` makes ``install`` and all operations do nothing in this process."""

IS_OFF = "RELOADPG=off: reloadpg does nothing in this process"

_OFF_VALUES, _ON_VALUES = frozenset({"off", "0"}), frozenset({"", "on", "1"})

VARIABLES = frozenset(
    {
        "RELOADPG_AUTOINSTALL",
        "RELOADPG_BACKENDS",
        "RELOADPG_EXCLUDE",
        GRACE,
        LOG_WAIT,
        NCCL,
        "RELOADPG_RANK_LOADING",
        STATUS_DIR,
        "RELOADPG_STRATEGY",
        "RELOADPG_TIMEOUT_S",
    }
)
"""The environment variables that this library reads."""


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether ``RELOADPG=off`` is set."""
    return environ.get(OFF, "").strip().lower() in _OFF_VALUES


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """List the variables that are set, begin with ``RELOADPG_``, and mean nothing."""
    return sorted(
        f"{name}{did_you_mean(name, VARIABLES)}"
        for name, value in environ.items()
        if name.startswith("RELOADPG_")
        and name not in VARIABLES
        and value.strip()
        and not name.startswith("RELOADPG_STANDIN_")  # read by reloadpg.testing.standins
    )


def refuse_unknown_variables(environ: Mapping[str, str], what: str) -> None:
    """Refuse an environment with unknown variables of this library. Local.

    Args:
        environ: the variables.
        what: what is refused, for the message.

    Raises:
        InvalidOptionError: a variable begins with ``RELOADPG_`` and is unknown, or ``RELOADPG`` is
            neither on nor off.
    """
    if environ.get(OFF, "").strip().lower() not in _OFF_VALUES | _ON_VALUES:
        raise InvalidOptionError(
            f"{what}: RELOADPG={environ[OFF]!r} is neither on nor off; nothing was changed. "
            "Set it to off, or unset it."
        )
    unknown = unknown_variables(environ)
    if unknown:
        raise InvalidOptionError(
            f"{what}: the environment has {', '.join(unknown)}, which reloadpg does not know; "
            "nothing was changed. Correct the name or unset it."
        )


def as_timedelta(
    value: timedelta | float, name: str, nothing: str = "nothing was started"
) -> timedelta:
    """Convert a caller's timeout.

    Args:
        value: a timedelta, or seconds as a number of Python or NumPy.
        name: the name of the argument.
        nothing: the consequence, for the message: "nothing was installed".

    Raises:
        InvalidOptionError: not a time, or one that torch does not take.
    """
    with suppress(TypeError, ValueError, OverflowError):
        bound = value
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            bound = timedelta(seconds=float(value))  # timedelta does not take NumPy's integers
        if isinstance(bound, timedelta) and _SHORTEST <= bound <= _LONGEST:
            return bound
    raise InvalidOptionError(
        f"{name}={value!r} is not a time between one millisecond and {_LONGEST.days} days; "
        f"{nothing}. Give a timedelta, or seconds."
    )


def as_integer(value: object) -> int | None:
    """Convert an integer of Python or NumPy, or an integer tensor of one element.

    None if it is another value, or a bool. Strings of digits are not converted.
    """
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    return None


def as_flag(value: object, name: str, nothing: str = "nothing was started") -> bool:
    """Check a bool.

    Raises:
        InvalidOptionError: another value; a string such as "False" would count as true.
    """
    if isinstance(value, bool):
        return value
    raise InvalidOptionError(f"{name}={value!r} is not True or False; {nothing}. Pass a bool.")


def as_names(value: object) -> tuple[str, ...] | None:
    """Convert a string, or an iterable of strings. None if it is another value."""
    if isinstance(value, str):
        return (str(value),)
    found: tuple[object, ...] = (None,)
    with suppress(TypeError):
        found = tuple(value)  # type: ignore[arg-type]
    if not all(isinstance(name, str) and name for name in found):
        return None
    return tuple([str(name) for name in found])  # NumPy's strings have another repr
