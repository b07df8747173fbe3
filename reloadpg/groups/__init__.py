"""Reloadable groups: their creation, their objects, and the patches that put them in place.

=================  ===============================================================================
``patches``        put on and take off the wrappers, at every name of a creating function
``wrappers``       let torch create a group, and put a proxy in its place if it is selected
``selection``      which groups are selected, and how the user wants each to be released
``creation``       the record of the call that created a group, and its replay
``proxy``          ``ReloadableProcessGroup``: identity, settings, and its generations
``dispatch``       its collectives, each forwarded to the live communicator
``offloaded``      the placeholder that they reach while there is none: it raises
``manage``         groups that their user made by hand, handed over
``replacement``    groups of a process that replaces another one, created without the others
``registry``       the installation, the job, and which groups are managed
=================  ===============================================================================
"""

import torch  # noqa: F401 - first: RELOADPG_AUTOINSTALL installs at its end
