"""Options from the environment. Arguments of ``install`` take precedence.

==========================  ======================================================================
``RELOADPG_BACKENDS``       ``backends``: names separated by commas. They may be registered with
                            torch later, before the default group is created
``RELOADPG_EXCLUDE``        ``exclude``: patterns separated by commas
``RELOADPG_STRATEGY``       ``strategy``
``RELOADPG_TIMEOUT_S``      ``timeout``, in seconds
``RELOADPG_GRACE_S``        seconds within which ranks must respond after a failure; a rank that
                            responds later is named as missing. Default: 1.5
``RELOADPG_LOG_WAIT_S``     seconds after which a wait for other ranks is logged. Default: 10
==========================  ======================================================================

An empty variable counts as unset.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import InvalidOptionError
from ..settings import GRACE, LOG_WAIT, as_timedelta

BACKENDS = "RELOADPG_BACKENDS"
EXCLUDE = "RELOADPG_EXCLUDE"
STRATEGY = "RELOADPG_STRATEGY"
TIMEOUT = "RELOADPG_TIMEOUT_S"

STRATEGIES = ("recreate", "suspend")
"""Values of ``install(strategy=...)``."""


def _read(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


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
            value: Any = text
            with suppress(ValueError):
                value = float(text)
            seconds = as_timedelta(value, name, "nothing was installed")
            if name == TIMEOUT:  # the others are read when they are needed
                options["timeout"] = seconds
    return options


def _invalid(variable: str, text: str, wrong: str, use: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"{variable}={text!r} {wrong}; nothing was installed. Use {use}, or unset it."
    )
