"""Offload: release the communicators of all reloadable groups of a job."""

from __future__ import annotations

import concurrent.futures
import gc
import sys
import time
import warnings
from functools import partial
from typing import Literal, overload

from .. import c10d
from ..c10d import devices, release_cautions
from ..groups.proxy import GroupState, ReloadableProcessGroup
from ..groups.registry import registry
from .failure import await_unfinished, end_early
from .operation import Operation, why_nothing
from .pending import Pending
from .recreate import abort
from .report import Report
from .suspend import suspend

__all__ = ["offload"]


@overload
def offload(*, collect: bool = ..., wait: Literal[True] = True) -> Report: ...
@overload
def offload(*, collect: bool = ..., wait: Literal[False]) -> Pending: ...
@overload
def offload(*, collect: bool = ..., wait: bool) -> Report | Pending: ...
def offload(*, collect: bool = False, wait: bool = True) -> Report | Pending:
    """Release the communicators of all reloadable groups of this job.

    Collective over all ranks of the job; blocking, each wait bounded by the ``timeout`` given to
    ``install``; idempotent (with everything offloaded already it only waits for the other ranks).
    When it returns, the memory is free on all ranks. Waits for this rank's accelerator work; call
    it from one thread, with no collective in flight. The groups stay valid objects: queries
    answer, collectives raise ``GroupOffloadedError`` until :func:`reload`. Gloo groups that
    bypass, and the CPU side of mixed groups, go on working.

    A ``torch.distributed.checkpoint.async_save`` that a thread is still writing over a group that
    would be released is waited for first, within the same bound.

    Before ``init_process_group`` and after ``destroy_process_group`` it does nothing. Where no
    group is reloadable it releases nothing, and warns of that once a process, with the reason.

    If it fails before the first group is touched, everything stays as it was; if it fails later,
    every group of the job is without a communicator and in state ``failed``, on all ranks alike,
    and :func:`reload` rebuilds them all.

    Args:
        collect: also run a full garbage collection, for communicators that are held by cycles
            in the caller's code. It costs tens to hundreds of milliseconds in a large process.
        wait: False returns at once, and the offload goes on in a thread of its own: see
            :class:`Pending`. Meanwhile groups refuse collectives, :func:`reload` and a second
            offload raise, and callbacks are called in that thread.

    Returns:
        What was done on this rank; with ``wait=False`` a handle, whose ``result()`` returns or
        raises what is said here.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: the ranks do not ask for the same; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        ReleaseError: a group could not be released on this rank.
    """
    op = Operation("offload", sys._getframe())
    return _offload(op, collect) if wait else Pending(op, partial(_offload, collect=collect))


def _offload(op: Operation, collect: bool) -> Report:
    try:
        job = op.job
        if job is None:
            return op.report
        await_unfinished(op)
        live = [group for group in reversed(op.groups) if group.is_live]
        proposals, subjects = op.strategy.propose(live)
        op.strategy.decide(live, op.agree(proposals, subjects))
        if live or not op.was_offloaded:  # groups made while offloaded are released by another call
            _await_saves(op, live)
            op.call(registry.callbacks.offload)
            live = [group for group in live if group.is_live]  # a callback may destroy its own
        with op.timed("device"):
            op.do("quiesced", devices.synchronize, "synchronizing the accelerator")
            if job.creation_stores is not None:  # so that the reload need not connect
                connect = partial(job.creation_stores.connect, min(op.creators, len(op.groups)))
                op.do("quiesced", connect, "connecting to the store")
        op.barrier("quiesced")
        # From here on groups are touched: the operation completes, or leaves them all failed.
        recreated = [group for group in live if group.history.strategy == "recreate"]
        kept = [group for group in live if group.history.strategy != "recreate"]
        if any(
            one.startswith("nccl") for g in recreated for one in g.construction.released.values()
        ):
            op.warnings += release_cautions()
        if op.may_suspend and op.each_or_fall_back("suspended", kept, suspend):
            begun = time.perf_counter()
            op.await_aborts("released", abort(kept, GroupState.OFFLOADED))
            op.note_together(kept, begun)
        op.each("released", recreated, op.releases.release)
        if collect:
            with op.timed("collect"):
                gc.collect()
        op.measure("released")
        op.barrier("released")
        suspended = [group for group in kept if group.history.strategy == "suspend"]
        if suspended:
            op.strategy.learn(suspended, *op.memory_change("device", "suspended"))
        op.complete("" if live else "no live reloadable group")
    except BaseException as error:
        end_early(op, error)
        raise
    finally:
        op.close()
    if not op.groups and "nothing to release" not in registry.warned:
        registry.warned.add("nothing to release")
        for text in why_nothing(op.options):
            warnings.warn(f"reloadpg.offload(): {text}", stacklevel=3)
    return op.report


def _await_saves(op: Operation, live: list[ReloadableProcessGroup]) -> None:
    """Wait for asynchronous checkpoints of this rank that use these groups. Bounded.

    They coordinate on the CPU's backend: a group that keeps it does not disturb them.
    """
    released = {id(group) for group in live if "cpu" in group.construction.selected}
    saves = [save for save in c10d.saves_in_flight() if id(save.group()) in released]
    if saves:
        names = ", ".join(save.checkpoint for save in saves)
        doing = f"waiting for an asynchronous checkpoint that is still being saved: {names}"
        futures = [save.future for save in saves]
        with op.timed("checkpoint"):
            op.do("quiesced", partial(concurrent.futures.wait, futures), doing)
