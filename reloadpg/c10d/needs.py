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
        name: the attribute of the owner; for a class also one that its instances have.
        why: what does not work without it.
        capability: ``core``, or what is off without it.
        since, until: the first and the last version seen in which it is used; None for all.
        parameters: a function's leading parameters, in order, which are passed by position.
        keywords: parameters of a function that are passed by name.
    """

    owner: str
    name: str
    why: str
    capability: str
    since: Version | None
    until: Version | None
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def applies_to(self, version: Version) -> bool:
        """Whether the name is used in this version of torch."""
        return (self.since or version) <= version <= (self.until or version)


def _names(
    owner: str,
    names: str,
    why: str,
    capability: str = "core",
    since: Version | None = None,
    until: Version | None = None,
) -> list[Need]:
    """Rows for names of one owner, separated by spaces."""
    return [Need(owner, name, why, capability, since, until) for name in names.split()]


def _function(
    name: str,
    why: str,
    *parameters: str,
    keywords: tuple[str, ...] = (),
    since: Version | None = None,
    until: Version | None = None,
) -> Need:
    """The row of a function of ``distributed_c10d`` with the parameters that are passed."""
    return Need(_C10D, name, why, "core", since, until, parameters, keywords)


_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"
_GROUP = f"{_C}:ProcessGroup"

_PATCHED = "the functions that create groups are patched, and replayed with their arguments"
_DEFAULTS = "groups are created with torch's defaults"
_BATCHES = "a batch of sends and receives on a reloadable group is coalesced"

NEEDS: tuple[Need, ...] = (
    # -- creation of groups, and its replay
    _function(
        "new_group",
        _PATCHED,
        *("ranks", "timeout", "backend", "pg_options", "use_local_synchronization", "group_desc"),
    ),
    _function("_new_group_with_tag", _PATCHED, "ranks"),
    _function("split_group", _PATCHED, "parent_pg", "split_ranks"),
    _function("init_process_group", _PATCHED, "backend"),
    _function(
        "new_group", "the order of the ranks is replayed", keywords=("sort_ranks",), since=(2, 13)
    ),
    _function(
        "_new_process_group_helper",
        "a rebuilt group gets its name, store and device",
        *("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
        *("backend_options", "timeout", "pg_tag", "device_id", "group_desc"),
    ),
    _function(
        "_process_group_name",
        "a rebuilt group has a separate name, and torch's counter of names is not changed",
        *("ranks", "use_hashed_name"),
    ),
    *_names(
        _C10D,
        "_get_split_source _is_barrier_after_init",
        "only the members of a group take part in its rebuild",
    ),
    _function("_get_default_timeout", _DEFAULTS, "backend"),
    *_names(
        _C10D,
        "BackendConfig Backend GroupMember",
        "torch's values of backends and members are read",
    ),
    *_names(f"{_C10D}:BackendConfig", "get_device_backend_map", "backends are read by device type"),
    *_names(
        f"{_C10D}:Backend",
        "backend_list backend_type_map",
        "backends of a group are found",
    ),
    *_names(
        f"{_C10D}:GroupMember", "NON_GROUP_MEMBER", "ranks that are not members are recognized"
    ),
    _function("_check_p2p_op_list", _BATCHES, "p2p_op_list", until=(2, 13)),
    _function(
        "_coalescing_manager",
        _BATCHES,
        *("group", "device"),
        keywords=("async_ops",),
        until=(2, 13),
    ),
    *_names(
        _C10D,
        "batch_isend_irecv",
        "batches are inspected for a check of the group's type",
    ),
    # -- the tables in which a reloadable group takes the place of torch's
    *_names(_C10D, "_world", "torch's tables of groups are read and changed"),
    *_names(
        f"{_C10D}:_world",
        "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag tags_to_pg pg_coalesce_state "
        "default_pg",
        "a reloadable group takes the place of torch's group",
    ),
    *_names(
        f"{_C10D}:_world",
        "pg_flight_recorder_hooks",
        "the flight recorder follows a rebuilt group",
        since=(2, 15),
    ),
    *_names(
        _C,
        "_register_process_group _unregister_process_group",
        "C++ finds a reloadable group by its name",
    ),
    *_names(_C, "_create_work_from_future", "a coalesced call returns a completed work"),
    *_names(_C, "Backend ProcessGroup ErrorType", "torch's classes in C++ are recognized"),
    *_names(
        "torch.distributed",
        "Store PrefixStore HashStore",
        "ranks agree through the store of the job",
    ),
    # -- methods of groups and backends
    *_names(
        _GROUP,
        "_get_backend _register_backend _set_default_backend _device_types bound_device_id",
        "the backends of a group are released and rebuilt",
    ),
    *_names(
        _GROUP, "_set_group_name _set_group_desc", "a rebuilt group keeps name and description"
    ),
    *_names(
        _GROUP,
        "_has_hooks _wait_for_pending_works _get_backend_name _register_on_completion_hook "
        "_enable_collectives_timing _get_sequence_number_for_group",
        "the methods of a reloadable group reach the live one",
    ),
    *_names(
        _GROUP,
        "_start_coalescing _end_coalescing",
        "operations are coalesced, and an error in a coalesced block is cleaned up",
    ),
    _function("_abort_process_group", "communicators are aborted after a fault", "group"),
    *_names(
        "torch._C._dynamo.eval_frame",
        "_FrameAction _FrameExecStrategy set_code_exec_strategy",
        "torch.compile leaves out the methods of a reloadable group",
    ),
    *_names(
        _C, "_ProcessGroupWrapper", "backends are read below the wrappers of debug mode", "debug"
    ),
    *_names(
        f"{_C}:_ProcessGroupWrapper",
        "wrapped_pg",
        "backends are read below the wrappers of debug mode",
        "debug",
    ),
    *_names(
        f"{_C10D}:ProcessGroupGloo",
        "_Options _set_default_timeout",
        "options and timeouts of gloo groups are read and set",
    ),
    *_names(
        f"{_C10D}:ProcessGroupGloo._Options",
        "_timeout _devices",
        "timeouts of gloo groups are read",
    ),
    *_names(
        f"{_C10D}:ProcessGroupNCCL",
        "_set_default_timeout",
        "a timeout that was set on a live group still holds after a reload",
    ),
    # -- capabilities
    *_names(
        f"{_C10D}:ProcessGroupNCCL",
        "_comm_ptr",
        "NCCL's suspend and resume are called for a communicator",
        "suspend",
    ),
    *_names(f"{_C}:Backend", "suspend resume", "communicators are suspended", "suspend", (2, 13)),
    *_names(
        "torch.distributed.checkpoint._async_thread_executor:_ThreadBasedAsyncCheckpointExecutor",
        "execute_save",
        "an offload waits for asynchronous saves of checkpoints",
        "saves",
    ),
    *_names(
        _C,
        "_resolve_process_group",
        "tests find names that a test has left behind",
        "tests",
    ),
    *_names(_C, "_dump_nccl_trace", "unfinished collectives are listed", "status"),
    *_names(
        _C,
        "_dump_nccl_trace",
        "a dump is written at a timeout after a reload",
        "flight recorder",
    ),
    *_names(
        f"{_C}:ProcessGroupNCCL",
        "uid",
        "the group that writes torch's dumps is found",
        "flight recorder",
    ),
    *_names(_C, "_dump_fr_trace", "unfinished collectives are listed", "status"),
    *_names(
        "torch.distributed.c10d_logger",
        "_c10d_logger",
        "errors of collectives carry a note on memory",
        "slime",
    ),
    *_names(
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        "a script runs without peers",
        "explain",
    ),
    *_names(
        "torch._C",
        "_dispatch_get_registrations_for_dispatch_key _get_schema "
        "_construct_storage_from_data_pointer DisableTorchFunction DispatchKeySet DispatchKey",
        "operators run on the stand-in for CUDA",
        "stand-ins",
    ),
    # -- TorchComms
    *_names(_C10D, "_use_torchcomms_enabled", "TorchComms is recognized", "TorchComms", (2, 13)),
    # -- what other code takes out of a group
    *_names(_C10D, "_new_window", "the caller of a window is known", "borrowed", (2, 15)),
    *_names(
        "torch.distributed._symmetric_memory",
        "_group_name_to_store rendezvous",
        "groups with symmetric memory are known",
        "borrowed",
    ),
    *_names("torch._C", "_cuda_hasPrimaryContext", "no context is created on a device", "devices"),
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
_ENGINES = ("ProcessGroupNCCL", "_dump_nccl_trace", "_dump_fr_trace", "_cuda_hasPrimaryContext")
"""What a build without NCCL or CUDA lacks."""


def _is_met(need: Need, owners: dict[str, Any], load: bool) -> bool:
    if need.owner not in owners:
        owners[need.owner] = _owner(need, load)
    owner = owners[need.owner]
    if owner is _UNKNOWN or (need.name in _ENGINES and not hasattr(owner, need.name)):
        return True
    if isinstance(owner, type):
        return _class_has(owner, need.name) and _has_signature(need, getattr(owner, need.name, 0))
    value = getattr(owner, need.name, _UNKNOWN)
    return value is not _UNKNOWN and _has_signature(need, value)


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


def _class_has(owner: type, name: str) -> bool:
    """Whether a class has an attribute, or its methods use it on its instances."""
    if hasattr(owner, name):
        return True
    if name in getattr(owner, "__dataclass_fields__", ()):
        return True
    for base in owner.__mro__:
        for member in list(vars(base).values()):
            function = getattr(member, "fget", member)
            if name in getattr(_code_of(function), "co_names", ()):
                return True
    return False


def _code_of(function: Any) -> Any:
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        function = wrapped
    return getattr(function, "__code__", None)


def _has_signature(need: Need, function: Any) -> bool:
    """Whether a function of Python has these parameters; one of C++ is not inspected."""
    code = _code_of(function) if need.parameters or need.keywords else None
    if code is None:
        return True
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[: code.co_argcount]
    takes_any = code.co_flags & 0x08
    return need.parameters == positional[: len(need.parameters)] and bool(
        takes_any or set(need.keywords) <= set(names)
    )


def describe_needs(rows: Iterable[Need]) -> str:
    """The rows as text, with what does not work without each."""
    return "; ".join(f"{need.path}{_shown_parameters(need)} ({need.why})" for need in rows)


def _shown_parameters(need: Need) -> str:
    given = [*need.parameters, *(f"{name}=" for name in need.keywords)]
    return f"({', '.join(given)})" if given else ""


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
            missing=[need.path for need in rows],
        )
