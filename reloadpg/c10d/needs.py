"""The private names of torch that this library uses: one table, and its check.

:func:`refuse_missing` checks the core when this package is imported and again in ``install``, so a
torch that lacks a name is refused before anything is patched. A name that serves one capability is
checked where that capability is requested.

Seen on torch 2.8.0, 2.13.0 and 2.15.0. ``tests/c10d/test_needs.py`` fails for a private name that
the package uses and that is not in the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

SEEN = ("2.8.0", "2.13.0", "2.15.0")
"""The versions of torch on which each row was checked."""

Version = tuple[int, int]


class Need(NamedTuple):
    """One name of torch.

    Attributes:
        owner: the module, or ``module:attribute.attribute`` of a class or object in it.
        name: the attribute of the owner.
        why: what does not work without it.
        capability: ``core``, or what is off without it.
        since, until: the first and the last version seen in which it is used; None for all.
        parameters: a function's leading parameters, which are passed by position.
        named: its parameters that are passed by name.
    """

    owner: str
    name: str
    why: str
    capability: str = "core"
    since: Version | None = None
    until: Version | None = None
    parameters: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def __str__(self) -> str:
        passed = ", ".join((*self.parameters, *self.named))
        return f"{self.path}{f'({passed})' if passed else ''} ({self.why})"

    def applies_to(self, version: Version) -> bool:
        """Whether the name is used in this version of torch."""
        return (self.since or version) <= version <= (self.until or version)


def _names(
    why: str, owner: str, names: str, capability: str = "core", since: Version | None = None
) -> list[Need]:
    """Rows for names of one owner, separated by spaces."""
    return [Need(owner, name, why, capability, since) for name in names.split()]


def _function(
    why: str,
    name: str,
    parameters: str,
    named: str = "",
    since: Version | None = None,
    until: Version | None = None,
) -> Need:
    """The row of a function of ``distributed_c10d`` with the parameters that are passed."""
    passed = tuple(parameters.split()), tuple(named.split())
    return Need(_C10D, name, why, "core", since, until, *passed)


_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"

_PATCHED = "the functions that create groups are patched, and replayed with their arguments"
_MEMBERS = "only the members of a group take part in its rebuild, under a name of its generation"
_VALUES = "torch's values of backends, members and timeouts are read"
_PLACE = "a reloadable group takes the place of torch's group, also in C++"
_METHODS = "backends are released and rebuilt, and the methods of a group reach the live one"
_OPTIONS = "options and timeouts of a group are read and set"
_BATCHES = "a batch of sends and receives on a reloadable group is coalesced"
_SUSPEND = "communicators are suspended"
_DUMPS = "a dump is written at a timeout after a reload"
_BORROWED = "what other code takes out of a group is known"

NEEDS: tuple[Need, ...] = (
    # -- creation of groups, and its replay
    _function(
        _PATCHED,
        "new_group",
        "ranks timeout backend pg_options use_local_synchronization group_desc",
    ),
    _function(_PATCHED, "new_group", "", "sort_ranks", since=(2, 13)),
    _function(_PATCHED, "_new_group_with_tag", "ranks"),
    _function(_PATCHED, "split_group", "parent_pg split_ranks"),
    _function(_PATCHED, "init_process_group", "backend"),
    _function(
        _MEMBERS,
        "_new_process_group_helper",
        "group_size group_rank global_ranks_in_group backend store group_name backend_options "
        "timeout pg_tag device_id group_desc",
    ),
    _function(_MEMBERS, "_process_group_name", "ranks use_hashed_name"),
    *_names(_MEMBERS, _C10D, "_get_split_source _is_barrier_after_init"),
    _function(_VALUES, "_get_default_timeout", "backend"),
    *_names(_VALUES, _C10D, "BackendConfig Backend GroupMember"),
    *_names(_VALUES, f"{_C10D}:BackendConfig", "get_device_backend_map"),
    *_names(_VALUES, f"{_C10D}:Backend", "backend_list backend_type_map"),
    *_names(_VALUES, f"{_C10D}:GroupMember", "NON_GROUP_MEMBER"),
    *_names(_BATCHES, _C10D, "batch_isend_irecv"),
    _function(_BATCHES, "_check_p2p_op_list", "p2p_op_list", until=(2, 13)),
    _function(_BATCHES, "_coalescing_manager", "group device", "async_ops", until=(2, 13)),
    # -- the tables in which a reloadable group takes the place of torch's
    *_names(_PLACE, _C10D, "_world"),
    *_names(
        _PLACE,
        f"{_C10D}:_world",
        "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag tags_to_pg pg_coalesce_state "
        "default_pg",
    ),
    *_names(_PLACE, f"{_C10D}:_world", "pg_flight_recorder_hooks", since=(2, 15)),
    *_names(_PLACE, _C, "_register_process_group _unregister_process_group"),
    *_names(_PLACE, _C, "_create_work_from_future Backend ProcessGroup ErrorType"),
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
    _function("communicators are aborted after a fault", "_abort_process_group", "group"),
    *_names(
        "torch.compile leaves out the methods of a reloadable group",
        "torch._C._dynamo.eval_frame",
        "_FrameAction _FrameExecStrategy set_code_exec_strategy",
    ),
    *_names(_OPTIONS, f"{_C10D}:ProcessGroupGloo", "_Options _set_default_timeout"),
    *_names(_OPTIONS, f"{_C10D}:ProcessGroupGloo._Options", "_timeout _devices"),
    *_names(_OPTIONS, f"{_C10D}:ProcessGroupNCCL", "_set_default_timeout"),
    # -- capabilities
    *_names(_METHODS, _C, "_ProcessGroupWrapper", "debug"),
    *_names(_METHODS, f"{_C}:_ProcessGroupWrapper", "wrapped_pg", "debug"),
    *_names(_SUSPEND, f"{_C10D}:ProcessGroupNCCL", "_comm_ptr", "suspend"),
    *_names(_SUSPEND, f"{_C}:Backend", "suspend resume", "suspend", (2, 13)),
    *_names(_DUMPS, _C, "_dump_nccl_trace", "flight recorder"),
    *_names(_DUMPS, f"{_C}:ProcessGroupNCCL", "uid", "flight recorder"),
    *_names(
        "a script runs without peers",
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        "explain",
    ),
    *_names(
        "operators run on the stand-in for CUDA",
        "torch._C",
        "_dispatch_get_registrations_for_dispatch_key _get_schema "
        "_construct_storage_from_data_pointer DisableTorchFunction DispatchKeySet DispatchKey",
        "stand-ins",
    ),
    *_names("TorchComms is recognized", _C10D, "_use_torchcomms_enabled", "TorchComms", (2, 13)),
    *_names(_BORROWED, _C10D, "_new_window", "borrowed", (2, 15)),
    *_names(_BORROWED, _C, "_SymmetricMemory"),
    *_names(_BORROWED, f"{_C}:_SymmetricMemory", "rendezvous"),
    *_names(_BORROWED, f"{_C}:_SymmetricMemory", "get_backend", "borrowed", (2, 13)),
    *_names("no context is created on a device", "torch._C", "_cuda_hasPrimaryContext", "devices"),
)

MAY_BE_ABSENT = frozenset({"_cuda_hasPrimaryContext", "_dist2"})
"""Names that a build of torch may lack without a fault: without CUDA, in torch 2.13."""


def torch_version() -> Version:
    """Return major and minor version of the loaded torch."""
    major, minor = str(sys.modules["torch"].version.__version__).split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def missing(
    capability: str | None = "core", *, load: bool = False, needs: Iterable[Need] = NEEDS
) -> list[Need]:
    """Return the rows that the loaded torch does not meet; with None, of all capabilities.

    Local, below a millisecond. Modules that are not loaded are left out unless ``load`` imports
    them; so is an engine that this build of torch lacks.
    """
    owners: dict[str, Any] = {}
    return [need for need in _expected(capability, needs) if not _is_met(need, owners, load)]


def _expected(capability: str | None, needs: Iterable[Need]) -> Iterator[Need]:
    version = torch_version()
    for need in needs:
        if capability in (None, need.capability) and need.applies_to(version):
            yield need


_UNKNOWN = object()
_ENGINES = ("ProcessGroupNCCL", "_dump_nccl_trace", "_cuda_hasPrimaryContext")
"""What a build without NCCL or CUDA lacks."""


def _is_met(need: Need, owners: dict[str, Any], load: bool) -> bool:
    if need.owner not in owners:
        owners[need.owner] = _owner(need, load)
    owner = owners[need.owner]
    if owner is _UNKNOWN or (need.name in _ENGINES and not hasattr(owner, need.name)):
        return True
    value = getattr(owner, need.name, _UNKNOWN)
    return value is not _UNKNOWN and _has_parameters(need, value)


def _owner(need: Need, load: bool) -> Any:
    """The owner; None if it is missing, and unknown if it is not loaded or not in this build."""
    module, _, attributes = need.owner.partition(":")
    owner: Any = sys.modules.get(module)
    if owner is None and load:
        try:
            owner = import_module(module)
        except ImportError:
            return None
    if owner is None:
        return None if need.capability == "core" else _UNKNOWN
    for name in attributes.split(".") if attributes else ():
        if name in _ENGINES and not hasattr(owner, name):
            return _UNKNOWN
        owner = getattr(owner, name, None)
    return owner


def _has_parameters(need: Need, function: Any) -> bool:
    """Whether a function of Python has these parameters; one of C++ is not inspected."""
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        function = wrapped
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = known[: min(code.co_argcount, len(need.parameters))]
    return need.parameters == positional and set(need.named) <= set(known)


def describe_needs(rows: Iterable[Need]) -> str:
    """The rows as text, with what does not work without each."""
    return "; ".join(map(str, rows))


def refuse_missing(what: str, capability: str = "core", nothing: str = "changed") -> None:
    """Refuse a torch that lacks names of a capability. Local, below a millisecond.

    Args:
        what: the call, for the message.
        capability: that of the rows.
        nothing: for the message: nothing was ...

    Raises:
        UnsupportedTorchError: a name, or a parameter, is missing.
    """
    if rows := missing(capability):
        from reloadpg.errors import UnsupportedTorchError

        raise UnsupportedTorchError(
            f"{what}: torch {sys.modules['torch'].__version__} lacks, or has changed, names that "
            f"reloadpg uses: {describe_needs(rows)}. Nothing was {nothing}. Use a version of torch "
            f"from {SEEN[0]} to {SEEN[-1]}, or a reloadpg that was tested with this one.",
        )
