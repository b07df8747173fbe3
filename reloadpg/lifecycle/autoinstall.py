"""Installation without a line of code: ``RELOADPG_AUTOINSTALL=1`` in the environment.

Torch calls ``_reloadpg_activation``, which calls :func:`activate`, at the end of ``import torch``,
through an entry point in the group ``torch.backends``; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches
all of these off. Do not assume that the installation is in place because the variable is set: what
goes wrong here is one line on stderr and never an exception, so that ``import torch`` cannot fail
by it. Ask ``reloadpg.is_installed()``.

==========================  ======================================================================
``RELOADPG_AUTOINSTALL``    ``1``, ``true``, ``yes`` or ``on``: install; unset, empty, ``0``,
                            ``false``, ``no`` or ``off``: do nothing
``RELOADPG_BACKENDS``       names with commas between; unset: every accelerator backend. They may
                            be registered with torch later, before the default group is created
``RELOADPG_EXCLUDE``        ``exclude`` of ``install``: patterns with commas between
``RELOADPG_STRATEGY``       ``strategy`` of ``install``
``RELOADPG_TIMEOUT_S``      ``timeout`` of ``install``, in seconds
``RELOADPG_LOG_LEVEL``      level of the logger ``reloadpg``: a name or a number
==========================  ======================================================================

A variable that is set and empty counts as unset; one that begins with ``RELOADPG_`` and is unknown
is refused. A bare ``reloadpg.install()`` in the program is the same installation. Children inherit
the variables, so a process that is spawned installs for itself; one that is forked has the parent's
patches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import refuse_unknown_variables

__all__ = ["NO", "SWITCH", "activate"]

SWITCH = "RELOADPG_AUTOINSTALL"
BACKENDS = "RELOADPG_BACKENDS"
EXCLUDE = "RELOADPG_EXCLUDE"
STRATEGY = "RELOADPG_STRATEGY"
TIMEOUT = "RELOADPG_TIMEOUT_S"
LOG_LEVEL = "RELOADPG_LOG_LEVEL"

_YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"", "0", "false", "no", "off"})


def activate() -> None:
    """Install reloadpg if the environment asks for it. Called by torch when it is imported.

    Local; idempotent; raises nothing but ``KeyboardInterrupt``. Where a module of reloadpg is what
    imports torch, this still works: the packages that an installation needs import torch before
    anything else.
    """
    _guarded(_activate)


def _activate() -> None:
    refuse_unknown_variables(os.environ, "autoinstall")
    value = _read(os.environ, SWITCH)
    if value.lower() in NO:
        return
    if value.lower() not in _YES:
        raise ValueError(f"{SWITCH}={value!r} is neither 1, true, yes, on nor 0, false, no, off.")
    _install()


def _guarded(step: Callable[[], None]) -> None:
    """Run a step of ``import torch``: whatever it raises becomes one line on stderr."""
    try:
        step()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some libraries end the process when they are imported
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = " ".join(f"{kind}{error}".split())
        names = (SWITCH, BACKENDS, EXCLUDE, STRATEGY, TIMEOUT, LOG_LEVEL)
        given = " ".join(f"{name}={os.environ[name]!r}" for name in names if name in os.environ)
        with suppress(Exception):  # there may be no stderr
            sys.stderr.write(
                f"reloadpg: not installed ({given}): {text} Torch is not affected. Correct the "
                f"cause and start again, or unset {SWITCH}.\n"
            )


def _install() -> None:
    options = _options(os.environ)
    _set_log_level(_read(os.environ, LOG_LEVEL))
    import reloadpg

    reloadpg.install  # noqa: B018 - prepares what starts with installations
    from .install import install_by_environment

    install_by_environment(**options)


# ---------------------------------------------------------------------------------------------
# the variables


def _read(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the variables into arguments of ``install``, which checks their values. Local, pure.

    Raises:
        ValueError: a variable cannot be read; the message names it.
    """
    from datetime import timedelta

    options: dict[str, Any] = {}
    for argument, variable in (("backends", BACKENDS), ("exclude", EXCLUDE)):
        if text := _read(environ, variable):
            options[argument] = tuple(name.strip() for name in text.split(","))
            if "" in options[argument]:
                raise ValueError(f"{variable}={text!r} has an empty name.")
    if text := _read(environ, STRATEGY):
        options["strategy"] = text
    if text := _read(environ, TIMEOUT):
        try:
            timeout = timedelta(seconds=float(text))
        except (ValueError, OverflowError):  # not a number; infinite, or above 2.7 million years
            timeout = timedelta(0)
        if timeout <= timedelta(0):
            raise ValueError(f"{TIMEOUT}={text!r} is not a positive number of seconds.")
        options["timeout"] = timeout
    return options


def _set_log_level(level: str) -> None:
    """Let the logger speak from this level on, also in a program that sets up no logging.

    Raises:
        ValueError: logging knows no such level; the message names the variable.
    """
    if not level:
        return
    import logging

    logger = logging.getLogger("reloadpg")
    try:
        logger.setLevel(int(level) if level.isdecimal() else level.upper())
    except ValueError:
        raise ValueError(f"{LOG_LEVEL}={level!r} is not a level of logging.") from None
    handler = logging.StreamHandler()
    form = "%(levelname)s %(name)s [rank %(rank)s]: %(message)s"
    handler.setFormatter(logging.Formatter(form, defaults={"rank": "-"}))
    # Where the program has handlers of its own, at the time of a record, they print it.
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    handler.set_name(LOG_LEVEL)
    if LOG_LEVEL not in [other.get_name() for other in logger.handlers]:
        logger.addHandler(handler)
