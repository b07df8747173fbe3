"""Reload: build the communicators of all offloaded groups again, behind the same objects."""

from __future__ import annotations

import sys
from functools import partial
from typing import Literal, overload

from ..c10d import devices
from ..groups.proxy import GroupState
from ..groups.registry import registry
from .connect import Connect, connects_alone, validate
from .failure import await_unfinished, end_early
from .operation import Operation
from .pending import Pending
from .recreate import Rebuilds, abort
from .report import Report
from .suspend import check_room, resume

__all__ = ["reload"]


@overload
def reload(*, connect: Connect = ..., wait: Literal[True] = True) -> Report: ...
@overload
def reload(*, connect: Connect = ..., wait: Literal[False]) -> Pending: ...
@overload
def reload(*, connect: Connect = ..., wait: bool) -> Report | Pending: ...
def reload(*, connect: Connect = "none", wait: bool = True) -> Report | Pending:
    """Build the communicators of all offloaded groups again, behind the same objects.

    Collective over all ranks of the job; blocking, each wait bounded by the ``timeout`` given to
    ``install``; idempotent; may be called again after a failure. WORLD comes first, then the
    groups in one order that all ranks share, ``parallelism`` of them side by side. Each is made by
    its members, by torch's original function with the arguments captured at its creation, and then
    gets what was set on it afterwards (timeouts, description). Groups that the user destroyed stay
    destroyed.

    Args:
        connect: ``none`` leaves each communicator to connect in its first collective;
            ``eager`` connects them now: as they are created where the backend can connect without
            a collective (NCCL), else with an all-reduce of two numbers, one after the other in the
            order that all ranks share; ``canary`` runs that all-reduce on all, and checks the sum.
            Equal on all ranks.
        wait: False returns at once, and the reload goes on in a thread of its own while the caller
            copies weights to the device: see :class:`Pending`. Groups refuse collectives until it
            has ended, :func:`offload` and a second reload raise, and callbacks are called in that
            thread. Need not be equal on all ranks.

    Returns:
        What was done on this rank; with ``wait=False`` a handle, whose ``result()`` returns or
        raises what is said here.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: the ranks do not ask for the same; nothing was changed.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed; it names it.
        RebuildError: a group could not be built or connected on this rank; the cause is chained.
        InsufficientMemoryError: no room here to resume suspended communicators; nothing was
            changed on any rank.
        InvalidOptionError: ``connect`` is none of the three.
    """
    how = validate(connect)
    op = Operation("reload", sys._getframe())
    return _reload(op, how) if wait else Pending(op, partial(_reload, how=how))


def _reload(op: Operation, how: Connect) -> Report:
    try:
        job = op.job
        if job is None:
            return op.report
        await_unfinished(op)
        if op.was_offloaded:
            op.call(registry.callbacks.before_reload)
            # A callback may destroy its own: nobody is to make such a group again.
            op.groups = [g for g in op.groups if g.state is not GroupState.DESTROYED]
        op.agree(connect=how)
        if not op.was_offloaded:
            op.complete("nothing is offloaded")
            return op.report
        with op.timed("device"):
            devices.empty_cache()
        suspended = [g for g in op.groups if not g.is_live and g.communicator is not None]
        if op.may_suspend:
            op.do("room", lambda: check_room(suspended, op.world.rank()), "looking for room")
            op.barrier("room")
            if op.each_or_fall_back("resumed", suspended, resume):
                op.await_aborts("rebuilt", abort(suspended, GroupState.OFFLOADED))
        gone = [g for g in op.groups if g.communicator is None and g.state != GroupState.DESTROYED]
        rebuilds = Rebuilds(
            op.world, job.creation_stores, op.generation, op.round.label, op.round.told, how
        )
        op.delete_spent_keys(gone)
        rebuilds.prepare(gone)
        back = [g for g in op.groups if g in gone or (how != "none" and g in suspended)]
        op.each("rebuilt", back, rebuilds.rebuild, parallelism=op.creators)
        checked = [g for g in back if how == "canary" or (how == "eager" and not connects_alone(g))]
        op.each("rebuilt", checked, rebuilds.check, parallelism=1)
        op.measure("rebuilt")
        op.barrier("rebuilt")
        op.call(registry.callbacks.reload)
        op.barrier("done")
        op.complete("" if op.done else "no reloadable group here")
    except BaseException as error:
        end_early(op, error)
        raise
    finally:
        op.close()
    return op.report
