"""Reloadable groups: their creation, their objects, and the patches that put them in place."""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
