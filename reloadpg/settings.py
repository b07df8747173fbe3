"""Environment variables that this library reads, and the checks of arguments. Imports no torch.

Defaults of the options of :func:`reloadpg.install`, whose arguments take precedence:

==========================  ======================================================================
``RELOADPG_BACKENDS``       ``backends``: names separated by commas. They may be registered with
                            torch later, before the default group is created
``RELOADPG_EXCLUDE``        ``exclude``: patterns separated by commas
``RELOADPG_STRATEGY``       ``strategy``
``RELOADPG_TIMEOUT_S``      ``timeout``, in seconds
==========================  ======================================================================

Others:

==========================  ======================================================================
``RELOADPG``                ``off``: ``install`` and all operations do nothing in this process
``RELOADPG_AUTOINSTALL``    whether ``import torch`` installs, with these defaults
``RELOADPG_GRACE_S``        seconds within which ranks must respond after a failure; a rank that
                            responds later is named as missing. Default: 1.5
``RELOADPG_LOG_WAIT_S``     seconds of a wait for other ranks before the first message; later ones
                            come after 2, 4, 8 times as long. Default: 10
``RELOADPG_NCCL``           NVIDIA's host code of NCCL, which :mod:`reloadpg.testing.standins` runs
``RELOADPG_STATUS_DIR``     where the ranks of a job keep their status files
==========================  ======================================================================

An empty variable counts as unset. One that begins with ``RELOADPG_`` and is unknown is an error.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from .errors import InvalidOptionError
from .texts import did_you_mean

_SHORTEST, _LONGEST = timedelta(milliseconds=1), timedelta(days=365)
"""Torch counts in whole milliseconds; longer ones overflow between Python, C++ and the store."""

AUTOINSTALL = "RELOADPG_AUTOINSTALL"
BACKENDS = "RELOADPG_BACKENDS"
EXCLUDE = "RELOADPG_EXCLUDE"
GRACE = "RELOADPG_GRACE_S"
LOG_WAIT = "RELOADPG_LOG_WAIT_S"
NCCL = "RELOADPG_NCCL"
OFF = "RELOADPG"
STATUS_DIR = "RELOADPG_STATUS_DIR"
STRATEGY = "RELOADPG_STRATEGY"
TIMEOUT = "RELOADPG_TIMEOUT_S"

VARIABLES = frozenset(
    {
        AUTOINSTALL,
        BACKENDS,
        EXCLUDE,
        GRACE,
        LOG_WAIT,
        NCCL,
        "RELOADPG_RANK_LOADING",  # of reloadpg.testing
        STATUS_DIR,
        STRATEGY,
        TIMEOUT,
    }
)
"""The variables that begin with ``RELOADPG_``."""

IS_OFF = "RELOADPG=off: reloadpg does nothing in this process"

STRATEGIES = ("recreate", "suspend")
"""Values of ``install(strategy=...)``."""

_OFF_VALUES, _ON_VALUES = frozenset({"off", "0"}), frozenset({"", "on", "1"})

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


def _read(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether ``RELOADPG=off`` is set."""
    return _read(environ, OFF).lower() in _OFF_VALUES


def autoinstall_requested(environ: Mapping[str, str]) -> bool:
    """Whether ``RELOADPG_AUTOINSTALL`` requests an installation.

    Raises:
        InvalidOptionError: it is neither yes nor no.
    """
    value = _read(environ, AUTOINSTALL)
    if value.lower() not in _YES | _NO:
        raise InvalidOptionError(
            f"{AUTOINSTALL}={value!r} is neither 1, true, yes, on nor 0, false, no, off."
        )
    return value.lower() in _YES


def install_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the variables into arguments of ``install``.

    Raises:
        InvalidOptionError: a variable is invalid; the message names it.
    """
    options: dict[str, Any] = {}
    for argument, variable in (("backends", BACKENDS), ("exclude", EXCLUDE)):
        if text := _read(environ, variable):
            options[argument] = tuple(name.strip() for name in text.split(","))
            if "" in options[argument]:
                use = "names separated by single commas"
                raise _invalid(variable, text, "has an empty name", use)
    if text := _read(environ, STRATEGY):
        if text not in STRATEGIES:
            raise _invalid(STRATEGY, text, "is unknown", " or ".join(STRATEGIES))
        options["strategy"] = text
    for name in (TIMEOUT, GRACE, LOG_WAIT):
        if text := _read(environ, name):
            try:
                seconds = as_timedelta(float(text), name)
            except ValueError:
                wrong = f"is not a time between one millisecond and {_LONGEST.days} days"
                raise _invalid(name, text, wrong, "a number of seconds, such as 300") from None
            if name == TIMEOUT:  # the others are read when they are needed
                options["timeout"] = seconds
    return options


def _invalid(variable: str, text: str, wrong: str, use: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{variable}={text!r} {wrong}; nothing was installed. Use {use}, or unset it."
    )


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
    if _read(environ, OFF).lower() not in _OFF_VALUES | _ON_VALUES:
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


def seconds_or_none(given: timedelta | float | None, name: str) -> float | None:
    """Read a timeout of a call in seconds; None stays None. Raises InvalidOptionError."""
    if given is None:
        return None
    return as_timedelta(given, name, "nothing was changed").total_seconds()


def as_integer(value: object) -> int | None:
    """Convert an integer of Python or NumPy, or an integer tensor of one element.

    None if it is another value, or a bool. Strings of digits are not converted.
    """
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    return None


def checked_attempts(attempts: int) -> int:
    """Read the ``attempts`` of a reload. Raises InvalidOptionError."""
    number = as_integer(attempts)
    if number is None or number < 1:
        raise InvalidOptionError(
            f"attempts={attempts!r} is not a positive integer; nothing was changed. Pass the "
            "maximum number of attempts of a reload."
        )
    return number


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
