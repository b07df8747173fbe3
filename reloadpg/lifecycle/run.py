"""Runs an operation to its end. If it does not complete, it ends in the same way on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..groups.proxy import GroupState
from ..rendezvous.worker_thread import Wait
from ..reports import Report
from .job import Job, Unfinished
from .operation import TOUCHING, Operation
from .record import publish
from .recreate import abort

logger = logging.getLogger("reloadpg")

_TRIES = 3
"""Maximum number of attempts in :func:`insist`."""

_ABORT_S = 2.0
"""Seconds that a failed operation waits for its communicators to abort before it raises."""

_UNFINISHED_S = 10.0
"""Seconds that an operation waits for communicators that a failed one is still destroying."""


def perform(op: Operation, body: Callable[[Operation, Job], object]) -> Report:
    """Begin an operation, run its body if there is a job, and end it, complete or not."""
    try:
        op.begin()
        if op.job is not None:
            body(op, op.job)
    except BaseException as error:
        _end_early(op, error)
        raise
    finally:
        try:
            op.release()
        finally:
            # Python handles signals between function calls, so none is handled before this line.
            op.is_running = False
            if op.opened:
                publish(op.report)
    return op.report


def _end_early(op: Operation, error: BaseException) -> None:
    """End an operation as all ranks do: complete, unchanged, or failed. Local, with a timeout.

    The phase at which the round ended decides: this rank may have been interrupted after the last
    rank had arrived at a barrier, so the others may be in a later phase, or done.
    """
    job = op.job
    if job is None or not op.opened:
        return
    op.activity = f"ending it after {type(error).__name__}"
    insist(partial(op.round.fail, error))
    phase = op.round.supposed_end
    if phase is None:
        insist(op.complete)
    elif phase in TOUCHING or op.name == "recover":
        insist(partial(_leave_failed, op, job, phase, error))
    job.last_error = f"{type(error).__name__}: {error}"
    op.report = op.record.report(job, error=job.last_error)


def insist(call: Callable[[], object]) -> None:
    """Call a function, and again after each further interrupt, a limited number of times.

    Otherwise the other ranks would wait for this one until their timeouts, or this rank could leave
    its groups in a different state than they do.
    """
    for _ in range(_TRIES):
        with suppress(BaseException):
            call()
            break


def _leave_failed(op: Operation, job: Job, phase: str, error: BaseException) -> None:
    # `insist` calls this again after an interrupt, so every step can be repeated.
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    op.changes.mark_offloaded()
    if phase in ("suspended", "resumed"):
        job.suspend_obstacle = f"an earlier {op.name} failed in its phase {phase!r}: {reason}"
        op.record.warnings = ["from now on, the job recreates its groups and suspends none"]
    if job.creation_stores is not None:  # abandoned creations may hold the clients indefinitely
        job.creation_stores = job.creation_stores.replaced()
    # Some ranks may have rebuilt a group and others not. With different generations, the ranks
    # would disagree in every later attempt.
    for group, generation in op.changes.generations.items():
        group.generation = generation
    creates = op.name != "offload"
    while op.round.unfinished:
        index, task = op.round.unfinished.pop()
        job.unfinished.append(Unfinished(op.doing(index), task, creates))
    # A recovery replaces all backends: some ranks may already have the new ones, and others not.
    groups, whole = list(reversed(op.changes.groups)), op.name == "recover"
    aborts = abort(job, groups, GroupState.FAILED, reason, whole=whole)
    # Usually their memory is free before the caller sees the error. An abort that hangs must not
    # withhold the error: the next operation waits for it again, and reports it.
    end = Wait(op.name, _ABORT_S)
    for aborting in aborts:
        aborting.task.wait(end.left)
    for aborting in aborts:
        if not aborting.task.ended:
            logger.error("%s: after %g s, %s; its memory is not free", op.name, _ABORT_S, aborting)


def await_unfinished(op: Operation, job: Job) -> None:
    """Wait a limited time for communicators that failed operations are still destroying.

    A call in C++ may never return and must not block the job.
    """
    abort(job, [], GroupState.FAILED)  # those for which no thread could be started
    job.unfinished = [entry for entry in job.unfinished if not entry.task.ended]
    destroying = [entry for entry in job.unfinished if not entry.creates]
    end = Wait(op.name, min(_UNFINISHED_S, op.round.seconds / 2))

    def wait() -> None:
        while end.left and any(not entry.task.wait(min(0.2, end.left)) for entry in destroying):
            op.round.advance()  # the other ranks may wait for this limited time

    if destroying:
        names = ", ".join(dict.fromkeys(entry.group for entry in destroying))
        op.do(
            op.round.phase,
            wait,
            f"waiting for communicators that are still being destroyed: {names}",
        )
