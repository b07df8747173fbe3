"""Installation without code: ``RELOADPG_AUTOINSTALL=1`` in the environment.

At the end of ``import torch``, torch calls ``_reloadpg_activation``, which calls :func:`activate`,
through an entry point in the group ``torch.backends``. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables
all entry points of this group. Do not assume that reloadpg is installed because the variable is
set: an error is then one line on stderr and not an exception, so that ``import torch`` cannot fail.
Call ``reloadpg.is_installed()``.

The options come from the variables that :func:`reloadpg.install` reads; a call of it without
options is the same installation. Child processes inherit the variables: a spawned process installs
for itself, and a forked one has the parent's patches.
"""

from __future__ import annotations

import os

from ..settings import autoinstall_requested, refuse_unknown_variables


def activate() -> None:
    """Install reloadpg if the environment requests it. Local; idempotent.

    Raises:
        InvalidOptionError: the variable, or an option, is invalid; nothing was installed.
    """
    refuse_unknown_variables(os.environ, "autoinstall")
    if autoinstall_requested(os.environ):
        from .install import install

        install()
