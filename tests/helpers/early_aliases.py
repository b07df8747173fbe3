"""Names of torch.distributed bound before ``reloadpg.install``: what Megatron-like code holds.

Imported by the tests at module level, so always before a rank installs the library.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import init_process_group, new_group
from torch.distributed.distributed_c10d import split_group

import reloadpg

BOUND_BEFORE_INSTALL = not reloadpg.is_installed()

_CREATORS = ("new_group", "split_group", "init_process_group")

FROM_DISTRIBUTED: dict[str, Any] = {
    name: value for name, value in vars(dist).items() if callable(value) and name not in _CREATORS
}
"""As ``from torch.distributed import ...`` binds them."""

FROM_C10D: dict[str, Any] = {
    name: value for name, value in vars(c10d).items() if callable(value) and name not in _CREATORS
}
"""As ``from torch.distributed.distributed_c10d import ...`` binds them."""


def init_by_alias(*args: Any, **kwargs: Any) -> None:
    """Call ``init_process_group`` by a name bound early."""
    init_process_group(*args, **kwargs)


def new_group_by_alias(*args: Any, **kwargs: Any) -> Any:
    """Call ``new_group`` by a name bound early."""
    return new_group(*args, **kwargs)


def split_group_by_alias(*args: Any, **kwargs: Any) -> Any:
    """Call ``split_group`` by a name bound early."""
    return split_group(*args, **kwargs)
