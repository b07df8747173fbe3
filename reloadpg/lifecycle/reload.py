"""Reload: rebuild the communicators of all offloaded groups, behind the same objects."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Literal, overload

from ..errors import DisagreementError, ReloadpgError
from ..groups.offloaded import GroupState
from ..groups.sets import named_sets
from ..reports import Report
from ..settings import as_flag, checked_attempts, seconds_or_none
from . import recreate, suspend
from .callbacks import callbacks, for_sets
from .connect import Connect, validate
from .destroy import abort
from .kinds import RELOAD
from .operation import Operation
from .pending import Call, Pending


@overload
def reload(
    *sets: str,
    connect: Connect | None = ...,
    attempts: int = ...,
    timeout: timedelta | float | None = ...,
    wait: Literal[True] = True,
) -> Report: ...
@overload
def reload(
    *sets: str,
    connect: Connect | None = ...,
    attempts: int = ...,
    timeout: timedelta | float | None = ...,
    wait: Literal[False],
) -> Pending: ...
@overload
def reload(
    *sets: str,
    connect: Connect | None = ...,
    attempts: int = ...,
    timeout: timedelta | float | None = ...,
    wait: bool,
) -> Report | Pending: ...
def reload(
    *sets: str,
    connect: Connect | None = None,
    attempts: int = 1,
    timeout: timedelta | float | None = None,
    wait: bool = True,
) -> Report | Pending:
    """Rebuild the communicators of all offloaded groups, or of some sets, behind the same objects.

    Collective over all ranks of the job; blocking, with the ``timeout`` of ``install`` for each
    wait; idempotent; may be called again after a failure. WORLD comes first, then the other groups
    in an order that all ranks share, ``parallelism`` of them in parallel. The members of a group
    call torch's original function with the arguments captured at its creation. Settings that were
    changed later (timeouts, description) are carried over. Groups that the user destroyed stay
    destroyed.

    An operation can end differently on the ranks, if a link or the store fails. If their states
    differ, all ranks release the groups that are live, and rebuild all groups of these sets.

    Args:
        sets: the sets to reload, such as ``"engine"``; none for all. Every rank of the job makes
            the same call, even if it is in no group of the set. The default group, which is in
            ``"trainer"``, may stay offloaded.
        connect: ``none`` lets each communicator connect in its first collective. ``eager`` connects
            all communicators now, with an all-reduce of two numbers, one after the other in the
            order that all ranks share. (NCCL's are created in parallel before; gloo connects at the
            creation.) ``canary`` runs that all-reduce on all groups and checks the sum.
            None means ``eager`` with ``install(recoverable=True)``, otherwise ``none``, which takes
            no memory for unused groups. With ``none``, NCCL connects a communicator in the
            program's first collective on it. If another rank fails there, nothing ends that call:
            on torch 2.15's default engine, no later reload or recovery of that process completes.
            A connection by this function is ended after a failure or its timeout, and the next
            call repairs it. Equal on all ranks.
        attempts: maximum number of attempts. If a group could not be rebuilt on some rank (a port
            in use, a name that does not resolve, a link that flaps) and all ranks have responded,
            all ranks try again after a pause that grows from half a second to 8 s, with new names
            and connections: ``Report.retries`` has the reasons. There is no other attempt after
            missing ranks, a disagreement or an interrupt. A creation that failed on one rank can
            keep a thread and memory of the other members until the process ends. Equal on all
            ranks.
        timeout: how long to wait for ranks that have not made the call, without progress on any
            rank. A number is in seconds. None means the timeout of ``install``, which all other
            waits have.
        wait: if False, return immediately and reload in a separate thread, for example while the
            caller copies weights to the device: see :class:`Pending`. While it runs, groups refuse
            collectives, :func:`offload` and a second reload raise, and callbacks are called in that
            thread. Need not be equal on all ranks.

    Returns:
        The report of this rank; with ``wait=False`` a handle, whose ``result()`` returns the report
        or raises the errors below.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: the calls of the ranks differ; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        RebuildError: a group could not be built or connected on this rank; the cause is chained.
        InsufficientMemoryError: not enough memory here to resume suspended communicators; nothing
            was changed on any rank.
        InvalidOptionError: ``install`` declares no such set, or another argument cannot be used;
            nothing was changed.
    """
    validate(connect)
    wait = as_flag(wait, "reload(wait)", "nothing was changed")
    seconds = seconds_or_none(timeout, "reload(timeout)")
    attempts = checked_attempts(attempts)
    steps = partial(restore, how=connect, attempts=attempts)
    call = Call(RELOAD, steps, named_sets(sets, "reload"), seconds, wait=wait)
    return call.run().result() if wait else call.run()


_PAUSE_S = 0.25
_LONGEST_S = 8.0
"""Half of the first pause between two attempts, and the longest one, in seconds."""

_OFFLOADED = (
    ". The groups are still offloaded on all ranks. Remove the cause, then call reload() again on "
    "all ranks."
)
"""The state and the remedy after a callback has failed."""


def restore(op: Operation, how: Connect | None = None, attempts: int = 1) -> None:
    """The steps of a reload; see :func:`reload`."""
    how = how or ("eager" if op.options.recoverable else "none")
    for attempt in range(1, attempts + 1):
        try:
            _restore(op, how, attempts, first=attempt == 1)
            return
        except ReloadpgError as error:
            if attempt == attempts or op.fails(error, min(_PAUSE_S * 2**attempt, _LONGEST_S)):
                raise


def _restore(op: Operation, how: Connect, attempts: int, *, first: bool) -> None:
    """One attempt."""
    op.enter()
    op.workers.await_unfinished()
    if op.scope.changes and first:
        op.call(for_sets(callbacks.before_reload, op.scope.sets), _OFFLOADED)
    if differs := _agree(op, how, attempts):
        reason = f"The ranks disagreed on the state: {differs}."
        op.record.warn(f"all groups were rebuilt. {reason}")
        op.scope.mark_offloaded()
        abort(op.job, list(reversed(op.scope.groups)), GroupState.FAILED, reason)
        op.reserve()
        op.workers.await_unfinished()
    if not op.scope.changes:
        op.record.note("nothing is offloaded")
        op.call_reloaded()
        return
    strategy = suspend if op.scope.strategy == "suspend" else recreate
    strategy.restore(op, how)


def _agree(op: Operation, how: Connect, attempts: int) -> str:
    """Agree with all ranks; return in what they differ if that is the state alone.

    After a link was down, or a store did not respond, an operation can have ended differently on
    the ranks. Then they rebuild all groups of the chosen sets; ranks with live groups release them.
    """
    differs = ""
    while True:
        try:
            op.agree(connect=how, attempts=str(attempts))
            return differs
        except DisagreementError:
            # The second time, another rank has failed here, and its next reload finds it, too.
            decision = op.round.decision
            if decision is None or not decision.generation:
                raise
        differs = decision.text
        op.rebuild_all(decision.generation)
        op.enter()
