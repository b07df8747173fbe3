"""Agreement of a job's ranks through the rendezvous store: barriers and their decisions.

Nothing here uses a collective of a process group: the groups may be gone.

=================  ===============================================================================
``protocol``       the agreement as a state machine, without I/O; start here
``round``          one rank: it performs the commands of the protocol on the store
``decision``       how a barrier ended, and the error that each rank raises for it
``plan``           what a rank is about to do, as a value that ranks compare
``peers``          the processes on this host, and which of them have ended
``predecessor``    whether this process takes the place of one that has ended
``store_client``   separate store clients, each request to which has a timeout
``worker_thread``  blocking calls in threads that can be abandoned, and the timeout of a wait
=================  ===============================================================================
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
