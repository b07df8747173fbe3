"""TransformerEngine: expert parallelism and userbuffers end with the communicators that they use.

::

    expert_parallel(ep_group, lambda: ep.ep_bootstrap(ep_group, num_experts=64, ...))
    userbuffers(lambda: te.initialize_ub([tokens, hidden], tp_size, quantization_modes=[...]))

``ep_bootstrap`` takes the ``ncclComm_t`` out of the group and keeps it once per process: a second
call raises, and ``ep_finalize`` reads the communicator, so it must come before the group's end.
``initialize_ub`` keeps one communicator for each layer name, also once per process. Written for
TransformerEngine d0067d0 and 2.20.2 (expert parallelism is in 2.17 and later), whose source was
read; not run with its kernels, which need a GPU. TransformerEngine is not imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .. import c10d, register_holder
from ..errors import InvalidOptionError, ReloadpgError
from . import holders

__all__ = ["expert_parallel", "userbuffers"]

_EP = "transformer_engine.pytorch.ep"
_UB = "transformer_engine.pytorch.module.base"


class _ExpertParallel(holders.GroupResource):
    PACKAGE = _EP  # its Newton-Schulz iteration borrows communicators, too

    def create(self) -> None:
        super().create()
        module = sys.modules.get(_EP)
        if module is None or not module.is_ep_bootstrapped():
            raise InvalidOptionError(
                "expert_parallel(): the function did not call TransformerEngine's ep_bootstrap()."
            )
        self.value = module

    def drop(self, group: Any, *, broken: bool) -> None:
        module, self.value = self.value, None
        if module is not None and broken:
            raise ReloadpgError(
                f"TransformerEngine's expert parallelism of {group!r} cannot be finalized: "
                "ep_finalize() reads the communicator, which has ended in a recovery. Restart the "
                "process."
            )
        if module is not None:
            module.ep_finalize()


def expert_parallel(group: Any, bootstrap: Callable[[], object]) -> Callable[[], None]:
    """Finalize expert parallelism before a generation of its group ends, and bootstrap it again.

    Collective over the group, on all members in the same order. An offload that recreates the group
    calls ``ep_finalize`` while the group is live, and the reload calls ``bootstrap`` when all
    groups are live. A suspended group keeps its communicator and the state of expert parallelism.
    An ``EpBuffer`` stays usable from its next dispatch on. Free tensors of ``symm_mem_alloc``
    before the offload: their windows belong to the communicator.

    After :func:`reloadpg.recovery.recover` the communicator has ended, and TransformerEngine cannot
    forget it: the recovery raises, and the process must be restarted.

    Args:
        group: the group that is passed to ``ep_bootstrap``.
        bootstrap: calls ``ep_bootstrap``; called now and after each reload.

    Returns:
        A function that stops this, without finalizing; local, idempotent.

    Raises:
        InvalidOptionError: ``group`` is no group, or ``bootstrap`` has not initialized expert
            parallelism.
    """
    return _ExpertParallel(group, bootstrap).end


def userbuffers(
    initialize: Callable[[], object],
    *,
    group: Any = None,
    name: str = "TransformerEngine userbuffers",
    set: str | None = None,  # noqa: A002 - as in other functions
) -> Callable[[], None]:
    """Destroy userbuffers in each offload, and initialize them again in the reload.

    Collective over the job, on all ranks: ``initialize_ub`` creates groups of all ranks, which
    ``destroy_ub`` leaves behind; they are destroyed here. ``destroy_ub`` also calls
    ``torch.compiler.reset()``, so compiled functions are compiled again after a reload.

    Args:
        initialize: calls ``initialize_ub``; called now and after each reload.
        group: a group whose set the buffers follow, such as the tensor parallel group; it must
            include all ranks that call this.
        name: name for messages and reports.
        set: the set of groups to follow; by default that of the group, or ``"trainer"``.

    Returns:
        A function that stops this, without destroying the buffers; local, idempotent.

    Raises:
        InvalidOptionError: ``initialize`` has not initialized userbuffers, or an argument is
            invalid.
    """
    made: list[Any] = []

    def release() -> None:
        module = sys.modules.get(_UB)
        if module is not None:
            module.destroy_ub()

    def restore() -> None:
        release()  # it has not run on this rank if the offload failed on another one
        while made:  # not in the release, after which the ranks compare their groups
            mine = made.pop()
            if c10d.is_known(mine):
                dist.destroy_process_group(mine)
        before = [*c10d.known_groups()]
        initialize()
        made[:] = [one for one in c10d.known_groups() if one not in before]
        module = sys.modules.get(_UB)
        if module is None or not module.is_ub_initialized():
            raise InvalidOptionError(
                "userbuffers(): the function did not call TransformerEngine's initialize_ub()."
            )

    restore()
    return register_holder(
        name, release=release, restore=restore, group=group, collective=True, set=set
    )
