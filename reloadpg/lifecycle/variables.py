"""Options of ``install`` from the environment; arguments take precedence.

==========================  ======================================================================
``RELOADPG_BACKENDS``       ``backends``: names separated by commas. They may be registered with
                            torch later, before the default group is created
``RELOADPG_EXCLUDE``        ``exclude``: patterns separated by commas
``RELOADPG_STRATEGY``       ``strategy``
``RELOADPG_TIMEOUT_S``      ``timeout``, in seconds
``RELOADPG_LOG_LEVEL``      level of the logger ``reloadpg``: a name or a number
==========================  ======================================================================

An empty variable counts as unset.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ..errors import InvalidOptionError

__all__ = ["NAMES", "options_of", "set_log_level"]

BACKENDS = "RELOADPG_BACKENDS"
EXCLUDE = "RELOADPG_EXCLUDE"
STRATEGY = "RELOADPG_STRATEGY"
TIMEOUT = "RELOADPG_TIMEOUT_S"
LOG_LEVEL = "RELOADPG_LOG_LEVEL"
NAMES = (BACKENDS, EXCLUDE, STRATEGY, TIMEOUT, LOG_LEVEL)

_STRATEGIES = ("recreate", "suspend")


def _read(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def options_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the variables into arguments of ``install``. Local, pure.

    Raises:
        InvalidOptionError: a variable is invalid; the message names it.
    """
    options: dict[str, Any] = {}
    for argument, variable in (("backends", BACKENDS), ("exclude", EXCLUDE)):
        if text := _read(environ, variable):
            options[argument] = tuple(name.strip() for name in text.split(","))
            if "" in options[argument]:
                raise InvalidOptionError(f"{variable}={text!r} has an empty name.")
    if text := _read(environ, STRATEGY):
        if text not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise InvalidOptionError(f"{STRATEGY}={text!r} is unknown. Use one of: {known}.")
        options["strategy"] = text
    if text := _read(environ, TIMEOUT):
        try:
            timeout = timedelta(seconds=float(text))
        except (ValueError, OverflowError):  # not a number, infinite, or too large for timedelta
            timeout = timedelta(0)
        if not timedelta(0) < timeout <= timedelta(days=365):
            raise InvalidOptionError(
                f"{TIMEOUT}={text!r} is not a positive number of seconds, at most a year."
            )
        options["timeout"] = timeout
    return options


def set_log_level(environ: Mapping[str, str]) -> None:
    """Set the level of the logger ``reloadpg`` from the environment, if set. Local, idempotent.

    Raises:
        InvalidOptionError: the level is unknown to logging; the message names the variable.
    """
    level = _read(environ, LOG_LEVEL)
    try:
        if level:
            number = int(level) if level.isdecimal() else level.upper()
            logging.getLogger("reloadpg").setLevel(number)
    except ValueError:
        raise InvalidOptionError(f"{LOG_LEVEL}={level!r} is not a level of logging.") from None
