"""Entry point that ``import torch`` calls; harmless where reloadpg itself cannot be imported.

Installed as the top-level package ``_reloadpg_activation``, so that importing it imports nothing
of reloadpg: a half-installed package, or some other ``reloadpg.py`` that comes first on the path,
would otherwise make ``import torch`` fail.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_SWITCH = "RELOADPG_AUTOINSTALL"


def activate() -> None:
    """Install reloadpg if ``RELOADPG_AUTOINSTALL`` asks for it; see ``lifecycle.autoinstall``.

    A name that is nearly that one is looked at there, too. Local; idempotent; raises nothing but
    ``KeyboardInterrupt``.
    """
    value = os.environ.get(_SWITCH, "")
    nearly = any(n.startswith("RELOADPG_") and "INSTAL" in n for n in os.environ if n != _SWITCH)
    if not value.strip() and not nearly:
        return
    try:
        from reloadpg.lifecycle.autoinstall import activate as activate_reloadpg
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some libraries end the process when they are imported
        text = " ".join(f"{type(error).__name__}: {error}".split())
        with suppress(Exception):  # there may be no stderr
            sys.stderr.write(
                f"reloadpg: not installed (RELOADPG_AUTOINSTALL={value!r}): {text} Torch is not "
                "affected. Correct the cause and start again, or unset RELOADPG_AUTOINSTALL.\n"
            )
    else:
        activate_reloadpg()
