"""The strategy "suspend": communicators are kept, and the backend releases memory.

Suspending is collective over a communicator's members, without a timeout in the backend; an abort
of the communicator ends the call. A suspend does not release NVLS and NET buffers, the
accelerator's context, and the communicators that ``ProcessGroupNCCL`` creates for pairs that send
outside of a batch, which torch neither suspends nor counts. A communicator that was never used has
nothing to suspend; it only refuses collectives until the reload ("skip").

Each rank looks for an obstacle before the ranks agree on the operation. One obstacle on any rank,
for any group, and all ranks recreate all groups of that operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup

from ..c10d import backends as c10d_backends
from ..c10d import devices, memory, nccl
from ..c10d.backends import CppBackend
from ..errors import BorrowedError, InsufficientMemoryError
from ..groups.borrowed import borrowed, is_of
from ..groups.creation import Construction
from ..groups.managed import ManagedGroup
from ..texts import counted, mebibytes
from ..threads import CancelToken
from .callbacks import callbacks
from .job import Job
from .report import Record

_LEAST_SHARE = 0.25
"""Share of the reported bytes that a suspend must give back; other processes may allocate too."""

_UNUSED = "its communicator was never used: nothing to suspend"


def released_backends(inner: ProcessGroup, construction: Construction) -> list[Any]:
    """List the backend objects of a group that are released, each once."""
    backends = c10d_backends.live_backends(inner, construction.selected)
    return list({id(backend): backend for backend in backends.values()}.values())


@contextmanager
def suspending(job: Job, record: Record, doing: str) -> Iterator[None]:
    """A block in which groups are suspended or resumed; if it fails, the job suspends no more.

    Args:
        job: the job.
        record: of the operation, for a warning.
        doing: the operation and its phase, for messages.
    """
    try:
        yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        job.stop_suspending(f"an earlier {doing}: {reason}")
        record.warn("from now on, the job recreates its groups and suspends none")
        raise


def suspend(group: ManagedGroup, wanted: CancelToken, _: int) -> None:
    """Suspend a live group. Blocking, collective over its members."""
    with wanted as is_wanted:
        if not is_wanted:
            return
        inner = group.suspend()
    _each_backend(group, inner, wanted, nccl.suspend_backend)


def resume(group: ManagedGroup, wanted: CancelToken, _: int) -> None:
    """Resume a suspended group. Blocking, collective over its members."""
    with wanted as is_wanted:
        if not is_wanted:
            return
        inner = group.communicator
    _each_backend(group, inner, wanted, nccl.resume_backend)
    with wanted as is_wanted:
        if is_wanted:
            group.resume()


def _each_backend(
    group: ManagedGroup,
    inner: ProcessGroup,
    wanted: CancelToken,
    act: Callable[[CppBackend], object],
) -> None:
    """Suspend or resume the communicators of a group, unless the operation has failed.

    An abort ends such a call while it waits for a peer, and waits for it while it moves memory.
    """
    if group.history.strategy != "suspend":
        return
    with devices.current(devices.index_for(group.proxy)):
        for backend in released_backends(inner, group.construction):
            with wanted as is_wanted:
                if not is_wanted:  # it may be aborted already
                    return
                call = nccl.Call(inner, backend)
            with call:
                act(backend)


def check_room(groups: Sequence[ManagedGroup], rank: int) -> None:
    """Refuse a resume without the memory for it, which would leave its peers hanging."""
    devices.empty_cache()
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


def obstacle_of(groups: Sequence[ManagedGroup], job: Job) -> str:
    """Why this rank cannot suspend these live groups; empty if it can. Local."""
    if groups and job.suspend_obstacle:
        return job.suspend_obstacle
    for group in groups:
        backends = released_backends(group.communicator, group.construction)
        obstacles = [nccl.suspend_obstacle(backend) for backend in backends]
        for text in obstacles or ["it has no backend object"]:
            if text:
                return f"{group!r}: {text}"
    return ""


def choose(groups: Sequence[ManagedGroup], *, suspends: bool, obstacle: str = "") -> list[str]:
    """Record the strategy of each live group, and what its communicator holds. Local.

    A communicator that was never used is left as it is: there is nothing to suspend.

    Args:
        groups: the groups.
        suspends: whether all ranks suspend.
        obstacle: why they do not, if they were to.

    Returns:
        A warning if groups are recreated and not suspended.
    """
    for group in groups:
        history, stats = group.history, group.memory_stats()
        history.held_bytes = None if stats is None else stats.get("total", 0)
        history.suspended_bytes = stats.get("suspend", 0) if stats else 0
        history.strategy, history.reason = "recreate", obstacle
        if suspends:
            history.strategy, history.reason = ("skip", _UNUSED) if stats == {} else ("suspend", "")
    if not obstacle or not groups:
        return []
    verb = "is" if len(groups) == 1 else "are"
    return [f"{counted(len(groups), 'group')} {verb} recreated, not suspended: {obstacle}"]


def refuse_borrowed(groups: Sequence[ManagedGroup], policy: str) -> None:
    """Refuse to release communicators whose pointers other code holds. Local.

    What a package has taken counts no longer once a callback of the group drops it.

    Raises:
        BorrowedError: with ``install(borrowed="refuse")``; it names the holders.
    """
    if policy != "refuse":
        return
    held = []
    for group in groups:
        dropped = callbacks.packages_of(group.proxy)
        for loan in borrowed([group]):
            if loan.raw and not loan.ended and not any(is_of(loan, name) for name in dropped):
                held.append(str(loan))
    if held:
        raise BorrowedError(
            f"offload: {'; '.join(held)}. The offload would release the communicator, and a later "
            "use of it is a use after free. Nothing was changed on any rank. Let the holder drop "
            "it and take it again, with reloadpg.on_offload(..., group=..., package=...) and "
            "on_reload(); or accept the danger with install(borrowed='warn')."
        )


def verify(
    groups: Sequence[ManagedGroup], job: Job, before: Mapping[str, int], after: Mapping[str, int]
) -> list[str]:
    """Warn if suspended groups gave back less than their communicators reported. Local.

    The job recreates its groups from the next offload on.

    Args:
        groups: the groups that were suspended.
        job: the job.
        before, after: bytes in use, by source.
    """
    expected = sum(group.history.suspended_bytes for group in groups)
    source = next((name for name in before if name != "rss" and name in after), "")
    if not groups or (expected and not source):
        return []
    freed = before[source] - after[source] if source else 0
    if expected and freed >= expected * _LEAST_SHARE:
        return []
    if not expected and any(group.history.held_bytes is None for group in groups):
        return []  # the backend reports no bytes
    job.stop_suspending(f"an earlier suspend gave back {mebibytes(freed)} of {mebibytes(expected)}")
    why = "NCCL without cuMem (NCCL_CUMEM_ENABLE=0, or a driver without virtual memory) keeps it"
    return [
        f"the suspend of {counted(len(groups), 'group')} gave back {mebibytes(freed)} of the "
        f"{mebibytes(expected)} that NCCL had reported: {why}. All ranks recreate their groups "
        "from the next offload on"
    ]
