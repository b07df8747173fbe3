"""megatron-core's parallel state with reloadable groups, and its expert-parallel buffers.

``parallel_state.destroy_model_parallel()`` drops most of its groups without destroying them: they
keep their communicators, stay in c10d's tables, and take part in every later offload and reload
(Megatron-LM#6897). The functions here destroy them.

``transformer.moe.fused_a2a`` keeps communication buffers in variables of the module, and creates
them again if the group is another object (``_buffer.group != group``; ``_elastic_buffer`` of
Megatron-LM#5153). A reloadable group stays the same object: see :func:`follow_expert_parallel`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .. import on_offload, on_reload
from ..c10d import tables
from ..environment import barrier
from ..errors import ReloadpgError
from ..extend import managed
from . import framework

__all__ = [
    "ModelParallel",
    "destroy_model_parallel",
    "follow_expert_parallel",
    "initialize_model_parallel",
]

_TIMEOUT = timedelta(minutes=5)

_MODULES = (".fused_a2a", ".token_dispatcher")
_SYMMETRIC = ("_zc_fwd_token_buf", "_zc_bwd_token_buf", "_zc_recv_topk_weights_buf")
"""Variables of ``token_dispatcher._NCCLEPManager``: buffers of NCCL's expert parallelism (0.19)."""
_BUFFERS = ("_buffer", "_elastic_buffer", "_hybrid_ep_buffer")
"""Variables of ``fused_a2a`` that keep DeepEP's and HybridEP's buffers."""


def initialize_model_parallel(**options: Any) -> ModelParallel:
    """Create the groups of the parallel state; as a context manager, destroy them at the end.

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

    It destroys the groups of ``parallel_state.create_group``. Other modules call
    ``torch.distributed.new_group`` and keep their groups: Megatron-FSDP's adapter, the collections
    of ``process_groups_config``, ``inference.shards`` and the bridge communicator (0.20).

    Collective over all ranks: they wait for each other first, since the creation of a gloo group
    fails if another rank already destroys it. Buffers of expert parallelism are released before the
    groups. Blocking, with a timeout; idempotent; works while the groups are offloaded.

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
    return _destroy(state, together=True)


def _destroy(state: Any, *, together: bool = False) -> int:
    """Destroy the parallel state; wait for other ranks, in buffers of DeepEP, only if together."""
    made = [g for g in state._global_process_group_list or () if isinstance(g, ProcessGroup)]
    mine = [group for group in made if tables.is_known(group) and group is not tables.world()]
    _release_buffers(made, usable=together)
    state.destroy_model_parallel()  # destroys some of its gloo groups itself
    with ExitStack() as stack:  # in reverse order, and all of them if one raises
        stack.callback(_forget, state, made)
        for group in mine:
            stack.callback(_destroy_known, group)
    return len(mine)


def follow_expert_parallel(group: ProcessGroup | None = None) -> Callable[[], None]:
    """Release what Megatron keeps of an expert-parallel group each time its communicator ends.

    Local; call it on every member, once the group exists. From then on an offload releases, while
    the group is live: the buffers of DeepEP and HybridEP in ``fused_a2a`` (also in copies of that
    module), the communicator that DeepEP V2 keeps by the group, and NCCL's expert parallelism of
    TransformerEngine. Megatron creates each again on its next use, so connect the group in the
    reload: ``reload(connect="eager")``. What a version lacks is left out; nothing is imported.

    After :func:`reloadpg.recovery.recover` the buffers are dropped. NCCL's expert parallelism
    cannot be ended then: the recovery raises on its ranks, and the process must be restarted.

    Args:
        group: the group over which tokens are sent; None for the one of the parallel state,
            ``get_expert_tensor_and_model_parallel_group()``.

    Returns:
        A function that removes this; idempotent.
    """
    if group is None:
        group = _parallel_state().get_expert_tensor_and_model_parallel_group()

    def release(group: ProcessGroup, backend: Any) -> None:
        _release_buffers([group])

    def finalize(group: ProcessGroup, backend: Any) -> None:
        if not _uses_nccl():
            return
        for _, _, manager in _kept(["_NCCLEPManager"]):
            for name in _SYMMETRIC:
                setattr(manager, name, None)
            for one in gc.get_objects():
                if type(one) is manager:
                    one._bootstrapped = False  # 0.19.2 looks at nothing else
        for _, _, function in _kept(["nccl_ep_finalize"]):
            function()

    def drop(group: ProcessGroup, backend: Any) -> None:
        _release_buffers([group], usable=False)
        if _uses_nccl():
            raise ReloadpgError(
                f"NCCL's expert parallelism still uses the communicator that group {group!r} had "
                "before the recovery. The groups are live on all ranks. Restart this process."
            )

    removals = ExitStack()
    removals.callback(on_offload(finalize, group=group, package="transformer_engine"))
    removals.callback(on_offload(release, group=group, package="deep_ep"))
    removals.callback(on_reload(drop, group=group, package="deep_ep"))
    return removals.close


def _uses_nccl() -> bool:
    """Whether TransformerEngine has borrowed a communicator for expert parallelism."""
    te_ep = sys.modules.get("transformer_engine.pytorch.ep")
    ask = getattr(te_ep, "is_ep_bootstrapped", lambda: getattr(te_ep, "_BOOTSTRAPPED", False))
    return bool(ask())


def _kept(names: Sequence[str]) -> Iterator[tuple[Any, str, Any]]:
    """What Megatron's modules of expert parallelism, or copies of them, have under these names."""
    for name in names:
        for path, module in list(sys.modules.items()):
            if path.endswith(_MODULES) and (value := getattr(module, name, None)) is not None:
                yield module, name, value


def _release_buffers(groups: Sequence[ProcessGroup], usable: bool = True) -> None:
    """Release the buffers of these groups; destroy them if the other members do so too."""
    for module, name, buffer in _kept(_BUFFERS):
        of = getattr(buffer, "group", None)
        if any(of is group for group in groups):
            record = managed(of)
            live = usable and (record is None or record.is_live)
            if live and getattr(buffer, "explicitly_destroy", False):
                buffer.destroy()  # collective over the group
            setattr(module, name, None)
    for group in groups:
        getattr(sys.modules.get("deep_ep.utils.comm"), "_storage", {}).pop(group, None)


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
