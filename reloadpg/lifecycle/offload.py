"""Offload: release the communicators of all reloadable groups of a job."""

from __future__ import annotations

from operator import itemgetter
from typing import Literal, overload

from ..c10d import backends as c10d_backends
from ..c10d import devices, memory, nccl
from ..groups.borrowed import forget
from ..groups.managed import ManagedGroup
from ..groups.sets import named_sets
from ..reports import Report
from ..settings import as_flag
from .callbacks import Callback, callbacks, for_groups, for_sets
from .destroy import Releases
from .job import Job
from .kinds import OFFLOAD
from .operation import Operation
from .pending import Pending, run
from .suspend import (
    choose,
    obstacle_of,
    refuse_borrowed,
    released_backends,
    suspend,
    suspending,
    verify,
)


@overload
def offload(*sets: str, wait: Literal[True] = True) -> Report: ...
@overload
def offload(*sets: str, wait: Literal[False]) -> Pending: ...
@overload
def offload(*sets: str, wait: bool) -> Report | Pending: ...
def offload(*sets: str, wait: bool = True) -> Report | Pending:
    """Release the communicators of all reloadable groups of this job, or of some sets.

    Collective over all ranks of the job; blocking, with the ``timeout`` of ``install`` for each
    wait; idempotent (if everything is offloaded, it only waits for the other ranks). When it
    returns, the memory is free on all ranks. Waits for this rank's accelerator work. Call it from
    one thread, without a collective in flight. The groups stay valid objects: queries work, and
    collectives raise ``GroupOffloadedError`` until :func:`reload`. Gloo groups that bypass, and the
    CPU backend of mixed groups, keep working.

    Before ``init_process_group`` and after ``destroy_process_group`` it does nothing. If no group
    is reloadable, it releases nothing and warns once per process, with the reason.

    If it fails before the first group is changed, nothing was changed. If it fails later, every
    group of these sets is in the state ``failed``, without a communicator, on all ranks, and
    :func:`reload` rebuilds them. Groups of other sets are unchanged in either case.

    Args:
        sets: the sets to offload, such as ``"engine"``; none for all. Every rank of the job makes
            the same call, even if it is in no group of the set.
        wait: if False, return immediately and offload in a separate thread: see :class:`Pending`.
            While it runs, groups refuse collectives, :func:`reload` and a second offload raise, and
            callbacks are called in that thread.

    Returns:
        The report of this rank; with ``wait=False`` a handle, whose ``result()`` returns the report
        or raises the errors below.

    Raises:
        NotInstalledError: ``install`` was not called.
        InvalidOptionError: a set is not a name, or no rank has a group of it and a set has a
            similar name; nothing was changed.
        DisagreementError: the calls of the ranks differ; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        BorrowedError: other code holds a pointer that the offload would invalidate; nothing was
            changed: see ``install(borrowed=...)``.
        ReleaseError: a group could not be released on this rank.
        torch.distributed.DistBackendError: a collective was aborted on this rank, so its results
            are wrong; nothing was changed. Call :func:`recover`.
    """
    wait = as_flag(wait, "offload(wait)", "nothing was changed")
    op = Operation(OFFLOAD, named_sets(sets, "offload"))
    return run(op, release, wait=wait)


_UNCHANGED = (
    ". No group was changed on any rank. Remove the cause, then call offload() again on all ranks; "
    "or call reload() on all ranks, which calls the callbacks of on_reload()."
)
"""The state and the remedy after a callback has failed."""


def release(op: Operation, job: Job) -> None:
    """The steps of an offload; see :func:`offload`."""
    op.enter()
    op.await_unfinished()
    live = [group for group in reversed(op.groups) if group.is_live]
    # All that can fail comes before the first barrier: the callbacks, what other code holds of the
    # groups, the device's work. When the last rank has arrived, every rank may change its groups.
    may_suspend = op.options.strategy == "suspend"
    obstacle = obstacle_of(live, job) if may_suspend else ""
    due = for_sets(callbacks.offload, op.scope.sets)
    live = _prepare(op, live, due, ends=not may_suspend)
    _quiesce(op)
    said = f"rank {job.rendezvous.rank}: {obstacle}" if obstacle else ""
    obstacle = op.agree(said, itemgetter(0))  # of the lowest rank that has one
    suspends = may_suspend and not obstacle
    if may_suspend:
        if not suspends:  # only now is it known that generations end
            live = _prepare(op, live, [], ends=True)
            _quiesce(op)
        op.barrier("quiesced")
    op.record.warn(*choose(live, suspends=suspends, obstacle=obstacle))
    # From here on, groups change: the operation completes, or sets them all to failed.
    recreated = [] if suspends else live
    suspended = [group for group in live if group.history.strategy == "suspend"]
    if may_suspend:
        held = memory.in_use()
        with suspending(job, op.record, "offload failed in its phase 'suspended'"):
            op.over(live if suspends else [], suspend)
            op.barrier("suspended")
        op.record.warn(*verify(suspended, job, held, memory.in_use()))
    releases = Releases(job)
    c10d_backends.await_monitors(*(group.communicator for group in recreated))
    op.over(recreated, releases.destroy)
    op.barrier("released")
    op.record.warn(*releases.held())
    op.record.note("" if live else "no live reloadable group")


def _prepare(
    op: Operation, live: list[ManagedGroup], due: list[Callback], *, ends: bool
) -> list[ManagedGroup]:
    """Call callbacks, those of the groups too if they ``end``; return the groups still live.

    Raises:
        BorrowedError: other code holds what would end.
    """
    if ends:
        refuse_borrowed(live, op.options.borrowed)
        due = [*due, *for_groups(callbacks.offload, live)]
    if due:
        op.scope.owe(op.groups)  # until the offload is complete
    op.call(due, _UNCHANGED)
    for group in live if ends else ():
        for package in callbacks.packages_of(group.proxy):  # it has dropped what it has taken
            forget(group, package)
    return [group for group in live if group.is_live]  # a callback may destroy groups


def _quiesce(op: Operation) -> None:
    """Wait for work that uses the groups on this rank; with a timeout.

    No collective is in flight, so this is where the devices of communicators can be read.
    """

    def synchronize() -> None:
        live = [group for group in op.groups if group.is_live]
        devices.record({group.proxy: _devices_of(group) for group in live})
        devices.synchronize()

    op.do("device", synchronize, "synchronizing the accelerator")
    c10d_backends.raise_for_aborted()  # the release of the communicators would hide it


def _devices_of(group: ManagedGroup) -> tuple[int, ...]:
    backends = released_backends(group.communicator, group.construction)
    return tuple({index for backend in backends for index in nccl.devices_of(backend)})
