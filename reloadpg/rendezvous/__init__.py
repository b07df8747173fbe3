"""Agreement of a job's ranks through the rendezvous store: bounded barriers and their outcomes.

Nothing here uses a collective of a process group: the groups may be gone.

=================  ===============================================================================
``round``          one operation as a sequence of barriers; start here
``barrier``        one barrier, as the store sees it: arrival, outcome, failure handling
``outcome``        how a barrier ended, and the error that each rank raises for it
``plan``           what a rank is about to do, as a value that ranks compare
``predecessor``    whether this process takes the place of one that has ended
``store_client``   store clients of this library's own, with bounds
``worker_thread``  blocking calls in threads that can be abandoned, and the bound of a wait
=================  ===============================================================================
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
