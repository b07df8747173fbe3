"""Dispatch of a group's collectives and controls to its live communicator.

Every name of ``ProcessGroup`` in torch 2.8 to 2.15 is listed below. The methods are built from two
templates. Each forwards to ``self._inner``: the live group, or the placeholder that raises.

A collective costs one more Python call than on a plain group (benchmarks/dispatch.py). A call with
``**kwargs`` takes 0.05 us longer, so it is made only if there are any. A method must never return
None to C++, but a synchronous coalesced call of NCCL does since torch 2.8.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.distributed import ProcessGroup

from ..c10d import backends, compiling, tables

COMPLETED_WORK = backends.completed_work()
"""Returned where a synchronous coalesced NCCL call returns None, since torch 2.8."""

_KINDS = {
    # collectives whose parameters are not listed below
    "forwarded": """
        _allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced
        all_to_all_single allgather allgather_coalesced allgather_into_tensor_coalesced allreduce
        allreduce_coalesced alltoall alltoall_base broadcast gather gather_into_tensor gather_single
        recv_anysource reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
        reduce_scatter_tensor_coalesced scatter
    """,
    # of the live communicator; they do not return a Work
    "controls": """
        _backend_id _get_backend _get_sequence_number_for_group _register_backend
        _set_default_backend _set_sequence_number_for_group get_backend get_reconfigure_handle
        merge_remote_group monitored_barrier new_window reconfigure register_abort_hook
        split_group
    """,
    # the opposite of controls; they need no communicator
    "removals": "unregister_abort_hook unregister_post_hook unregister_pre_hook",
    # controls that are repeated after a rebuild
    "carried": """
        _enable_collectives_timing _register_on_completion_hook register_post_hook register_pre_hook
    """,
    # properties of the live communicator; False without one
    "queries": """
        supports_abort_hooks supports_completion_hooks supports_reconfigure supports_window
    """,
    # implemented by a reloadable group itself, in every state
    "identity": """
        _add_ephemeral_timeout _device_types _get_backend_name _has_hooks _set_group_desc
        _set_group_name _wait_for_pending_works abort bound_device_id get_group_store group_desc
        group_name name rank set_timeout shutdown size use_pg_for_symm_mem_rendezvous
    """,
    # the C++ base class of a reloadable group returns the right value
    "inherited": """
        BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL _id _pybind11_conduit_v1_ boxed unbox
    """,
}
_OF = {kind: frozenset(names.split()) for kind, names in _KINDS.items()}
INHERITED = _OF["inherited"]

COLLECTIVES = _OF["forwarded"] | {"_end_coalescing", "barrier", "recv", "send"}
"""Names of the methods that return a Work."""

_NAMES = frozenset(name for name in dir(ProcessGroup) if not name.startswith("__"))

UNKNOWN = _NAMES - {"_start_coalescing"} - COLLECTIVES.union(*_OF.values())
"""Methods of a torch newer than this module, which are assumed to need a communicator."""

REMOVALS = _NAMES & _OF["removals"]
"""Names of the methods that do nothing without a communicator."""

DISPATCHED = _NAMES - INHERITED - _OF["identity"] - _OF["queries"] - REMOVALS
"""Names of the methods that need a communicator: the placeholder refuses them."""


class Dispatch(ProcessGroup):
    """A ``ProcessGroup`` whose every method calls the same method of ``self._inner``."""

    _inner: Any
    _managed: Any
    """The record of the group."""
    _get_sequence_number_for_group: Callable[[], int]

    _coalescing: Any = None
    """The group on which a coalescing was started, until it is ended."""

    # The shortest methods list their parameters, which saves 5% of their time.

    def send(self, tensors: Any, dstRank: int, tag: int) -> Any:  # noqa: N803 - torch's names
        work = self._inner.send(tensors, dstRank, tag)
        return COMPLETED_WORK if work is None else work

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Any:  # noqa: N803
        work = self._inner.recv(tensors, srcRank, tag)
        return COMPLETED_WORK if work is None else work

    def barrier(self, *args: Any, opts: Any = None, **kwargs: Any) -> Any:
        if opts is not None:  # dist.barrier passes a keyword, which is slower in pybind
            args = (*args, opts)
        work = self._inner.barrier(*args, **kwargs)
        return COMPLETED_WORK if work is None else work

    def _start_coalescing(self, *args: Any, **kwargs: Any) -> None:
        inner = self._inner
        try:
            inner._start_coalescing(*args, **kwargs)
        except Exception:
            tables.close_coalescing(self)
            raise
        self._coalescing = inner

    def _end_coalescing(self, *args: Any, **kwargs: Any) -> Any:
        """End it on the group on which it was started.

        Torch 2.15 aborts all groups within a coalescing of the default group, which has no
        communicator any more when the coalescing ends.
        """
        inner, self._coalescing = self._coalescing, None
        work = (self._inner if inner is None else inner)._end_coalescing(*args, **kwargs)
        return COMPLETED_WORK if work is None else work


def _collective(self: Any, *args: Any, **kwargs: Any) -> Any:
    call = self._inner.METHOD
    work = call(*args, **kwargs) if kwargs else call(*args)
    return COMPLETED_WORK if work is None else work


def _control(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._inner.METHOD(*args, **kwargs)


def _carried(self: Any, *args: Any, **kwargs: Any) -> Any:
    result = self._inner.METHOD(*args, **kwargs)
    self._managed.carried.add_call("METHOD", args, kwargs)
    return result


def _removal(self: Any, *args: Any, **kwargs: Any) -> Any:
    result = self._inner.METHOD(*args, **kwargs)
    self._managed.carried.forget_hook("METHOD", *args, **kwargs)
    return result


def _query(self: Any) -> bool:
    return getattr(self._inner, "METHOD", False)


def from_template(template: Any, name: str, names_of: dict[str, Any]) -> FunctionType:
    """Return the template with ``METHOD`` replaced: as fast as a method that is written out.

    ``names_of`` are the globals of the template's module.
    """

    def replaced(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(name if value == "METHOD" else value for value in values)

    code = template.__code__
    names, constants = replaced(code.co_names), replaced(code.co_consts)
    code = code.replace(co_name=name, co_names=names, co_consts=constants)
    return FunctionType(code, names_of, name)


for _template, _names in (
    (_collective, _OF["forwarded"]),
    (_control, _OF["controls"] | UNKNOWN),
    (_carried, _OF["carried"]),
    (_removal, _OF["removals"]),
    (_query, _OF["queries"]),
):
    # hasattr() must give the same result as on a plain group of the installed torch
    for _name in _NAMES & _names:
        _member = from_template(_template, _name, globals())
        setattr(Dispatch, _name, property(_member) if _template is _query else _member)
compiling.skip_methods_in_compiled_code(Dispatch)
