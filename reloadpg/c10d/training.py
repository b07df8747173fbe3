"""The state of an unfinished training step in modules, optimizers and scalers, and its reset.

Seen on torch 2.8, 2.13 and 2.15: FSDP2's states and parameter groups, DDP's reducer, GradScaler's
stages.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .needs import describe_needs, missing
from .tables import ranks_of

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CONTEXT_FLAGS = ("is_last_backward", "manual_backward_finalization")  # the latter from 2.15 on
_FLAGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "_post_backward_pending",  # from 2.15 on, as the next
    "_partial_reduce_output_layout",
)
"""Settings that FSDP2's groups of parameters keep between backward passes."""

_DDP_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")
"""Settings that DDP keeps between forward passes: ``no_sync()``, and whether the next forward pass
broadcasts the buffers. They must be equal on all ranks."""


def leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the data of a tensor: of a DTensor, the local shard."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
    else:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor of torch 2.13 also names its mesh
                yield from leaves_of(inner)


def copy_tensors(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(of), non_blocking=True)


def registered_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters of a module alone, by name, to read and to replace."""
    return module._parameters


def registered_buffers(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module alone, by name, to read and to replace."""
    return module._buffers


def training_obstacle(module: torch.nn.Module) -> str:
    """Return why the unfinished step of a module cannot be reset; empty if it can. Local."""
    if lacking := missing("state"):
        return f"torch {torch.__version__} lacks {describe_needs(lacking)}"
    sharded = getattr(sys.modules.get(_FSDP1), "FullyShardedDataParallel", ())
    for name, part in module.named_modules():
        where = f"{name or 'it'} is a {type(part).__name__}"
        if isinstance(part, sharded):
            return f"{where} of FSDP1, whose flat parameters cannot be reset; use fully_shard()"
        if type(part).__module__.partition(".")[0] == "deepspeed":
            return f"{where} of DeepSpeed, whose buffers cannot be reset"
        if isinstance(part, DistributedDataParallel) and not hasattr(part.reducer, "_reset_state"):
            return f"{where}, and this torch cannot reset its reducer"
        if isinstance(part, DistributedDataParallel) and part.static_graph:
            return f"{where} with static_graph=True, whose first step cannot be repeated"
    return ""


# -- FSDP2 ----------------------------------------------------------------------------------------


def _states(module: torch.nn.Module) -> list[Any]:
    """The states of FSDP2 in a module, each once."""
    find: Callable[[Any], Any] | None = getattr(
        sys.modules.get(_FSDP2), "_get_module_fsdp_state", None
    )
    if find is None:
        return []
    states = {id(state): state for part in module.modules() if (state := find(part)) is not None}
    return list(states.values())


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # 2.8 has one at most
    return [group for group in (several or [state._fsdp_param_group]) if group is not None]


def _is_unfinished(state: Any) -> bool:
    context, communication = state._state_ctx, state._comm_ctx
    return (
        context.iter_forward_root is not None
        or context.post_backward_final_callback_queued
        or bool(getattr(communication, "post_forward_order", ()))
        or any(
            group._training_state.name != "IDLE"
            or group._all_gather_result is not None
            or any(parameter.sharded_state.name != "SHARDED" for parameter in group.fsdp_params)
            for group in _groups(state)
        )
    )


def _reset_fsdp(state: Any) -> None:
    """Reset a state to that between two steps, with sharded parameters. Local, idempotent."""
    context, communication = state._state_ctx, state._comm_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for owner, name, value in (
        (communication, "all_gather_state", None),
        (communication, "reduce_scatter_state", None),
        (communication, "active_gradient_reduction", None),  # from 2.15 on, as the two below
        (context, "manual_backward_finalization_active", None),
        (context, "gradient_reduction_pending", False),
    ):
        if hasattr(owner, name):
            setattr(owner, name, value)
    for name in ("post_forward_order", "reduce_scatter_states", "_last_post_reduce_events"):
        if hasattr(communication, name):
            getattr(communication, name).clear()
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._modules_to_run_forward.clear()
    for group in _groups(state):
        group._training_state = idle
        for name in (
            "_all_gather_result",
            "_post_reduce_event",
            "_all_reduce_state",
            "_reshard_after_forward_event",
            "_partial_reduce_output",
        ):
            setattr(group, name, None)
        group._post_forward_indices.clear()
        # Whatever the group says: it may have failed between two parameters.
        for parameter in group.fsdp_params:
            with torch.no_grad():
                parameter.to_sharded()
            parameter.grad_offload_event = None
            if _accumulates_apart(parameter):
                parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # from 2.15 on
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            group._post_backward_pending = False
            group._partial_reduce_output_layout = {}
        group._sharded_state = type(group._sharded_state).SHARDED


def _accumulates_apart(parameter: Any) -> bool:
    """Whether FSDP2 keeps accumulated gradients in an attribute; since 2.15 autograd keeps them."""
    return "unsharded_accumulated_grad" in vars(parameter)


