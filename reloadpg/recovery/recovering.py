"""Recover: recreate all communicators of a job after a fault, behind the same objects.

After a fault the ranks are out of step: a collective raised, timed out or was skipped, or an
operation ended on some ranks only. So nothing here assumes that the ranks have ended the same
operations, or have groups in the same states. The store assigns a number to the recovery, and the
ranks count their operations from there.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ..c10d import backends, tables
from ..errors import PeerFailedError, RendezvousTimeoutError
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState
from ..groups.registry import registry
from ..lifecycle.callbacks import callbacks, for_sets
from ..lifecycle.destroy import abort
from ..lifecycle.job import jobs
from ..lifecycle.kinds import RECOVER
from ..lifecycle.operation import Operation
from ..lifecycle.pending import Call
from ..lifecycle.recreate import restore
from ..processes import forked_holders
from ..reports import RankFault, Report
from ..settings import seconds_or_none
from ..threads import Deadline

logger = logging.getLogger("reloadpg")

_MOST = 32
"""Maximum number of faults in a report, which each rank reads from the store."""

_LEAST_S = 1.0
"""Minimum timeout, in seconds, of a recovery that another rank has requested again."""

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def recover(
    reason: str | BaseException | None = None,
    *,
    timeout: timedelta | float | None = None,
) -> Report:
    """Abort all communicators, and rebuild all groups behind the same objects.

    Collective over all ranks of the job; blocking, with a timeout. Call it after a collective
    raised, timed out, or hung, in any state: live, offloaded, failed, or while other ranks are in
    an offload or reload, which then raises ``PeerFailedError`` there. Other ranks notice it through
    :func:`recovery_requested`, or because their collectives fail after their peers' aborts. It may
    be called again after a failure. Rank 0 logs a warning with the ranks that were stuck, where,
    and the duration.

    ``on_offload`` callbacks are not called, since their communicators may be unusable and the other
    ranks wait. ``on_reload`` callbacks are called; with ``before=True`` only if groups were
    offloaded.

    Afterwards all groups are live, also groups that were offloaded. Each has run a small
    all-reduce, checked by value. The results of unfinished collectives are lost: the caller
    restores the state from before the step and repeats it. A group whose ``abort()`` or
    ``shutdown()`` the program has called is rebuilt, unless it was destroyed. Groups that bypass
    are unchanged.

    Args:
        reason: the reason for the reports and logs of all ranks: text or an exception; if None, the
            exception that is being handled. The variables in the frames of its traceback are
            cleared: gloo waits as long as one of them holds a work object.
        timeout: how long to wait for missing ranks. None means as long as a collective may
            take: the longest timeout of the groups, or the timeout of ``install`` if it is longer.
            A number is in seconds.

    Returns:
        The report of this rank; its ``faults`` are the ranks that were stuck and where.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: the ranks have different groups, for example after a fault during their
            creation; every group stays failed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed or was interrupted in the recovery. It names the rank.
        RebuildError: a group could not be built or connected on this rank; the cause is chained.
        ReloadpgError: the store is lost, and with it the job.
        InvalidOptionError: ``timeout`` is not positive; nothing was changed.
    """
    seconds = seconds_or_none(timeout, "timeout")
    error = sys.exc_info()[1] if reason is None else reason  # this thread's
    report = Call(RECOVER, partial(_recover, reason=error, seconds=seconds)).run().result()
    del error
    if report.rank == 0:
        logger.warning("%s", report)
    return report


def recovery_requested() -> bool:
    """Whether to call :func:`recover`: another rank has called it, or groups failed on this rank.

    A group has also failed if its collective was aborted after a timeout or an error (NCCL).

    Local; call it once per step. Polls the store at most once per 100 ms, in a job of more than 200
    ranks less often, with a timeout; otherwise returns the cached answer. False while the store
    does not respond, and without a job.
    """
    job = jobs.current("recovery_requested")
    if job is None:
        return False
    if any(group.state is GroupState.FAILED for group in registry.managed()):
        return True
    if backends.aborted_groups():
        return True
    return not jobs.busy and job.rendezvous.recovery_requested()


def _recover(
    op: Operation,
    reason: str | BaseException | None,
    seconds: float | None,
) -> None:
    fault = _fault(op, reason)
    groups = op.scope.groups
    report = json.dumps(
        {
            "fault": asdict(fault),
            "begun": collectives_begun(groups),
            "generation": max([op.job.generation, *(group.generation for group in groups)]),
        }
    )
    if seconds is None:
        timeout = op.options.timeout.total_seconds()
        seconds = max([timeout, *map(_longest_wait, groups)])
    was_offloaded = op.job.offloaded
    waited, holders = Deadline("recover", seconds), forked_holders()
    try:  # request first: collectives that fail because of the aborts then find the request
        with op.record.step("wait.flag"):
            op.enter(reason=str(fault))
    finally:
        _abort_all(op, str(fault))
    while True:
        left = max(waited.left, _LEAST_S)
        try:
            op.workers.await_unfinished()
            agreed = json.loads(op.agree(report, _summary, left))
            break
        except RendezvousTimeoutError as error:
            if holders:
                error.args = (f"{error}\n{holders}", *error.args[1:])
            raise
        except PeerFailedError:
            if op.round.decision is None or op.round.decision.kind != "recover":
                raise
        # Another rank has left this recovery, and requested the next one.
        op.enter(reason=str(fault))
    op.rebuild_all(agreed["generation"])
    op.record.blame(
        replace(RankFault(**fault), late=tuple(fault["late"])) for fault in agreed["faults"]
    )
    if was_offloaded:
        op.call(for_sets(callbacks.before_reload, op.scope.sets))
    restore(op, "canary")


# -- the report of this rank --------------------------------------------------------------------


def _fault(op: Operation, reason: str | BaseException | None) -> RankFault:
    """The fault that this rank reports to the recovery. Local."""
    text, where = "", ""
    if isinstance(reason, BaseException):
        if not isinstance(reason, PeerFailedError):  # the peer reports it itself
            text, where = f"{type(reason).__name__}: {reason}"[:1000], _where(reason)
        _release_work(reason)
    elif reason is not None:
        text = str(reason)[:1000]
    return RankFault(op.job.rendezvous.rank, text, where)


def _release_work(error: BaseException) -> None:
    """Clear the variables in the frames of an error's traceback. Local.

    A gloo connection stays open, with the peers waiting, while a variable holds a work object of
    it; and an exception keeps the variables of all frames in its traceback.
    """
    errors: list[BaseException | None] = [error]
    for cause in errors:
        if cause is None:
            continue
        errors += [other for other in (cause.__cause__, cause.__context__) if other not in errors]
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            # Clearing a suspended generator would close it.
            is_generator = frame.f_code.co_flags & _GENERATOR
            if not is_generator or _module(frame.f_globals) == "torch":
                with suppress(RuntimeError):  # the frame is still running
                    frame.clear()


def _where(error: BaseException) -> str:
    """The line of the program that raised an error, and the collective in it."""
    collective = line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _module(frame.f_globals) not in ("torch", "reloadpg"):
            line, collective = f"{Path(code.co_filename).name}:{number} ({code.co_name})", ""
        elif not collective and code.co_name != "wrapper" and line:
            collective = f"{code.co_name} at "
    return collective + line


def _module(variables: dict[str, Any]) -> str:
    return str(variables.get("__name__", "")).partition(".")[0]


def collectives_begun(groups: Sequence[ManagedGroup]) -> dict[str, int]:
    """The number of collectives that this rank has started, by live group and generation."""
    counts = {}
    for group in groups:
        with suppress(RuntimeError):  # not every backend counts
            if group.is_live:
                key = f"{group.name}/{group.construction.ranks[0]}/{group.generation}"
                counts[key] = backends.sequence_number(group.proxy)
    return counts


def _longest_wait(group: ManagedGroup) -> float:
    """Longest duration of a collective of the group, in seconds."""
    timeouts = group.current_timeouts().values()
    return max((timeout.total_seconds() for timeout in timeouts), default=0.0) + 10.0


# -- the steps ----------------------------------------------------------------------------------


def _abort_all(op: Operation, reason: str) -> None:
    """Set all groups to failed and abort their communicators in parallel. Local, non-blocking."""
    op.scope.mark_offloaded()
    op.job.forget_clients()
    op.in_caller(partial(_close_coalescing, op))
    abort(op.job, list(reversed(op.scope.groups)), GroupState.FAILED, reason, whole=True)
    gc.collect()  # gloo's connections stay open while a reference cycle holds a work object


def _close_coalescing(op: Operation) -> None:
    """End what the error has left open in the caller's thread."""
    for group in op.scope.groups:
        tables.close_coalescing(group.proxy)


def _summary(reports: Sequence[str]) -> str:
    """Summarize the reports of all ranks. Pure."""
    read = [json.loads(report) for report in reports]
    most: dict[str, int] = {}
    for report in read:
        for key, begun in report["begun"].items():
            most[key] = max(begun, most.get(key, 0))
    faults = []
    for report in read:
        late = [key.split("/")[0] for key, begun in report["begun"].items() if begun < most[key]]
        if late or report["fault"]["reason"]:
            faults.append({**report["fault"], "late": late})
    faults.sort(key=lambda fault: (not fault["late"], fault["rank"]))
    return json.dumps(
        {
            "generation": max(report["generation"] for report in read) + 1,
            "faults": faults[:_MOST],
        }
    )
