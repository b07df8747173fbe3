"""Agreement of a job's ranks through the rendezvous store: barriers and their decisions.

Nothing here uses a collective, since the groups may be released.

================  ===============================================================================
``protocol``      the agreement as generators, without I/O; start here
``rendezvous``    a rank on the store of its job: it performs the commands of the protocol
``round``         an operation on one rank: its barriers, and its end
``waiting``       how a rank waits in it: for the others, and for its own work
``decision``      the decision of a barrier, and the error that each rank raises for it
``plan``          a rank's plan for an operation, as a value that ranks compare
``store_client``  separate store clients, with a thread and a timeout for the requests
================  ===============================================================================
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
