"""What torch lacks for a script whose tensors are on the device ``meta``; for ``explain`` alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from .backends import completed_work

_kept: list[torch.library.Library] = []
"""The kernels disappear with their library."""


def provide_meta_collectives() -> None:
    """Give c10d's operators a kernel for ``meta`` tensors where torch has none. Local.

    Torch 2.15 has such kernels for most of them, earlier versions for none. A kernel returns its
    first argument, which has the operator's results, and a completed Work.
    """
    library = torch.library.Library("c10d", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    _kept.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::") and not torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "Meta"
        ):
            returned = len(torch._C._get_schema(name, "").returns)
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
