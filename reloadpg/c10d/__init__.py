"""Every use of torch's private names, and every branch on torch's version.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. The other packages use no name of torch with a leading
underscore; a class of theirs that is a process group or a backend defines methods of such names.
:mod:`.needs` lists all names, and a torch without one that the core uses is refused here.
"""

from __future__ import annotations

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

from .needs import describe_needs as describe_needs
from .needs import missing as missing
from .needs import refuse_missing as refuse_missing

refuse_missing("reloadpg")

from .backends import *
from .creation import *
from .inspection import *
from .locks import *
from .saves import *
from .solitary import *
from .stores import *
from .tables import *
from .torchcomms import *
from .training import *
