"""Teardown: who made the groups destroys them, in order after success, by abort after an error.

Imports torch only where there is something to destroy.
"""

from __future__ import annotations

import logging
import time
import weakref
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from ..errors import ReloadpgError, as_timedelta
from .launchers import is_initialized
from .network import restore_network

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = [
    "OwnGroups",
    "destroy_distributed",
    "process_group_scope",
]

EXIT_TIMEOUT = timedelta(minutes=5)
_TELL_S = 5.0
_ABORT_S = 30.0


def destroy_distributed() -> None:
    """Destroy the default group and all others, in order; nothing if there is none.

    Also undo the variables that ``init_distributed(network=...)`` has set.

    Local for the groups of the CPU; with an accelerator's communicators the ranks must call it
    alike. Idempotent; works while groups are offloaded. It does not wait for the other ranks:
    :func:`process_group_scope` does.
    """
    if is_initialized():
        import torch.distributed as dist

        dist.destroy_process_group()
    restore_network()


def process_group_scope(*, timeout: timedelta | float = EXIT_TIMEOUT) -> OwnGroups:
    """Destroy the process groups made inside a ``with`` block, and only those.

    On entry it notes which groups exist; they are left as found. On exit, those made inside, the
    default group or others over one that existed, are destroyed:

    * no exception: a bounded barrier on the store, then an orderly destroy;
    * any exception (also KeyboardInterrupt and SystemExit): rank and traceback are logged, peers
      that wait at their exit are told, and the groups are aborted. An orderly destroy would wait
      for peers that sit in a collective this rank never joins. The same exception goes on; errors
      of the clean-up are logged, never raised over it.

    Collective over the members of the groups that it destroys. Scopes nest: the innermost one
    around its creation owns a group. It holds through offload and reload, also if left while
    offloaded.

    Args:
        timeout: bound of the barrier before the orderly destroy; a timedelta, or seconds.

    Raises:
        RendezvousTimeoutError: at exit: not all ranks came; the groups were aborted.
        PeerFailedError: at exit: another rank failed; the groups were aborted.
        InvalidOptionError: the timeout is not a time.
    """
    return OwnGroups(as_timedelta(timeout, "timeout"))


class OwnGroups:
    """The groups that this process has made since this object was, or since its block began.

    As a context manager it destroys them; see :func:`process_group_scope`. Reusable one time after
    the other, not nested in itself. A group is known by its store: it stays the same where the
    library takes a group over, and through reloads, and a later group of the same name has another.

    Args:
        timeout: bound of the barrier before the orderly destroy.
    """

    def __init__(self, timeout: timedelta = EXIT_TIMEOUT) -> None:
        self._timeout = timeout
        self._before = _stores_of_groups()

    def __enter__(self) -> OwnGroups:
        self._before = _stores_of_groups()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        self.destroy(error)
        return False

    def now(self) -> list[ProcessGroup]:
        """Return those that there are now, in order of creation; with WORLD first, if it is one."""
        if not is_initialized():
            return []
        from .. import c10d

        return [group for group in c10d.known_groups() if self._is_new(c10d.store_of(group))]

    def _is_new(self, store: Store) -> bool:
        before = self._before.get(id(store))
        return before is None or before() is not store

    def destroy(self, error: BaseException | None) -> None:
        """Destroy them. Collective over their members; blocking, bounded.

        With an error, which ended the caller's block, they are aborted, and this raises nothing.
        Without, it raises what kept the ranks from the barrier, after it has aborted them.
        """
        groups = self.now()
        if not groups:
            return
        if error is not None:
            _abandon(error, groups)
            return
        import torch.distributed as dist

        from .store_barrier import leave_together

        owns_world = dist.group.WORLD in groups
        try:
            # The last barrier of WORLD is one of all groups; otherwise each has its own members.
            for group in groups[:1] if owns_world else groups:
                leave_together(self._timeout, group)
        except BaseException as failure:
            # Where the barrier itself failed its outcome stands, or the store is gone: no more to
            # say.
            _abandon(failure, groups, tell=not isinstance(failure, ReloadpgError))
            raise
        if owns_world:
            destroy_distributed()
            return
        for group in groups:
            dist.destroy_process_group(group)

    def abort(self) -> None:
        """Abort them, bounded. Local; does not wait for peers.

        Raises:
            TimeoutError: the abort did not end in 30 s; it goes on in a thread.
        """
        abort_groups(self.now())


def _stores_of_groups() -> dict[int, weakref.ref[Store]]:
    """The stores of the groups that there are now, by id."""
    if not is_initialized():
        return {}
    from .. import c10d

    stores = [c10d.store_of(group) for group in c10d.known_groups()]
    return {id(store): weakref.ref(store) for store in stores}


def _abandon(error: BaseException, groups: list[ProcessGroup], *, tell: bool = True) -> None:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    # First, before anything that can block: this is what the job's logs must have.
    logging.getLogger(__name__).error(
        "rank %d of %d failed; its process groups are aborted",
        rank,
        size,
        exc_info=(type(error), error, error.__traceback__),
    )
    try:
        if tell:
            _tell_peers(error, groups)
    except BaseException as failure:
        _log_failure("the other ranks could not be told", failure)
    try:
        abort_groups(groups)
    except BaseException as failure:
        _log_failure("the process groups could not be aborted", failure)


def _log_failure(what: str, failure: BaseException) -> None:
    logging.getLogger(__name__).error(
        "%s: %s: %s", what, type(failure).__name__, failure, exc_info=failure
    )


def _tell_peers(error: BaseException, groups: list[ProcessGroup]) -> None:
    """Let peers that wait at their exit raise too: at WORLD's barrier, or at each group's."""
    import torch.distributed as dist

    from .store_barrier import exit_round

    end = time.monotonic() + _TELL_S
    for group in groups[:1] if dist.group.WORLD in groups else groups:
        if time.monotonic() < end:
            exit_round(timedelta(seconds=_TELL_S), group).fail(error)


def abort_groups(groups: list[ProcessGroup]) -> None:
    """Abort groups of this process, bounded. Local; does not wait for peers.

    Args:
        groups: with WORLD among them, all groups are aborted.

    Raises:
        TimeoutError: the abort did not end in 30 s; it goes on in a thread.
    """
    if not groups or not is_initialized():
        return
    from .. import c10d
    from ..rendezvous.worker_thread import Task

    if c10d.world() in groups:
        task = Task(c10d.abort_all, "abort")
    else:
        task = Task(lambda: c10d.abort_groups(groups), "abort")
    if not task.wait(_ABORT_S):
        raise TimeoutError(
            f"The process groups were not aborted within {_ABORT_S:g} s; a thread goes on with "
            f"it. End the process."
        )
    task.result()
    if not is_initialized():
        restore_network()
