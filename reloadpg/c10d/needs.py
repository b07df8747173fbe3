"""The private names of torch that this library uses: one table, and its check.

The check runs when this package is imported, so a torch that lacks a name is refused before
anything is patched. A name of :data:`OPTIONAL` is used only where torch has it.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. ``tests/c10d/test_needs.py`` fails for a private name
that the package uses and the table lacks.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

SEEN = ("2.8.0", "2.13.0", "2.15.0")
"""The versions of torch on which each name was checked."""

_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"

FUNCTIONS = {
    # They are patched, and replayed with their arguments.
    "new_group": "ranks timeout backend pg_options use_local_synchronization group_desc",
    "_new_group_with_tag": "ranks",
    "split_group": "parent_pg split_ranks",
    "init_process_group": "backend",
    # Only the members of a group take part in its rebuild, under a name of its generation.
    "_new_process_group_helper": "group_size group_rank global_ranks_in_group backend store "
    "group_name backend_options timeout pg_tag device_id group_desc",
    "_process_group_name": "ranks use_hashed_name",
    "_get_split_source": "",
    "_is_barrier_after_init": "",
    # A batch of sends and receives on a reloadable group is coalesced.
    "batch_isend_irecv": "",
    "_check_p2p_op_list": "p2p_op_list",
    "_coalescing_manager": "group device async_ops",
    "_get_default_timeout": "backend",
    "_abort_process_group": "group",
}
"""Functions of ``distributed_c10d``, with the leading parameters that are passed by position."""

_NAMES = {
    _C10D: f"{' '.join(FUNCTIONS)} BackendConfig Backend GroupMember _world",
    f"{_C10D}:BackendConfig": "get_device_backend_map",
    f"{_C10D}:Backend": "backend_list backend_type_map",
    f"{_C10D}:GroupMember": "NON_GROUP_MEMBER",
    # A reloadable group takes the place of torch's group, also in C++.
    f"{_C10D}:_world": "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag tags_to_pg "
    "pg_coalesce_state default_pg",
    _C: "_register_process_group _unregister_process_group _create_work_from_future Backend "
    "ProcessGroup ErrorType",
    "torch.distributed": "Store PrefixStore HashStore",
    # The methods of a group reach the live one.
    f"{_C}:ProcessGroup": "_get_backend _register_backend _set_default_backend _device_types "
    "bound_device_id _set_group_name _set_group_desc _has_hooks _wait_for_pending_works "
    "_get_backend_name _register_on_completion_hook _enable_collectives_timing "
    "_get_sequence_number_for_group _start_coalescing _end_coalescing",
    f"{_C}:_ProcessGroupWrapper": "wrapped_pg",
    # Options and timeouts are read and set.
    f"{_C10D}:ProcessGroupGloo": "_Options _set_default_timeout",
    f"{_C10D}:ProcessGroupGloo._Options": "_timeout _devices",
    f"{_C10D}:ProcessGroupNCCL": "_set_default_timeout",
    # A dump is written at a timeout after a reload.
    f"{_C}:ProcessGroupNCCL": "uid",
    # What other code takes out of a group is known.
    f"{_C}:_SymmetricMemory": "rendezvous",
    # torch.compile leaves out the methods of a reloadable group.
    "torch._C._dynamo.eval_frame": "_FrameAction _FrameExecStrategy set_code_exec_strategy",
}

NEEDS = tuple((owner, name) for owner, names in _NAMES.items() for name in names.split())
"""Each name after its owner: a module, or ``module:attribute.attribute`` of an object in it."""

OPTIONAL = frozenset(
    {
        "_comm_ptr",  # a backend is suspended, and a pointer that is borrowed is known
        "_new_window",  # a window that is borrowed is known
        "_dump_nccl_trace",  # a dump is written at a timeout after a reload
        "_use_torchcomms_enabled",  # TorchComms is recognized
        "_cuda_hasPrimaryContext",  # no context is created on a device
        "_internal",  # a script runs without peers, on a store of torch's tests
        "_dist2",  # a group that is in none of torch's tables is known
        # operators run on the stand-in for CUDA
        *("_dispatch_get_registrations_for_dispatch_key", "_get_schema"),
        "_construct_storage_from_data_pointer",
    }
)
"""Private names that torch may lack: each is used only if torch has it, or by a tool."""

_ABSENT = object()
_OF_BUILDS = ("ProcessGroupNCCL", "ProcessGroupGloo", "_ProcessGroupWrapper")
"""What a build without NCCL, or without gloo, lacks."""


def missing() -> list[str]:
    """Name what the loaded torch lacks or has changed. Local, below a millisecond."""
    return [
        f"{owner.replace(':', '.')}.{name}" for owner, name in NEEDS if not _is_there(owner, name)
    ]


def _is_there(owner: str, name: str) -> bool:
    module, _, attributes = owner.partition(":")
    value: Any = sys.modules.get(module, _ABSENT)
    for attribute in [*filter(None, attributes.split(".")), name]:
        if attribute in _OF_BUILDS and not hasattr(value, attribute):
            return True
        value = getattr(value, attribute, _ABSENT)
    code = getattr(inspect.unwrap(value), "__code__", None)  # a function of C++ has none
    if code is None:
        return value is not _ABSENT
    parameters = FUNCTIONS.get(name, "").split()
    return parameters == [*code.co_varnames[: code.co_argcount]][: len(parameters)]


def refuse_missing() -> None:
    """Refuse a torch that lacks names. Local, below a millisecond.

    Raises:
        UnsupportedTorchError: a name, or a parameter, is missing.
    """
    if names := missing():
        from reloadpg.errors import UnsupportedTorchError

        raise UnsupportedTorchError(
            f"torch {sys.modules['torch'].__version__} lacks, or has changed, names that reloadpg "
            f"uses: {', '.join(names)}. Nothing was changed. Use a version of torch from "
            f"{SEEN[0]} to {SEEN[-1]}, or a reloadpg that was tested with this one.",
        )
