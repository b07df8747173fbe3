"""Functions of torch.distributed that are bound before ``reloadpg.install``, as in Megatron.

Tests import this module at module level, so before any rank installs the library.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import init_process_group, new_group, split_group  # noqa: F401

import reloadpg

BOUND_BEFORE_INSTALL = not reloadpg.is_installed()

CREATORS = ("new_group", "split_group", "init_process_group")


# Bindings of ``new_group`` that are not in a module's dictionary

partial = functools.partial(dist.new_group, group_desc="by partial")


class Holder:
    new_group = staticmethod(dist.new_group)


def by_default(ranks: Any, create: Any = dist.new_group) -> Any:
    return create(ranks, group_desc="by default")
