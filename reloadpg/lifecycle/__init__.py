"""The lifecycle of a job's reloadable groups: install, offload, reload, recover, and reports.

``offload``, ``reload`` and ``recover`` each read from top to bottom, and share ``operation``.

=================  ===============================================================================
``install``        put the patches in place, and take them off again
``autoinstall``    the same by ``RELOADPG_AUTOINSTALL=1``
``offload``        release the communicators of all groups
``reload``         build them again
``recover``        make all communicators anew after a fault, whatever state the ranks are in
``rejoin``         let a process that replaces one that has ended into the job
``retrying``       repeat the steps of a loop on all ranks alike, with ``recover`` between
``pending``        the handle of an operation that goes on beside its caller
``operation``      one of the three on this rank: its barriers and steps, as a transaction
``record``         what an operation takes and does on this rank, and its report
``strategy``       the decision of how each group is released
``recreate``       destroy communicators; replay the calls that created them
``suspend``        keep communicators, and let the backend give back their memory
``connect``        connect rebuilt communicators before anybody needs them
``failure``        what all ranks do if an operation does not complete
``block``          ``offloaded()``: both operations around a block of code
``callbacks``      ``on_offload``, ``on_reload``, ``on_report``
``memory``         memory in use, by the sources that can say it
``report``         ``Report`` and ``Status``, as values
``status``         ``status()``
=================  ===============================================================================
"""
