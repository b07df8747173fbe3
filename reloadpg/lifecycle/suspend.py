"""Suspending and resuming of communicators: they are kept, and the backend releases memory.

Collective over a communicator's members, without a timeout in the backend; an abort of the
communicator ends the call. A suspend does not release NVLS and NET buffers, the accelerator's
context, and the communicators that ``ProcessGroupNCCL`` creates for pairs that send outside of a
batch, which torch neither suspends nor counts. A communicator that was never used has nothing to
suspend; it only refuses collectives until the reload ("skip").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from ..c10d import backends as c10d_backends
from ..c10d import devices, nccl
from ..errors import InsufficientMemoryError
from ..groups.creation import Construction
from ..groups.managed import ManagedGroup
from ..rendezvous.worker_thread import Attempt
from ..texts import counted
from . import memory


def released_backends(inner: ProcessGroup, construction: Construction) -> list[Any]:
    """List the backend objects of a group that are released, each once."""
    backends = c10d_backends.live_backends(inner, construction.selected)
    return list({id(backend): backend for backend in backends.values()}.values())


def suspend(group: ManagedGroup, attempt: Attempt, index: int) -> None:
    """Suspend a live group. Blocking, collective over its members; an operation's action."""
    with attempt as wanted:
        if not wanted:
            return
        inner = group.suspend()
    if group.history.strategy == "suspend":
        with devices.current(devices.index_for(group.proxy)):
            for backend in released_backends(inner, group.construction):
                nccl.suspend_backend(backend)


def resume(group: ManagedGroup, attempt: Attempt, index: int) -> None:
    """Resume a suspended group. Blocking, collective over its members; an operation's action."""
    if attempt.abandoned:
        return
    if group.history.strategy == "suspend":
        with devices.current(devices.index_for(group.proxy)):
            for backend in released_backends(group.communicator, group.construction):
                nccl.resume_backend(backend)
    with attempt as wanted:
        if wanted:
            group.resume()


def check_room(groups: Sequence[ManagedGroup], rank: int) -> None:
    """Refuse a resume without the memory for it, which would leave its peers hanging."""
    suspended = [group for group in groups if group.history.strategy == "suspend"]
    needed = sum(group.history.suspended_bytes for group in suspended)
    known = memory.free_bytes()
    if known is None or known[0] >= needed:
        return
    free, source = known
    raise InsufficientMemoryError(
        f"reload: rank {rank} has {free / 2**20:.0f} MiB free ({source}) and needs "
        f"{needed / 2**20:.0f} MiB to resume {counted(len(suspended), 'suspended group')}. No "
        "communicator was resumed on any rank; they stay offloaded. Free memory there, then call "
        "reload() again on all ranks."
    )
