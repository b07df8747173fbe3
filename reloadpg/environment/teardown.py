"""Teardown: who made the groups destroys them, in order after success, by abort after an error.

Imports torch only where there is something to destroy.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from types import TracebackType
from typing import Literal

from ..errors import ReloadpgError
from .launchers import is_initialized
from .variables import as_timedelta

__all__ = [
    "ProcessGroupScope",
    "abort_groups",
    "destroy_distributed",
    "destroy_owned",
    "process_group_scope",
]

EXIT_TIMEOUT = timedelta(minutes=5)
_TELL_S = 5.0
_ABORT_S = 30.0


def destroy_distributed() -> None:
    """Destroy the default group and all others, in order; nothing if there is none.

    Local for the groups of the CPU; with an accelerator's communicators the ranks must call it
    alike. Idempotent; works while groups are offloaded. It does not wait for the other ranks:
    :func:`process_group_scope` does.
    """
    if is_initialized():
        import torch.distributed as dist

        dist.destroy_process_group()


def process_group_scope(*, timeout: timedelta | float = EXIT_TIMEOUT) -> ProcessGroupScope:
    """Destroy the process groups made inside a ``with`` block, and only those.

    On entry it notes whether the default group exists. On exit:

    * it existed, or there is none now: everything is left as found;
    * made inside, no exception: a bounded barrier on the store, then an orderly destroy;
    * made inside, any exception (also KeyboardInterrupt and SystemExit): rank and traceback are
      logged, peers that wait at their exit are told, and the groups are aborted. An orderly
      destroy would wait for peers that sit in a collective this rank never joins. The same
      exception goes on; errors of the clean-up are logged, never raised over it.

    Collective over the job where it destroys a group. Scopes nest: the outermost one that saw no
    group owns it. It holds through offload and reload, also if left while offloaded.

    Args:
        timeout: bound of the barrier before the orderly destroy; a timedelta, or seconds.

    Raises:
        RendezvousTimeoutError: at exit: not all ranks came; the groups were aborted.
        PeerFailedError: at exit: another rank failed; the groups were aborted.
        InvalidOptionError: the timeout is not a time.
    """
    return ProcessGroupScope(as_timedelta(timeout, "timeout"))


class ProcessGroupScope:
    """See :func:`process_group_scope`. Reusable one time after the other, not nested in itself.

    Attributes:
        existed: whether the default group existed on entry.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.existed = False

    def __enter__(self) -> ProcessGroupScope:
        self.existed = is_initialized()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if not self.existed:
            destroy_owned(error, self._timeout)
        return False


def destroy_owned(error: BaseException | None, timeout: timedelta) -> None:
    """Destroy the groups that the caller made.

    With an error, which ended the caller's block, this raises nothing. Without, it raises what kept
    the ranks from the barrier, after it has aborted the groups.
    """
    if not is_initialized():
        return
    if error is not None:
        _abandon(error)
        return
    from .store_barrier import leave_together

    try:
        leave_together(timeout)
    except BaseException as failure:
        # Where the barrier itself failed its outcome stands, or the store is gone: no more to say.
        _abandon(failure, tell=not isinstance(failure, ReloadpgError))
        raise
    destroy_distributed()


def _abandon(error: BaseException, *, tell: bool = True) -> None:
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
            _tell_peers(error)
    except BaseException as failure:
        _log_failure("the other ranks could not be told", failure)
    try:
        abort_groups()
    except BaseException as failure:
        _log_failure("the process groups could not be aborted", failure)


def _log_failure(what: str, failure: BaseException) -> None:
    logging.getLogger(__name__).error(
        "%s: %s: %s", what, type(failure).__name__, failure, exc_info=failure
    )


def _tell_peers(error: BaseException) -> None:
    from .store_barrier import job_round

    job_round("exit", ("arrive",), timedelta(seconds=_TELL_S)).fail(error)


def abort_groups() -> None:
    """Abort all groups of this process, bounded. Local, idempotent; does not wait for peers.

    Raises:
        TimeoutError: the abort did not end in 30 s; it goes on in a thread.
    """
    if not is_initialized():
        return
    from .. import c10d
    from ..rendezvous.worker_thread import Task

    task = Task(lambda: c10d.abort_all(), "abort")
    if not task.wait(_ABORT_S):
        raise TimeoutError(
            f"The process groups were not aborted within {_ABORT_S:g} s; a thread goes on with "
            f"it. End the process."
        )
    task.result()
