"""Views of torch's state for tools."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.distributed import distributed_c10d as _c10d

SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"


def symmetric_memory_groups() -> dict[str, tuple[str, str, bool]]:
    """The groups with symmetric memory: their names, each with the module, "", and what it holds.

    ``enable_symm_mem_for_group`` keeps each group's store by its name (seen on 2.8 to 2.15).

    The last value says whether torch keeps the group's communicator, which is so with its NCCL
    backend: C++ keeps communicators and windows by the group's name, and no function drops them
    (read in sources of 2026; in 2.14.1 and 2.15.0 the manager of communicators is in the library).
    With the backends CUDA and NVSHMEM the memory belongs to the tensors.
    """
    names = list(getattr(sys.modules.get(SYMMETRIC_MEMORY), "_group_name_to_store", ()))
    raw = bool(names) and symmetric_memory_keeps_communicators()
    return dict.fromkeys(names, (SYMMETRIC_MEMORY, "", raw))


def symmetric_memory_keeps_communicators() -> bool:
    """Whether symmetric memory, which is loaded, uses its NCCL backend. Local."""
    # Torch 2.8 has neither this function nor an NCCL backend.
    backend = getattr(sys.modules[SYMMETRIC_MEMORY], "get_backend", None)
    return backend is not None and backend(torch.device("cuda")) == "NCCL"


def is_coalescing(group: object) -> bool:
    return group in cast(Any, _c10d._world.pg_coalesce_state)


def skip_in_compiled_code(functions: Iterable[Any], *, callees: bool = False) -> None:
    """Exclude these Python functions from ``torch.compile``; what they call is traced.

    With ``callees``, what they call is excluded too.

    After a graph break torch runs its own function eagerly, which calls the group's method. A plain
    group's method is in C++. A reloadable group's is a Python frame, which Dynamo would compile:
    reading an attribute of the group, an opaque object for it, would be an error. Does not
    import ``torch._dynamo``. Seen on 2.8, 2.13 and 2.15.
    """
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    rest = action.SKIP if callees else action.DEFAULT
    skip = eval_frame._FrameExecStrategy(action.SKIP, rest)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)
