"""Functions of torch.distributed that are bound before ``reloadpg.install``, as in Megatron.

Tests import this module at module level, so before any rank installs the library.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import init_process_group, new_group, split_group  # noqa: F401

import reloadpg

BOUND_BEFORE_INSTALL = not reloadpg.is_installed()

CREATORS = ("new_group", "split_group", "init_process_group")


def _bound_by(module: ModuleType) -> dict[str, Any]:
    """Return the namespace of a new module that has run ``from module import *``."""
    binding = sys.modules[f"{__name__}_{module.__name__}"] = ModuleType(module.__name__)
    for name, value in vars(module).items():
        if callable(value) and name not in CREATORS:
            setattr(binding, name, value)
    return vars(binding)


FROM_DISTRIBUTED = _bound_by(dist)
"""As ``from torch.distributed import ...`` binds them."""

FROM_C10D = _bound_by(c10d)
"""As ``from torch.distributed.distributed_c10d import ...`` binds them."""

# Bindings of ``new_group`` that are not in a module's dictionary

partial = functools.partial(dist.new_group, group_desc="by partial")


class Holder:
    new_group = staticmethod(dist.new_group)


def by_default(ranks: Any, create: Any = dist.new_group) -> Any:
    return create(ranks, group_desc="by default")
