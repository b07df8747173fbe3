"""Agreement of a job's ranks through the rendezvous store: barriers and their decisions.

Nothing here uses a collective, since the groups may be released.

=================  ===============================================================================
``protocol``       the agreement as a state machine, without I/O; start here
``round``          performs the commands of the protocol on the store, for one rank
``decision``       the decision of a barrier, and the error that each rank raises for it
``plan``           a rank's plan for an operation, as a value that ranks compare
``peers``          the ranks on this host: which of them have ended
``store_client``   separate store clients with a timeout for each request
``worker_thread``  blocking calls in threads that can be abandoned, and deadlines
=================  ===============================================================================
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
