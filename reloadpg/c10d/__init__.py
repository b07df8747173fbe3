"""Every use of torch's private names, and every branch on torch's version.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. The other packages never import a name with a leading
underscore from torch. Each function states what it relies on.
"""

from __future__ import annotations

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end

from .backends import *
from .creation import *
from .inspection import *
from .locks import *
from .saves import *
from .stores import *
from .tables import *
from .training import *
