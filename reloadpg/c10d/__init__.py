"""Every use of torch's private names, and every branch on torch's version.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. The other packages use no name of torch with a leading
underscore, except the stand-in for CUDA, which uses the dispatcher; a class of theirs that is a
process group or a backend defines methods of such names.
:mod:`.needs` lists all names, and a torch without one of them is refused here. :mod:`.devices` and
:mod:`.memory` know this rank's device, and nothing of groups that are offloaded.
"""

from __future__ import annotations

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

from .needs import refuse_missing

refuse_missing()