def module_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a module, each once, as an optimizer uses them: FSDP2's are sharded."""
    sharded = {}
    for state in _states(module):
        for group in _groups(state):
            for parameter in group.fsdp_params:
                places = [(parameter._module_info.module, parameter._module_info.param_name)]
                places += zip(
                    parameter._module_info.shared_modules,
                    parameter._module_info.shared_param_names,
                    strict=True,
                )
                sharded.update({(id(o), name): parameter.sharded_param for o, name in places})
    parameters: dict[int, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in registered_parameters(owner).items():
            if parameter is not None:
                used = sharded.get((id(owner), name), parameter)
                parameters[id(used)] = used
    return list(parameters.values())


def held_gradients(module: torch.nn.Module) -> list[tuple[Any, str]]:
    """Where FSDP2 keeps gradients that are being accumulated: objects and their attributes."""
    places: list[tuple[Any, str]] = []
    for state in _states(module):
        for group in _groups(state):
            places.append((group, "_partial_reduce_output"))
            for parameter in group.fsdp_params:
                if _accumulates_apart(parameter):
                    places.append((parameter, "unsharded_accumulated_grad"))
                if hasattr(parameter, "_unsharded_param"):
                    places.append((parameter._unsharded_param, "grad"))
    return [(owner, name) for owner, name in places if getattr(owner, name, None) is not None]


def step_flags(module: torch.nn.Module) -> list[tuple[Any, str]]:
    """The settings of a module that change within a step: objects and attributes."""
    flags: list[tuple[Any, str]] = [(part, "training") for part in module.modules()]
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            flags += [(part, name) for name in _DDP_FLAGS]
    for state in _states(module):
        context = state._state_ctx
        flags += [(context, name) for name in _CONTEXT_FLAGS if hasattr(context, name)]
        for group in _groups(state):
            flags += [(group, name) for name in _FLAGS if hasattr(group, name)]
    return flags


def refuse_unfinished() -> int:
    """Make each FSDP2 model with an unfinished step refuse its next use; return their number.

    Its gathered parameters may be older than the weights that are loaded into it, and neither
    ``load_state_dict`` nor ``reshard()`` repairs that. A model that was reset, as by
    ``reset_iter_state()`` of torch 2.13, is not refused. Searches all objects of the process.
    """
    kind = getattr(sys.modules.get(_FSDP2), "FSDPState", None)
    if kind is None:
        return 0
    count = 0
    for state in [item for item in gc.get_objects() if isinstance(item, kind)]:
        # Only the root has begun; in torch 2.8 to 2.15 all states share its context.
        if getattr(state, "_is_root", None) and any(
            map(_is_unfinished, state._state_ctx.all_states)
        ):
            count += 1
            _refuse_next_use(state)
    return count


def _refuse_next_use(state: Any) -> None:
    def refuse(module: torch.nn.Module, _: Any) -> None:
        handle.remove()
        if any(map(_is_unfinished, state._state_ctx.all_states)):
            raise RuntimeError(
                f"{type(module).__name__}, sharded by fully_shard(), was left in the middle of a "
                "step by a fault: its parameters may be gathered from weights that are not those "
                "loaded since, and the results would be wrong. Pass it to "
                "retrying(state=(model, optimizer)), which resets and restores it, or recreate it."
            )

    handle = state._modules[0].register_forward_pre_hook(refuse, prepend=True)


# -- all of a module ------------------------------------------------------------------------------


def reset_step(module: torch.nn.Module) -> None:
    """Drop the remains of an unfinished step in FSDP2 and in DDP's reducer. Idempotent.

    The order in which a reducer sums gradients stays as it is.
    """
    for state in _states(module):
        _reset_fsdp(state)
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            part._has_rebuilt_buckets = False
            part.reducer._reset_state()


def stages_of(schedule: Any) -> Sequence[Any]:
    """The stages of a pipeline's schedule on this rank; another object counts as a stage."""
    return getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", schedule)]


def reset_pipeline(schedule: Any, stages: Sequence[Any]) -> None:
    """Drop the microbatches of an unfinished step of a pipeline. Local, idempotent."""
    getattr(schedule, "_internal_losses", []).clear()
    for stage in stages:
        if hasattr(stage, "_gradient_reduction_handle"):  # from 2.15 on; a wait for it would raise
            stage._gradient_reduction_handle = None
            for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in received:  # a buffer each step, which is refused while one is there
                    info.buffer = None
        stage.clear_runtime_states()


def remake_step(module: torch.nn.Module) -> None:
    """Recreate the reducer of each DDP in a module.

    A new process orders its gradients differently until its first step has ended, and all ranks
    must use one order.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            private = cast(Any, part)
            parameters, sparse = private._build_params_for_reducer()
            names = private._build_debug_param_to_name_mapping(parameters)
            private._has_rebuilt_buckets = False
            private.reducer._remove_autograd_hooks()
            private._ddp_init_helper(parameters, sparse, names, part.static_graph)
            if part.static_graph:
                private.reducer._set_static_graph()


def replicas_of(module: torch.nn.Module, rank: int) -> set[int] | None:
    """The ranks with the same parameters, by DDP's groups and DTensors' meshes; None if unknown."""
    replicas: set[int] | None = None
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            same = {*ranks_of(part.process_group)}
            replicas = same if replicas is None else replicas & same
    for parameter in module_parameters(module):
        placements = getattr(parameter, "placements", None)
        if placements is None:
            continue
        mesh = cast(Any, parameter).device_mesh
        here = (mesh.mesh == rank).nonzero()
        ranks = mesh.mesh
        if len(here):
            for dim in reversed(range(ranks.ndim)):
                if not placements[dim].is_replicate():
                    ranks = ranks.select(dim, int(here[0][dim]))
        same = {*ranks.flatten().tolist()}
        replicas = same if replicas is None else replicas & same
    return replicas


# -- GradScaler -----------------------------------------------------------------------------------


def scaler_stages(scaler: Any) -> dict[int, dict[str, Any]] | None:
    """Return a GradScaler's stage with each optimizer; None for other objects. Local."""
    stages = getattr(scaler, "_per_optimizer_states", None)
    if stages is None:
        return None
    return {
        key: {name: dict(v) if isinstance(v, dict) else v for name, v in stage.items()}
        for key, stage in stages.items()
    }


def set_scaler_stages(scaler: Any, stages: dict[int, dict[str, Any]]) -> None:
    scaler._per_optimizer_states = defaultdict(scaler._per_optimizer_states.default_factory, stages)
