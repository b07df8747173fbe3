"""The strategy "suspend": communicators are kept, and the backend releases memory.

Suspending is collective over a communicator's members, without a timeout in the backend; an abort
of the communicator ends the call. A suspend does not release NVLS and NET buffers and the
accelerator's context. Torch neither suspends nor counts the communicators that ``ProcessGroupNCCL``
creates for pairs of ranks outside of a batch. An unused communicator has nothing to suspend; it
only refuses collectives until the reload ("skip").

Each rank looks for an obstacle before the ranks agree on the operation. One obstacle on any rank,
for any group, and all ranks recreate all groups of that operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter

from torch.distributed import ProcessGroup

from ..c10d import devices, memory, nccl
from ..c10d.backends import CppBackend
from ..errors import InsufficientMemoryError
from ..groups.managed import ManagedGroup
from ..texts import counted, mebibytes
from ..threads import CancelToken
from . import recreate
from .callbacks import callbacks, for_sets
from .connect import Connect
from .destroy import released_backends
from .job import Job
from .operation import Operation

_LEAST_SHARE = 0.25
"""Share of the reported bytes that a suspend must give back; other processes may allocate too."""

_UNUSED = "its communicator was never used: nothing to suspend"


def release(op: Operation) -> None:
    """The steps of an offload after its entry; see :func:`.offload.offload`."""
    live = recreate.live_groups(op)
    obstacle = _obstacle_of(live, op.job)
    recreate.call_callbacks(op, for_sets(callbacks.offload, op.scope.sets))
    recreate.quiesce(op)
    said = f"rank {op.job.rendezvous.rank}: {obstacle}" if obstacle else ""
    obstacle = op.agree(said, itemgetter(0))  # of the lowest rank that has one
    live = [group for group in live if group.is_live]  # a callback may destroy groups
    if obstacle:
        _release_instead(op, live, obstacle)
        return
    op.barrier("quiesced")
    for group in live:
        _record(group)
    # From here on, groups change: the operation completes, or sets them all to failed.
    held = memory.in_use()
    with _suspending(op, "suspended"):
        op.workers.over(live, _suspend)
        op.barrier("suspended")
    suspended = [group for group in live if group.history.strategy == "suspend"]
    op.record.warn(*_verify(suspended, op.job, held, memory.in_use()))
    op.barrier("released")


def _release_instead(op: Operation, live: list[ManagedGroup], obstacle: str) -> None:
    """Recreate groups of which one cannot be suspended on some rank, at the same barriers."""
    live = recreate.let_go_of(op, live, [])  # only now is it known that generations end
    recreate.quiesce(op)
    op.barrier("quiesced")
    op.barrier("suspended")
    if live:
        verb = "is" if len(live) == 1 else "are"
        groups = counted(len(live), "group")
        op.record.warn(f"{groups} {verb} recreated, not suspended: {obstacle}")
    recreate.destroy(op, live, obstacle)


def restore(op: Operation, how: Connect) -> None:
    """The steps of a reload after the ranks have agreed on it; see :func:`.reload.reload`.

    Groups that an offload has recreated, and failed groups, are rebuilt after the others.
    """
    suspended = [g for g in op.scope.groups if not g.is_live and g.communicator is not None]
    rank = op.job.rendezvous.rank
    op.workers.do("device", lambda: _check_room(suspended, rank), "checking free memory")
    op.barrier("room")
    with _suspending(op, "resumed"):
        op.workers.over(suspended, _resume)
        op.barrier("resumed")
    recreate.restore(op, how)


@contextmanager
def _suspending(op: Operation, phase: str) -> Iterator[None]:
    """A block in which groups are suspended or resumed; if it fails, the job suspends no more."""
    try:
        yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        op.job.stop_suspending(f"an earlier {op.name} failed in its phase {phase!r}: {reason}")
        op.record.warn("from now on, the job recreates its groups and suspends none")
        raise


def _record(group: ManagedGroup) -> None:
    """Record how a live group is released. One that was never used is left as it is. Local."""
    stats = group.memory_stats()
    if stats == {}:
        group.history.record("skip", stats, _UNUSED)
    else:
        group.history.record("suspend", stats)


# -- one group ------------------------------------------------------------------------------------


def _suspend(group: ManagedGroup, wanted: CancelToken, _: int) -> None:
    """Suspend a live group. Blocking, collective over its members."""
    with wanted as is_wanted:
        if not is_wanted:
            return
        inner = group.suspend()
    _each_backend(group, inner, wanted, nccl.suspend_backend)


def _resume(group: ManagedGroup, wanted: CancelToken, _: int) -> None:
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


# -- what each rank looks at -----------------------------------------------------------------------


def _check_room(groups: Sequence[ManagedGroup], rank: int) -> None:
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


def _obstacle_of(groups: Sequence[ManagedGroup], job: Job) -> str:
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


def _verify(
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
