"""``batch_isend_irecv`` on a reloadable group: the one collective that torch judges by type.

Before torch 2.15 it coalesces a batch only if ``type(group) is ProcessGroup``. On a proxy each
operation would be issued alone, and two ranks that both send first wait for each other in NCCL.
Pipeline schedules (Megatron's, torch's own) go through it, so on those versions it is patched
too; the wrapper does what torch does for a plain group, and nothing for any other group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import c10d
from .group import ReloadableProcessGroup

__all__ = ["wrappers"]


def wrappers() -> dict[str, Callable[..., Any]]:
    """The wrappers that the installed torch needs, by name: one or none."""
    if not c10d.batching_refuses_subclasses():
        return {}
    return {"batch_isend_irecv": _batch_isend_irecv}


def _batch_isend_irecv(
    wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    operations: Any = args[0] if args else kwargs.get("p2p_op_list")
    if not _coalesces(operations):
        return wrapped(*args, **kwargs)
    return c10d.batch_coalesced(operations)


def _coalesces(operations: Any) -> bool:
    """Whether this is a sound batch on a live proxy whose backend coalesces."""
    if not isinstance(operations, list) or not operations:
        return False  # torch says what is wrong with it
    group = getattr(operations[0], "group", None) or c10d.world()
    if not isinstance(group, ReloadableProcessGroup):
        return False
    try:
        c10d.check_batch(operations)
    except Exception:
        return False  # likewise
    return bool(group._get_backend(operations[0].tensor.device).supports_coalescing)
