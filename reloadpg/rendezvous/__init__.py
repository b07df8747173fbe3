"""Agreement of a job's ranks through the rendezvous store: bounded barriers and their outcomes.

Nothing here uses a collective of a process group: the groups may be gone.
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
