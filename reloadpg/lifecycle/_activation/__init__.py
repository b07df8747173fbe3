"""Entry point that ``import torch`` calls; harmless if reloadpg cannot be imported.

It is in the group ``torch.backends``, of which ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables all
entry points. Child processes inherit the variables: a spawned process installs for itself, and a
forked one has the parent's patches.

Installed as the top-level package ``_reloadpg_activation``, so that importing it imports nothing
of reloadpg. Otherwise a partly installed package, or another ``reloadpg.py`` that comes first on
the path, would make ``import torch`` fail.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_SWITCH = "RELOADPG_AUTOINSTALL"


def activate() -> None:
    """Install reloadpg if ``RELOADPG_AUTOINSTALL`` requests it, as a call without options does.

    Do not assume that reloadpg is installed because the variable is set: an error is one line on
    stderr, since ``import torch`` must not fail. Call ``reloadpg.is_installed()``. A misspelt name
    of the variable is an error, too. Local; idempotent; raises only ``KeyboardInterrupt``.
    """
    value = os.environ.get(_SWITCH, "")
    nearly = any(n.startswith("RELOADPG_") and "INSTAL" in n for n in os.environ if n != _SWITCH)
    if not value.strip() and not nearly:
        return
    try:
        from reloadpg.settings import autoinstall_requested, refuse_unknown_variables

        refuse_unknown_variables(os.environ, "autoinstall")
        if autoinstall_requested(os.environ):
            from reloadpg import install

            install()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some libraries end the process when they are imported
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        text = " ".join(f"{kind}{error}".split())
        with suppress(Exception):  # stderr may be closed
            sys.stderr.write(
                f"reloadpg: not installed ({_SWITCH}={value!r}): {text} Torch is not affected. "
                f"Correct the cause and start again, or unset {_SWITCH}.\n"
            )
