"""Torch's private names that ``reloadpg explain`` uses, in a process that runs one rank alone.

Not imported with the other modules: torch's fake backend is part of its test utilities.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import _C
from torch.distributed import Store, utils

from .backends import completed_work

_PRIVATE: Any = _C

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


_kept: list[torch.library.Library] = []
"""The kernels disappear with their library."""


def provide_meta_collectives() -> None:
    """Give c10d's operators a kernel for ``meta`` tensors where torch has none. Local.

    Torch 2.15 has such kernels for most of them, earlier versions for none. A kernel returns its
    first argument, which has the operator's results, and a completed Work.
    """
    library = torch.library.Library("c10d", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    _kept.append(library)
    for name in _PRIVATE._dispatch_get_all_op_names():
        if name.startswith("c10d::") and not _PRIVATE._dispatch_has_kernel_for_dispatch_key(
            name, "Meta"
        ):
            returned = len(_PRIVATE._get_schema(name, "").returns)
            library.impl(name, _kernel(returned))  # type: ignore[no-untyped-call]


def _kernel(returned: int) -> Any:
    def kernel(results: Any, *_: Any) -> Any:
        if returned == 0:
            return None
        work = completed_work().boxed()  # type: ignore[attr-defined]
        return work if returned == 1 else (results, work)

    return kernel


def run_backward_in(mode: AbstractContextManager[object]) -> None:
    """Run hooks of backward passes in a mode: torch leaves modes for the whole pass. Permanent."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    autograd._engine_run_backward = run_in_mode
