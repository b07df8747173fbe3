"""What the installed torch's ``ProcessGroup`` offers, sorted by what a stand-in must do with it.

The sets are the union over torch 2.8.0, 2.13.0 and 2.15.0; a test fails when the installed torch
has a name that is in none of them.
"""

from __future__ import annotations

from datetime import timedelta

from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

COLLECTIVES = frozenset(
    {
        "_allgather_base",
        "_end_coalescing",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_single_coalesced",
        "all_to_all_single",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "gather_into_tensor",
        "gather_single",
        "recv",
        "recv_anysource",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    }
)
"""Methods that return a Work. They need a communicator and must never return None to C++."""

CONTROLS = frozenset(
    {
        "_add_ephemeral_timeout",
        "_backend_id",
        "_get_backend",
        "_get_sequence_number_for_group",
        "_register_backend",
        "_set_default_backend",
        "_set_sequence_number_for_group",
        "_start_coalescing",
        "get_backend",
        "get_reconfigure_handle",
        "merge_remote_group",
        "monitored_barrier",
        "new_window",
        "reconfigure",
        "register_abort_hook",
        "register_post_hook",
        "register_pre_hook",
        "set_timeout",
        "split_group",
        "unregister_abort_hook",
        "unregister_post_hook",
        "unregister_pre_hook",
    }
)
"""Methods of one generation's communicator that return anything but a Work."""

CARRIED = frozenset({"_enable_collectives_timing", "_register_on_completion_hook"})
"""Methods that set something on the communicator for good: repeated on the next generation."""

QUERIES = frozenset(
    {
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
        "shutdown",
        "size",
        "supports_abort_hooks",
        "supports_completion_hooks",
        "supports_reconfigure",
        "supports_window",
        "use_pg_for_symm_mem_rendezvous",
    }
)
"""What a proxy answers itself, in every state (identity, description, end of life)."""

LOCALS = frozenset(
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
"""What the C++ part of the proxy itself answers rightly, with no Python in between."""


class _CompletedWork(Work):
    """A Work that has nothing left to do."""

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
"""Stands for the Work that a synchronous coalesced NCCL call does not return since torch 2.8."""


def names() -> frozenset[str]:
    """Names that the installed ``ProcessGroup`` offers, dunders left out."""
    return frozenset(name for name in dir(ProcessGroup) if not name.startswith("__"))


def unclassified() -> frozenset[str]:
    """Names of the installed ``ProcessGroup`` that this module does not know yet."""
    return names() - COLLECTIVES - CONTROLS - CARRIED - QUERIES - LOCALS
