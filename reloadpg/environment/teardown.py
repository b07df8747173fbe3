"""Teardown: the owner destroys its groups, in order after success, by abort after an error.

Imports torch only if there is a group to destroy.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

from ..errors import PeerFailedError, ReloadpgError
from ..processes import forked_holders
from ..settings import as_timedelta
from .launchers import is_initialized
from .network import restore_interfaces
from .scopes import Scope, open_scopes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXIT_TIMEOUT = timedelta(minutes=5)
_TELL_S = 5.0
_ABORT_S = 30.0


def destroy_distributed() -> None:
    """Destroy the default group and all others, in order, if there are any.

    Also unsets ``GLOO_SOCKET_IFNAME`` if ``init_distributed`` has set it.

    Local for CPU groups; collective for an accelerator's communicators. Idempotent; works while
    groups are offloaded. Unlike :func:`process_group_scope`, it does not wait for other ranks.
    """
    if is_initialized():
        import torch.distributed as dist

        dist.destroy_process_group()
    restore_interfaces()


def process_group_scope(*, timeout: timedelta | float = EXIT_TIMEOUT) -> OwnGroups:
    """Destroy the process groups that are created inside a ``with`` block, and only those.

    Groups that exist at entry are unchanged. At exit, the groups that were created inside are
    destroyed:

    * no exception: a barrier on the store with a timeout, then an orderly destroy;
    * any exception (also KeyboardInterrupt and SystemExit): rank, error and line are logged, peers
      that wait at their exit or in :func:`barrier` are notified, and the groups are aborted, since
      an orderly destroy can wait for peers. The exception propagates; errors of the clean-up are
      logged.

    A peer that waits in a gloo collective fails at once, since its connection is closed. A forked
    child of this process, such as a worker of a DataLoader, can hold a copy of the connection: the
    peer then waits until the child ends, or until the timeout of the group. Start such children
    with ``spawn`` or ``forkserver``, or before the groups. A peer in a collective of NCCL is not
    notified: it waits until the timeout of the group, unless torchrun, mpirun or
    ``srun --kill-on-bad-exit`` ends it first.

    Collective over the members of the groups that it destroys. Scopes nest: the innermost scope
    around its creation owns a group, also across offload and reload. A scope may end while groups
    are offloaded.

    Args:
        timeout: timeout of the barrier before the orderly destroy; a timedelta, or seconds.

    Raises:
        RendezvousTimeoutError: at exit: not all ranks arrived; the groups were aborted.
        PeerFailedError: at exit: another rank failed; the groups were aborted.
        InvalidOptionError: the timeout is not a time.
    """
    return OwnGroups(as_timedelta(timeout, "timeout"))


class OwnGroups(Scope):
    """The groups of a block, which ends them; see :func:`process_group_scope`."""

    def __init__(self, timeout: timedelta = EXIT_TIMEOUT) -> None:
        super().__init__()
        self._timeout = timeout

    def __enter__(self) -> OwnGroups:
        self.begin()
        open_scopes.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> Literal[False]:
        with suppress(ValueError):
            open_scopes.remove(self)
        self.destroy(error)
        return False

    def destroy(self, error: BaseException | None) -> None:
        """Destroy them. Collective over their members; blocking, with a timeout.

        If ``error`` ended the caller's block, they are aborted, and this raises nothing. Otherwise,
        if the barrier fails, they are aborted and its error is raised.
        """
        groups = self.now()
        if not groups:
            return
        if error is not None:
            _abandon(error, groups, tell=self.meets_on())
            return
        import torch.distributed as dist

        from .store import leave_together

        try:
            for group in self.meets_on():
                leave_together(self._timeout, group)
        except BaseException as failure:
            # If the barrier itself failed, its decision is written or the store is lost.
            told = isinstance(failure, ReloadpgError)
            _abandon(failure, groups, tell=() if told else self.meets_on())
            raise
        if dist.group.WORLD in groups:
            destroy_distributed()
            return
        for group in groups:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """Abort them. Local; does not wait for peers. An error is logged: the caller raises."""
        _attempt("the process groups could not be aborted", partial(abort_groups, self.now()))


def _abandon(
    error: BaseException, groups: list[ProcessGroup], *, tell: Sequence[ProcessGroup]
) -> None:
    """Log an error, notify the peers that wait at the last barriers of some groups, and abort."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    # Log first, before anything that can block. The traceback is printed where the error is caught.
    frames = traceback.extract_tb(error.__traceback__)
    logging.getLogger(__name__).error(
        "rank %d of %d failed, and its process groups are aborted: %s%s%s",
        *(rank, size, "".join(traceback.format_exception_only(error)).strip()),
        "".join(f" ({one.name}, {one.filename}:{one.lineno})" for one in frames[-1:]),
        f"\n{holders}" if (holders := forked_holders()) else "",
    )
    _attempt("the other ranks could not be notified", partial(_tell_peers, error, tell))
    _attempt("the coalescing of a group could not be ended", partial(_close_coalescing, groups))
    _attempt("the process groups could not be aborted", partial(abort_groups, groups))


def _attempt(what: str, step: Callable[[], object]) -> None:
    """Call a step of a clean-up after an error, which is raised in place of the step's."""
    try:
        step()
    except BaseException as failure:
        logging.getLogger(__name__).error(
            "%s: %s: %s", what, type(failure).__name__, failure, exc_info=failure
        )


def _close_coalescing(groups: list[ProcessGroup]) -> None:
    """End what the error has left open in this thread, which would run no later collective."""
    from ..c10d import tables

    for group in groups:
        tables.close_coalescing(group)


def _tell_peers(error: BaseException, groups: Sequence[ProcessGroup]) -> None:
    """Make peers raise that wait at these last barriers, or at a barrier within the block."""
    end = time.monotonic() + _TELL_S
    for group in groups:
        from ..rendezvous.round import Round
        from .store import rendezvous_of

        if time.monotonic() < end:
            with suppress(PeerFailedError):  # another rank has left before
                Round.open(rendezvous_of(group, "exit"), "exit", ("arrive",), _TELL_S).fail(error)


def abort_groups(groups: list[ProcessGroup]) -> None:
    """Abort groups, or all groups if WORLD is one of them. Local; does not wait for peers."""
    if not groups or not is_initialized():
        return
    from ..c10d import backends, nccl, tables
    from ..threads import Task

    every = tables.world() in groups

    def abort() -> None:
        for group in groups:
            nccl.end_calls(group)
        if every:
            backends.abort_all()
        else:
            backends.abort_each(groups)

    task = Task(abort, "abort")
    if not task.wait(_ABORT_S):
        raise TimeoutError(
            f"The process groups were not aborted within {_ABORT_S:g} s; a thread continues to "
            f"abort them. End the process."
        )
    task.result()
    if not is_initialized():
        restore_interfaces()
