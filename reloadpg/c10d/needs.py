"""The private names of torch that this library uses: one table, and its check.

The check runs when this package is imported, so a torch that lacks a name is refused before
anything is patched. A name of :data:`OPTIONAL` is used only where torch has it.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. ``tests/c10d/test_needs.py`` fails for a private name that
the package uses and that is not in the table.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

SEEN = ("2.8.0", "2.13.0", "2.15.0")
"""The versions of torch on which each row was checked."""


class Need(NamedTuple):
    """One name of torch.

    Attributes:
        owner: the module, or ``module:attribute.attribute`` of a class or object in it.
        name: the attribute of the owner.
        why: what does not work without it.
        parameters: the leading parameters of a function that is replaced or called by position.
    """

    owner: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def __str__(self) -> str:
        passed = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.path}{passed} ({self.why})"


_PARAMETERS = {
    "new_group": "ranks timeout backend pg_options use_local_synchronization group_desc",
    "_new_group_with_tag": "ranks",
    "split_group": "parent_pg split_ranks",
    "init_process_group": "backend",
    "_new_process_group_helper": "group_size group_rank global_ranks_in_group backend store "
    "group_name backend_options timeout pg_tag device_id group_desc",
    "_process_group_name": "ranks use_hashed_name",
    "_get_default_timeout": "backend",
    "_check_p2p_op_list": "p2p_op_list",
    "_coalescing_manager": "group device async_ops",
    "_abort_process_group": "group",
}


def _names(why: str, owner: str, names: str) -> list[Need]:
    """Rows for names of one owner, separated by spaces."""
    return [
        Need(owner, name, why, tuple(_PARAMETERS.get(name, "").split())) for name in names.split()
    ]


_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"

_PATCHED = "the functions that create groups are patched, and replayed with their arguments"
_MEMBERS = "only the members of a group take part in its rebuild, under a name of its generation"
_VALUES = "torch's values of backends, members and timeouts are read"
_PLACE = "a reloadable group takes the place of torch's group, also in C++"
_METHODS = "backends are released and rebuilt, and the methods of a group reach the live one"
_OPTIONS = "options and timeouts of a group are read and set"

NEEDS: tuple[Need, ...] = (
    # -- creation of groups, and its replay
    *_names(_PATCHED, _C10D, "new_group _new_group_with_tag split_group init_process_group"),
    *_names(
        _MEMBERS,
        _C10D,
        "_new_process_group_helper _process_group_name _get_split_source _is_barrier_after_init",
    ),
    *_names(_VALUES, _C10D, "_get_default_timeout BackendConfig Backend GroupMember"),
    *_names(_VALUES, f"{_C10D}:BackendConfig", "get_device_backend_map"),
    *_names(_VALUES, f"{_C10D}:Backend", "backend_list backend_type_map"),
    *_names(_VALUES, f"{_C10D}:GroupMember", "NON_GROUP_MEMBER"),
    *_names(
        "a batch of sends and receives on a reloadable group is coalesced",
        _C10D,
        "batch_isend_irecv _check_p2p_op_list _coalescing_manager",
    ),
    # -- the tables in which a reloadable group takes the place of torch's
    *_names(_PLACE, _C10D, "_world"),
    *_names(
        _PLACE,
        f"{_C10D}:_world",
        "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag tags_to_pg pg_coalesce_state "
        "default_pg",
    ),
    *_names(
        _PLACE,
        _C,
        "_register_process_group _unregister_process_group _create_work_from_future Backend "
        "ProcessGroup ErrorType",
    ),
    *_names(
        "ranks agree through the store of the job",
        "torch.distributed",
        "Store PrefixStore HashStore",
    ),
    # -- methods of groups and backends
    *_names(
        _METHODS,
        f"{_C}:ProcessGroup",
        "_get_backend _register_backend _set_default_backend _device_types bound_device_id "
        "_set_group_name _set_group_desc _has_hooks _wait_for_pending_works _get_backend_name "
        "_register_on_completion_hook _enable_collectives_timing _get_sequence_number_for_group "
        "_start_coalescing _end_coalescing",
    ),
    *_names(_METHODS, f"{_C}:_ProcessGroupWrapper", "wrapped_pg"),
    *_names("communicators are aborted after a fault", _C10D, "_abort_process_group"),
    *_names(
        "torch.compile leaves out the methods of a reloadable group",
        "torch._C._dynamo.eval_frame",
        "_FrameAction _FrameExecStrategy set_code_exec_strategy",
    ),
    *_names(_OPTIONS, f"{_C10D}:ProcessGroupGloo", "_Options _set_default_timeout"),
    *_names(_OPTIONS, f"{_C10D}:ProcessGroupGloo._Options", "_timeout _devices"),
    *_names(_OPTIONS, f"{_C10D}:ProcessGroupNCCL", "_set_default_timeout"),
    *_names("a dump is written at a timeout after a reload", f"{_C}:ProcessGroupNCCL", "uid"),
    *_names(
        "what other code takes out of a group is known", f"{_C}:_SymmetricMemory", "rendezvous"
    ),
)

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


def missing() -> list[Need]:
    """Return the rows that the loaded torch does not meet. Local, below a millisecond."""
    return [need for need in NEEDS if not _is_met(need)]


def _is_met(need: Need) -> bool:
    module, _, attributes = need.owner.partition(":")
    value: Any = sys.modules.get(module, _ABSENT)
    for name in [*filter(None, attributes.split(".")), need.name]:
        if name in _OF_BUILDS and not hasattr(value, name):
            return True
        value = getattr(value, name, _ABSENT)
    code = getattr(inspect.unwrap(value), "__code__", None)  # a function of C++ has none
    if code is None:
        return value is not _ABSENT
    positional: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return need.parameters == positional[: len(need.parameters)]


def refuse_missing() -> None:
    """Refuse a torch that lacks names. Local, below a millisecond.

    Raises:
        UnsupportedTorchError: a name, or a parameter, is missing.
    """
    if rows := missing():
        from reloadpg.errors import UnsupportedTorchError

        raise UnsupportedTorchError(
            f"torch {sys.modules['torch'].__version__} lacks, or has changed, names that reloadpg "
            f"uses: {'; '.join(map(str, rows))}. Nothing was changed. Use a version of torch from "
            f"{SEEN[0]} to {SEEN[-1]}, or a reloadpg that was tested with this one.",
        )
