"""What ``reloadpg explain`` uses of torch's private names, in a process that runs one rank alone.

Not imported with the other modules: torch's fake backend is part of its test utilities.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.distributed import Store, utils

BACKEND_GETTERS = ("_get_backend", "get_backend")
"""Methods of a group that return a backend."""

BUILTIN_HOOK = "_register_builtin_comm_hook"
"""A method of DDP that registers a hook with a reducer in C++."""


def fake_store() -> Store:
    """A store that holds nothing, for torch's ``fake`` backend, which it registers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def to_kwargs(*args: Any) -> Any:
    """Move arguments to a device, as DDP does in its forward pass."""
    return utils._to_kwargs(*args)


def verify_no_parameters() -> None:
    """Make DDP's comparison of parameters between the ranks do nothing, permanently."""
    distributed: Any = torch.distributed
    distributed._verify_params_across_processes = lambda *_: None
