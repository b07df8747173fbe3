"""Rejoin: join a running job in place of a process that has ended."""

from __future__ import annotations

from datetime import timedelta

from ..errors import NotInstalledError
from ..groups.registry import registry
from ..lifecycle.job import jobs
from ..reports import Report
from .recovering import meet, seconds_of


def rejoin(*, timeout: timedelta | float | None = None) -> Report:
    """Join the other ranks' :func:`recover`, if this process replaces one that has ended.

    Call it in every process of a recoverable job, after its groups are created and before they are
    used. If this process replaces no other one, it returns immediately. Otherwise it is collective
    over all ranks, and the other ranks call :func:`recover`; blocking, with a timeout. It may be
    called again after a failure.

    A process replaces another one that began the same job, as the same rank and on the same store,
    with ``install(recoverable=True)``, unless all ranks have ended the job. Its
    ``init_process_group``, ``new_group`` and ``split_group`` return immediately. Their groups have
    the same names as on the other ranks, but no communicator yet. The process must create the same
    groups as the other ranks, in the same order. Afterwards all groups are live; the caller
    restores the state of the program (weights, optimizer).

    Args:
        timeout: how long to wait for the other ranks, as for :func:`recover`.

    Returns:
        The report of this rank. ``changed`` is whether this process replaces another one, and
        ``replaced`` are the ranks with a new process.

    Raises:
        DisagreementError: this rank has created other groups than the others.
        ReloadpgError: all others as for :func:`recover`.
    """
    seconds = seconds_of(timeout)
    if registry.options is None and not registry.off:
        raise NotInstalledError(
            "rejoin() was called, but reloadpg is not installed; nothing was changed. Call "
            "reloadpg.install(recoverable=True) before the process groups are created."
        )
    job = jobs.current("rejoin")
    if job is None or not job.rendezvous.replaces:
        generation = 0 if job is None else job.generation
        return Report("recover", False, generation, note="this process replaces no other one")
    report, _ = meet("this process replaces one that has ended", seconds=seconds)
    return report
