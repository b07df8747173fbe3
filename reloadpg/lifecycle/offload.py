"""Offload: release the communicators of all reloadable groups of a job."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, overload

from ..groups.sets import named_sets
from ..reports import Report
from ..settings import as_flag, seconds_or_none
from . import recreate, suspend
from .kinds import OFFLOAD
from .operation import Operation
from .pending import Call, Pending


@overload
def offload(
    *sets: str, timeout: timedelta | float | None = ..., wait: Literal[True] = True
) -> Report: ...
@overload
def offload(
    *sets: str, timeout: timedelta | float | None = ..., wait: Literal[False]
) -> Pending: ...
@overload
def offload(
    *sets: str, timeout: timedelta | float | None = ..., wait: bool
) -> Report | Pending: ...
def offload(
    *sets: str, timeout: timedelta | float | None = None, wait: bool = True
) -> Report | Pending:
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
        timeout: how long to wait for ranks that have not made the call, without progress on any
            rank. A number is in seconds. None means the timeout of ``install``, which all other
            waits have.
        wait: if False, return immediately and offload in a separate thread: see :class:`Pending`.
            While it runs, groups refuse collectives, :func:`reload` and a second offload raise, and
            callbacks are called in that thread.

    Returns:
        The report of this rank; with ``wait=False`` a handle, whose ``result()`` returns the report
        or raises the errors below.

    Raises:
        NotInstalledError: ``install`` was not called.
        InvalidOptionError: ``install`` declares no such set, or ``timeout`` cannot be used; nothing
            was changed.
        DisagreementError: the calls of the ranks differ; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        BorrowedError: other code holds a pointer that the offload would invalidate; nothing was
            changed: see ``install(borrowed=...)``.
        ReleaseError: a group could not be released on this rank.
        torch.distributed.DistBackendError: a collective was aborted on this rank, so its results
            are wrong; nothing was changed. Call ``recover()``.
    """
    wait = as_flag(wait, "offload(wait)", "nothing was changed")
    seconds = seconds_or_none(timeout, "offload(timeout)")
    call = Call(OFFLOAD, release, named_sets(sets, "offload"), seconds, wait=wait)
    return call.run().result() if wait else call.run()


def release(op: Operation) -> None:
    """The steps of an offload; see :func:`offload`."""
    op.enter()
    op.workers.await_unfinished()
    strategy = suspend if op.scope.strategy == "suspend" else recreate
    strategy.release(op)
    op.record.note("" if op.record.groups else "no live reloadable group")
