"""megatron-core's parallel state around reloadable groups: build it, name it, leave nothing behind.

``parallel_state.destroy_model_parallel()`` forgets its groups without destroying most of them:
they keep their communicators, stay in c10d's tables, and go through every later offload and
reload. The functions here destroy them. Timeouts need no help: what megatron-core sets later
(``update_pg_timeout``) holds after each reload.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import c10d
from ..environment import barrier
from ..errors import ReloadpgError

__all__ = ["ModelParallel", "destroy_model_parallel", "groups", "initialize_model_parallel"]

logger = logging.getLogger("reloadpg")

_TIMEOUT = timedelta(minutes=5)


def initialize_model_parallel(**options: Any) -> ModelParallel:
    """Build megatron-core's groups; as a context manager, destroy them all at the end.

    Collective over all ranks, as megatron-core's function of that name, which it calls. If that
    raises, what was built so far is destroyed on this rank and the error goes on.

    Args:
        options: what ``megatron.core.parallel_state.initialize_model_parallel`` takes.

    Raises:
        ReloadpgError: there is no default group, or the parallel state is initialized already;
            nothing was changed.
        ImportError: megatron-core is not installed.
    """
    state = _parallel_state()
    if c10d.world() is None:
        raise ReloadpgError(
            "initialize_model_parallel: torch.distributed is not initialized, so there is no "
            "default group to make groups of; nothing was changed. Call "
            "reloadpg.init_distributed() or torch.distributed.init_process_group() first."
        )
    if state.is_initialized() or state._global_process_group_list:
        raise ReloadpgError(
            "initialize_model_parallel: megatron-core's parallel state is initialized already; "
            "nothing was changed. Call reloadpg.integrations.megatron.destroy_model_parallel() on "
            "all ranks first; megatron-core's own leaves most groups alive."
        )
    try:
        state.initialize_model_parallel(**options)
    except BaseException:
        _destroy(state)
        raise
    return ModelParallel()


class ModelParallel:
    """Handle on an initialized parallel state; as a context manager it destroys it at the end.

    If the block raises, that is done on this rank without waiting for the others.
    """

    @property
    def groups(self) -> dict[str, ProcessGroup]:
        """This rank's groups by megatron-core's short names: :func:`groups`."""
        return groups()

    def destroy(self) -> None:
        """Like :func:`destroy_model_parallel`."""
        destroy_model_parallel()

    def __enter__(self) -> ModelParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.destroy()
        else:  # the other ranks may be anywhere, or gone
            _destroy(_parallel_state())


def groups() -> dict[str, ProcessGroup]:
    """The groups of the parallel state that this rank is a member of, by megatron-core's names.

    The names are the fields of its ``ProcessGroupCollection`` (``tp``, ``pp``, ``dp``, ``cp``,
    ``ep``, ``expt_tp``, ...); of a field that holds several, ``hcp[0]``, ``hcp[1]`` and so on. One
    group may have several names. Local; works while the groups are offloaded; empty when
    nothing is initialized.
    """
    state = _parallel_state()
    if not state.is_initialized():
        return {}
    collection = import_module("megatron.core.process_groups_config").ProcessGroupCollection
    found: dict[str, ProcessGroup] = {}
    for field in fields(collection):
        value: Any = None
        with suppress(AssertionError):  # megatron-core: no such group in this layout
            value = getattr(collection.use_mpu_process_groups([field.name]), field.name)
        for index, group in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(group, ProcessGroup):
                name = f"{field.name}[{index}]" if isinstance(value, list) else field.name
                found[name] = group
    return found


def destroy_model_parallel(timeout: timedelta | float = _TIMEOUT) -> int:
    """Destroy the parallel state with all of its groups, however it was initialized.

    Collective over all ranks: they wait for each other first, since a rank that destroys a gloo
    group while another is still creating it makes that one fail. Blocking, bounded; idempotent;
    works while the groups are offloaded. Every group that ``parallel_state.create_group`` made for
    this rank is destroyed, in the reverse order of creation, and the references that
    megatron-core's function leaves behind are dropped. Groups of others, WORLD among them, stay.

    Args:
        timeout: how long to wait for the other ranks, in seconds or as a timedelta.

    Returns:
        How many groups were destroyed on this rank.

    Raises:
        RendezvousTimeoutError: ranks are missing; it names them, and nothing was destroyed.
        ReloadpgError: a group could not be destroyed; the others were. The first cause is chained.
    """
    state = _parallel_state()
    if not state.is_initialized() and not state._global_process_group_list:
        return 0
    barrier(timeout, "destroy_model_parallel")
    return _destroy(state)


def _destroy(state: ModuleType) -> int:
    """The same, waiting for nobody. Local."""
    made = [g for g in state._global_process_group_list or () if isinstance(g, ProcessGroup)]
    mine = [group for group in made if c10d.is_known(group) and group is not c10d.world()]
    state.destroy_model_parallel()  # destroys some of its gloo groups itself
    failed: list[tuple[ProcessGroup, Exception]] = []
    for group in reversed(mine):
        if not c10d.is_known(group):
            continue
        try:
            dist.destroy_process_group(group)
        except Exception as error:  # the others must go all the same
            failed.append((group, error))
            logger.error("destroy_model_parallel: %r could not be destroyed: %s", group, error)
    _forget(state, made)
    if failed:
        group, cause = failed[0]
        raise ReloadpgError(
            f"destroy_model_parallel: {len(failed)} of {len(mine)} groups could not be destroyed, "
            f"first {group!r}: {type(cause).__name__}: {cause}. The others are gone and the "
            "parallel state is empty. Destroy what is left with destroy_process_group()."
        ) from cause
    return len(mine)


def _forget(state: ModuleType, made: list[ProcessGroup]) -> None:
    """Drop what the module still holds of destroyed groups: a reference keeps gloo's sockets."""
    gone = set(map(id, made))
    for name, value in list(vars(state).items()):
        if isinstance(value, dict):
            for key in [key for key, item in value.items() if id(item) in gone]:
                del value[key]
        elif id(value) in gone or (
            isinstance(value, list) and any(id(item) in gone for item in value)
        ):
            setattr(state, name, None)


def _parallel_state() -> ModuleType:
    try:
        return import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise ImportError(
            "reloadpg.integrations.megatron needs megatron-core; nothing was changed. Install it "
            "with: pip install 'reloadpg[megatron]'"
        ) from error
