"""Reloadable groups: their creation, their objects, and the patches that put them in place.

=================  ===============================================================================
``patches``        install and remove the wrappers, at every name of a creating function
``wrappers``       let torch create a group, and replace it by a proxy if it is selected
``selection``      which groups are selected, and the strategy that the user chose for each
``creation``       the record of the call that created a group, and its replay
``proxy``          ``ReloadableProcessGroup``: identity, settings, and its generations
``dispatch``       its collectives, each forwarded to the live communicator
``offloaded``      the placeholder for a released communicator: it raises
``register_group`` groups created by hand, registered by their user
``replacement``    groups of a process that replaces another one, created without the other ranks
``registry``       the installation, the job, and which groups are managed
=================  ===============================================================================
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
