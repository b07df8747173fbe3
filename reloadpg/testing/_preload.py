"""Modules that multiprocessing's fork server imports once for all ranks.

Named in ``set_forkserver_preload`` by ``run_ranks``, and imported nowhere else. The server starts
no thread (importing NumPy's OpenBLAS would) and does not install reloadpg: each rank's environment
decides that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterable

_SETTINGS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SETTINGS["RELOADPG_AUTOINSTALL"] = ""


def import_all(names: Iterable[str]) -> None:
    """Import modules in a process that ranks are forked from. Local.

    Without garbage collection, which takes a third of the time of these imports.
    """
    gc.disable()
    before, path = dict(os.environ), list(sys.path)
    os.environ.update(_SETTINGS)
    sys.path[:] = filter(None, path)  # not a folder `torch` of the working directory
    for name in names:
        with contextlib.suppress(Exception):  # the rank's import fails again and reports it
            importlib.import_module(name)
    sys.path[:] = path
    for name in _SETTINGS:
        del os.environ[name]
        if name in before:
            os.environ[name] = before[name]
    gc.enable()


import_all(("torch.distributed", "reloadpg.testing.ranks", "reloadpg.testing.simulated"))
with contextlib.suppress(Exception):
    import reloadpg

    for module in (reloadpg, reloadpg.recovery):
        for public in module.__all__:
            getattr(module, public)
