"""The lifecycle of a job's reloadable groups: install, offload, reload, recover, and reports.

``offload``, ``reload`` and ``recover`` each read from top to bottom, and share ``operation``.

=================  ===============================================================================
``install``        install and remove the patches
``autoinstall``    installation by ``RELOADPG_AUTOINSTALL=1``
``offload``        release the communicators of all groups
``reload``         rebuild them
``recover``        recreate all communicators after a fault, in any state of the ranks
``rejoin``         join a running job in place of a process that has ended
``retrying``       repeat the steps of a loop on all ranks, with ``recover`` in between
``pending``        the handle of an operation that runs in the background
``operation``      one operation on this rank: its barriers and steps, as a transaction
``record``         times, memory and groups of an operation on this rank, and its report
``strategy``       the choice of how each group is released
``recreate``       destroy communicators; replay the calls that created them
``suspend``        keep communicators and release their memory
``connect``        connect rebuilt communicators before their first use
``failure``        the end of an operation that does not complete, on all ranks
``block``          ``offloaded()``: both operations around a block of code
``callbacks``      ``on_offload``, ``on_reload``, ``on_report``
``memory``         memory in use, by source
``report``         ``Report`` and ``Status``, as values
``status``         ``status()``
=================  ===============================================================================
"""
