"""Rejoin: let a process that replaces one that has ended into the job that goes on."""

from __future__ import annotations

from datetime import timedelta

from ..errors import NotInstalledError
from ..groups.registry import registry
from .recover import meet, seconds_of
from .report import Report

__all__ = ["rejoin"]


def rejoin(*, wait_for_ranks: timedelta | float | None = None) -> Report:
    """Meet the other ranks in :func:`recover`, if this process replaces one that has ended.

    To be called in every process of a recoverable job, once its groups are created and before
    anything is done with them; where no process is replaced it returns at once. Otherwise it is
    collective over all ranks, of which the others call :func:`recover`; blocking, bounded; it may
    be called again after it has failed.

    A process replaces another one if that has begun the same job, as the same rank and on the same
    store, with ``install(recoverable=True)``, and not all ranks have ended the job. Its
    ``init_process_group``, ``new_group`` and ``split_group`` then return at once, with groups that
    have the names of the other ranks' and no communicator yet. It must create the groups that the
    others have, in the same order. All groups are live afterwards; the state of the program (the
    weights, the optimizer's) is for the caller to bring.

    Args:
        wait_for_ranks: how long to wait for the other ranks, as for :func:`recover`.

    Returns:
        What was done on this rank. ``changed`` is whether it replaces another one, and
        ``replaced`` says which ranks do.

    Raises:
        NotInstalledError: ``install`` was not called.
        DisagreementError: this rank has created other groups than the others.
        RendezvousTimeoutError: ranks are missing; it names them.
        PeerFailedError: another rank failed in the recovery; it names it.
        RebuildError: a group could not be built or connected on this rank; the cause is chained.
        ReloadpgError: the store is lost, and with it the job.
        InvalidOptionError: ``wait_for_ranks`` is not positive; nothing was changed.
    """
    seconds = seconds_of(wait_for_ranks)
    if registry.options is None:
        raise NotInstalledError(
            "rejoin() was called and nothing is installed; nothing was changed. Call "
            "reloadpg.install(recoverable=True) before the process groups are created."
        )
    job = registry.job("rejoin")
    if job is None or not job.rendezvous.replaces:
        generation = 0 if job is None else job.generation
        return Report("recover", False, generation, note="this process replaces no other one")
    return meet("this process replaces one that has ended", seconds=seconds).report
