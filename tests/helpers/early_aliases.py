"""Names of torch.distributed that are bound before ``reloadpg.install``, as in Megatron.

Tests import this module at module level, so before any rank installs the library.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import init_process_group, new_group

import reloadpg

BOUND_BEFORE_INSTALL = not reloadpg.is_installed()

_CREATORS = ("new_group", "split_group", "init_process_group")


def _bound_by(module: ModuleType) -> dict[str, Any]:
    """Return the namespace of a new module that has run ``from module import *``."""
    binding = sys.modules[f"{__name__}_{module.__name__}"] = ModuleType(module.__name__)
    for name, value in vars(module).items():
        if callable(value) and name not in _CREATORS:
            setattr(binding, name, value)
    return vars(binding)


FROM_DISTRIBUTED = _bound_by(dist)
"""As ``from torch.distributed import ...`` binds them."""

FROM_C10D = _bound_by(c10d)
"""As ``from torch.distributed.distributed_c10d import ...`` binds them."""


def init_by_alias(*args: Any, **kwargs: Any) -> None:
    """Call ``init_process_group`` by a name bound early."""
    init_process_group(*args, **kwargs)


def new_group_by_alias(*args: Any, **kwargs: Any) -> Any:
    """Call ``new_group`` by a name bound early."""
    return new_group(*args, **kwargs)
