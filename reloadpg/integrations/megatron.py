"""megatron-core's parallel state with reloadable groups: creation and destruction.

``parallel_state.destroy_model_parallel()`` drops most of its groups without destroying them: they
keep their communicators, stay in c10d's tables, and take part in every later offload and reload.
The functions here destroy them.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..c10d import tables
from ..environment import barrier
from ..errors import ReloadpgError
from . import framework

__all__ = ["ModelParallel", "destroy_model_parallel", "initialize_model_parallel"]

_TIMEOUT = timedelta(minutes=5)


def initialize_model_parallel(**options: Any) -> ModelParallel:
    """Create megatron-core's groups; as a context manager, destroy them all at the end.

    Collective over all ranks; calls megatron-core's function of the same name. If that raises, the
    groups created so far are destroyed on this rank, and the error propagates.

    Args:
        options: arguments of ``megatron.core.parallel_state.initialize_model_parallel``.

    Raises:
        ReloadpgError: there is no default group, or the parallel state is already initialized;
            nothing was changed.
        ImportError: megatron-core is not installed.
    """
    state = _parallel_state()
    if tables.world() is None:
        raise ReloadpgError(
            "initialize_model_parallel: there is no default group; nothing was changed. "
            "Call reloadpg.environment.init_distributed() or "
            "torch.distributed.init_process_group() first."
        )
    if state.is_initialized() or state._global_process_group_list:
        raise ReloadpgError(
            "initialize_model_parallel: megatron-core's parallel state is already initialized; "
            "nothing was changed. Call reloadpg.integrations.megatron.destroy_model_parallel() on "
            "all ranks first; megatron-core's function leaves most groups alive."
        )
    try:
        state.initialize_model_parallel(**options)
    except BaseException:
        _destroy(state)
        raise
    return ModelParallel()


class ModelParallel:
    """Handle of an initialized parallel state; as a context manager it destroys it at the end.

    If the block raises, it is destroyed on this rank without waiting for the others.
    """

    def __enter__(self) -> ModelParallel:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            destroy_model_parallel()
        else:  # the state of the other ranks is unknown
            _destroy(_parallel_state())


def destroy_model_parallel(timeout: timedelta | float = _TIMEOUT) -> int:
    """Destroy the parallel state with all of its groups, however it was initialized.

    Collective over all ranks: they wait for each other first, since the creation of a gloo group
    fails if another rank already destroys it. Blocking, with a timeout; idempotent; works while the
    groups are offloaded. Groups that ``parallel_state.create_group`` did not create, such as WORLD,
    are unchanged.

    Args:
        timeout: how long to wait for the other ranks, in seconds or as a timedelta.

    Returns:
        The number of groups that were destroyed on this rank.

    Raises:
        RendezvousTimeoutError: ranks are missing; it names them, and nothing was destroyed.
        Exception: torch's error if a group could not be destroyed; the others were.
    """
    state = _parallel_state()
    if not state.is_initialized() and not state._global_process_group_list:
        return 0
    barrier("destroy_model_parallel", timeout=timeout)
    return _destroy(state)


def _destroy(state: Any) -> int:
    """Destroy the parallel state without waiting for other ranks. Local."""
    made = [g for g in state._global_process_group_list or () if isinstance(g, ProcessGroup)]
    mine = [group for group in made if tables.is_known(group) and group is not tables.world()]
    state.destroy_model_parallel()  # destroys some of its gloo groups itself
    with ExitStack() as stack:  # in reverse order, and all of them if one raises
        stack.callback(_forget, state, made)
        for group in mine:
            stack.callback(_destroy_known, group)
    return len(mine)


def _destroy_known(group: ProcessGroup) -> None:
    if tables.is_known(group):
        dist.destroy_process_group(group)


def _forget(state: Any, made: list[ProcessGroup]) -> None:
    """Drop the module's references to destroyed groups, which would keep gloo's sockets open."""
    gone = set(map(id, made))
    for name, value in list(vars(state).items()):
        if isinstance(value, dict):
            for key in [key for key, item in value.items() if id(item) in gone]:
                del value[key]
        elif id(value) in gone or (
            isinstance(value, list) and any(id(item) in gone for item in value)
        ):
            setattr(state, name, None)


def _parallel_state() -> Any:
    module = "megatron.core.parallel_state"
    return framework("megatron-core", "'reloadpg[megatron]'", module, error=ImportError)
