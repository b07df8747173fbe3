"""Installation without code: ``RELOADPG_AUTOINSTALL=1`` in the environment.

At the end of ``import torch``, torch calls ``_reloadpg_activation``, which calls :func:`activate`,
through an entry point in the group ``torch.backends``. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables
all entry points of this group. Do not assume that reloadpg is installed because the variable is
set: an error here is one line on stderr and never an exception, so that ``import torch`` cannot
fail. Call ``reloadpg.is_installed()``.

The options come from the variables that :func:`reloadpg.install` reads; a call of it without
options is the same installation. Child processes inherit the variables: a spawned process installs
for itself, and a forked one has the parent's patches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from ..errors import refuse_unknown_variables
from .variables import NAMES

SWITCH = "RELOADPG_AUTOINSTALL"
_YES = frozenset({"1", "true", "yes", "on"})
NO = frozenset({"", "0", "false", "no", "off"})


def activate() -> None:
    """Install reloadpg if the environment requests it; called by torch at the end of its import.

    Local; idempotent; raises only ``KeyboardInterrupt``.
    """
    _guarded(_activate)


def _activate() -> None:
    refuse_unknown_variables(os.environ, "autoinstall")
    value = os.environ.get(SWITCH, "").strip()
    if value.lower() in NO:
        return
    if value.lower() not in _YES:
        raise ValueError(f"{SWITCH}={value!r} is neither 1, true, yes, on nor 0, false, no, off.")
    _install()


def _guarded(step: Callable[[], None]) -> None:
    """Run a step of ``import torch`` and report an exception as one line on stderr."""
    try:
        step()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some libraries end the process when they are imported
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = " ".join(f"{kind}{error}".split())
        names = (SWITCH, *NAMES)
        given = " ".join(f"{name}={os.environ[name]!r}" for name in names if name in os.environ)
        with suppress(Exception):  # stderr may be closed
            sys.stderr.write(
                f"reloadpg: not installed ({given}): {text} Torch is not affected. Correct the "
                f"cause and start again, or unset {SWITCH}.\n"
            )


def _install() -> None:
    import reloadpg

    reloadpg.install  # noqa: B018 - prepares what starts with installations
    from .install import install_by_environment

    install_by_environment()
