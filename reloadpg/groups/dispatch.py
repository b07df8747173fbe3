"""Dispatch of a group's collectives and controls to its live communicator.

Every method of ``ProcessGroup`` in torch 2.8 to 2.15 is written out below, so that
``grep "def allreduce"`` finds it. Methods that the installed torch lacks are removed at the end.
Each method forwards to ``self._inner``: the live group, or the placeholder that raises.

A collective costs one more Python call than on a plain group (benchmarks/dispatch.py). A call with
``**kwargs`` takes 0.05 us longer, so it is made only if there are any. A method must never return
None to C++, but a synchronous coalesced call of NCCL does since torch 2.8.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from .. import c10d

__all__ = ["COLLECTIVES", "COMPLETED_WORK", "UNKNOWN", "Dispatch", "dispatched"]


class _CompletedWork(Work):
    """A Work that is complete."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return []

    def synchronize(self) -> None:
        return None

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result([])
        return future


COMPLETED_WORK: Work = _CompletedWork()
"""Returned where a synchronous coalesced NCCL call returns None, since torch 2.8."""


class Dispatch(ProcessGroup):
    """A ``ProcessGroup`` whose every method calls the same method of ``self._inner``."""

    _inner: Any

    # -- collectives: they return a Work ------------------------------------------------------

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner._allgather_base
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def _end_coalescing(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner._end_coalescing
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner._reduce_scatter_base
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.all_gather_single
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def all_gather_single_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.all_gather_single_coalesced
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.all_to_all_single
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.allgather
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.allgather_coalesced
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def allgather_into_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.allgather_into_tensor_coalesced
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.allreduce
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.allreduce_coalesced
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def alltoall(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.alltoall
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.alltoall_base
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.broadcast
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.gather
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def gather_into_tensor(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.gather_into_tensor
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def gather_single(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.gather_single
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.recv_anysource
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.reduce
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.reduce_scatter
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.reduce_scatter_single
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def reduce_scatter_single_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.reduce_scatter_single_coalesced
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.reduce_scatter_tensor_coalesced
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner.scatter
        work = call(*args, **kwargs) if kwargs else call(*args)
        return COMPLETED_WORK if work is None else work

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

    # -- controls of the live communicator: they do not return a Work -------------------------

    def _backend_id(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner._backend_id(*args, **kwargs)

    def _get_backend(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner._get_backend(*args, **kwargs)

    def _get_sequence_number_for_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner._get_sequence_number_for_group(*args, **kwargs)

    def _register_backend(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner._register_backend(*args, **kwargs)

    def _set_default_backend(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner._set_default_backend(*args, **kwargs)

    def _set_sequence_number_for_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner._set_sequence_number_for_group(*args, **kwargs)

    def get_backend(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.get_backend(*args, **kwargs)

    def get_reconfigure_handle(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.get_reconfigure_handle(*args, **kwargs)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.merge_remote_group(*args, **kwargs)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.monitored_barrier(*args, **kwargs)

    def new_window(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.new_window(*args, **kwargs)

    def reconfigure(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.reconfigure(*args, **kwargs)

    def register_abort_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.register_abort_hook(*args, **kwargs)

    def register_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.register_post_hook(*args, **kwargs)

    def register_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.register_pre_hook(*args, **kwargs)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.split_group(*args, **kwargs)

    def unregister_abort_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.unregister_abort_hook(*args, **kwargs)

    def unregister_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.unregister_post_hook(*args, **kwargs)

    def unregister_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.unregister_pre_hook(*args, **kwargs)

    def _start_coalescing(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._inner._start_coalescing(*args, **kwargs)
        except Exception:
            c10d.close_coalescing(self)
            raise

    # -- controls that are carried over: ReloadableProcessGroup repeats them after a rebuild ---

    def _enable_collectives_timing(self, *args: Any, **kwargs: Any) -> Any:
        return self._carry("_enable_collectives_timing", args, kwargs)

    def _register_on_completion_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._carry("_register_on_completion_hook", args, kwargs)

    def _carry(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    # -- queries of the live communicator: False without one -----------------------------------

    @property
    def supports_abort_hooks(self) -> bool:
        return getattr(self._inner, "supports_abort_hooks", False)

    @property
    def supports_completion_hooks(self) -> bool:
        return getattr(self._inner, "supports_completion_hooks", False)

    @property
    def supports_reconfigure(self) -> bool:
        return getattr(self._inner, "supports_reconfigure", False)

    @property
    def supports_window(self) -> bool:
        return getattr(self._inner, "supports_window", False)


IDENTITY = frozenset(
    {
        "_add_ephemeral_timeout",
        "_device_types",
        "_get_backend_name",
        "_has_hooks",
        "_set_group_desc",
        "_set_group_name",
        "_wait_for_pending_works",
        "abort",
        "bound_device_id",
        "get_group_store",
        "group_desc",
        "group_name",
        "name",
        "rank",
        "set_timeout",
        "shutdown",
        "size",
        "use_pg_for_symm_mem_rendezvous",
    }
)
"""Names that a reloadable group implements itself, in every state."""

INHERITED = frozenset(
    {
        "BackendType",
        "CUSTOM",
        "GLOO",
        "MPI",
        "NCCL",
        "UCC",
        "UNDEFINED",
        "XCCL",
        "_id",
        "_pybind11_conduit_v1_",
        "boxed",
        "unbox",
    }
)
"""Names for which the C++ base class of a reloadable group returns the right value."""


COLLECTIVES = frozenset(
    name
    for name, method in vars(Dispatch).items()
    if "COMPLETED_WORK" in getattr(getattr(method, "__code__", None), "co_names", ())
)
"""Names of the methods that return a Work."""


def dispatched() -> frozenset[str]:
    """Names of the methods that need a communicator: the placeholder refuses them."""
    methods = frozenset(name for name in vars(Dispatch) if not name.startswith("__"))
    return methods - {"_inner", "_carry"} - {n for n in methods if n.startswith("supports_")}


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


UNKNOWN = frozenset(
    name
    for name in dir(ProcessGroup)
    if not name.startswith("__") and name not in {*vars(Dispatch), *IDENTITY, *INHERITED}
)
"""Methods of a torch newer than this module, which are assumed to need a communicator."""

for _name in UNKNOWN:
    setattr(Dispatch, _name, _forward(_name))
for _name in dispatched() | {n for n in vars(Dispatch) if n.startswith("supports_")}:
    if not hasattr(ProcessGroup, _name):  # hasattr() must give the same result as on a plain group
        delattr(Dispatch, _name)
c10d.skip_in_compiled_code(f for f in vars(Dispatch).values() if hasattr(f, "__code__"))
