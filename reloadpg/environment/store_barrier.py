"""The user's barrier with a timeout: on the store, without a collective.

Do not assume that it waits for work on devices: it synchronizes processes only.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..c10d import stores, tables
from ..errors import InvalidOptionError, ReloadpgError, RendezvousTimeoutError
from ..lifecycle.job import jobs
from ..rendezvous.round import Rendezvous
from ..rendezvous.store_client import StoreClient
from ..settings import as_timedelta
from ..texts import named_ranks
from ..threads import Deadline
from .launchers import identify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


BARRIER_TIMEOUT = timedelta(seconds=60)


class _Rendezvouses:
    """The rendezvous of each group and purpose, created on first use.

    It is recreated after a recovery: the ranks may have been at different barriers, and new
    processes at none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._known: weakref.WeakKeyDictionary[ProcessGroup, dict[str, tuple[int, Rendezvous]]] = (
            weakref.WeakKeyDictionary()
        )
        # All of them send their requests from one thread.
        self._clients: weakref.WeakKeyDictionary[ProcessGroup, StoreClient] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, group: ProcessGroup, purpose: str) -> Rendezvous:
        with self._lock:
            if self._pid != os.getpid():
                self._forget()  # a forked child would share the parent's connection and count
            job = jobs.known
            recovered = 0 if job is None else job.rendezvous.recovered
            known = self._known.setdefault(group, {})
            if purpose not in known or known[purpose][0] != recovered:
                known[purpose] = recovered, self._new(group, purpose, recovered)
            return known[purpose][1]

    def _new(self, group: ProcessGroup, purpose: str, recovered: int) -> Rendezvous:
        world = tables.world()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1 or world is None or not tables.has_peers():
            return Rendezvous(None, rank, size)
        prefix = f"reloadpg/{purpose}/{tables.name_of(group)}"
        if recovered:
            prefix += f"/after {recovered}"
        root = stores.root_store_of_job(world)
        if world not in self._clients:
            self._clients[world] = StoreClient(root, dist.get_rank())
        return Rendezvous(root, rank, size, client=self._clients[world], prefix=prefix)


_rendezvouses = _Rendezvouses()


def barrier(
    reason: str = "",
    *,
    timeout: timedelta | float = BARRIER_TIMEOUT,
    group: ProcessGroup | None = None,
) -> None:
    """Wait until all ranks of a group arrive, or raise an error that names the missing ranks.

    Collective over the group, whose ranks must call it in the same order; blocking, with a timeout;
    handles signals. The ranks meet on the rendezvous store, so the barrier also works while groups
    are offloaded, and it never starts an accelerator's first collective, whose timeout NCCL ignores
    (pytorch#124950). It does not wait for work queued on devices. A rank that arrives too late
    raises the same error. A process without launcher and group returns immediately.

    Args:
        reason: the purpose of the barrier, for the error.
        timeout: how long to wait; a timedelta, or seconds; 60 s by default.
        group: the group; the default group if None. Ranks outside it return immediately.

    Raises:
        RendezvousTimeoutError: not all ranks arrived. Names reason, seconds and the missing ranks;
            also a TimeoutError.
        ReloadpgError: several ranks, but no group yet.
        InvalidOptionError: an argument is invalid. Also a ValueError.
    """
    if not isinstance(reason, str):
        raise InvalidOptionError(
            f"barrier(reason={reason!r}) is not a text. Nothing was done. Call for example "
            f'barrier("after eval", timeout=60, group=group).'
        )
    seconds = as_timedelta(timeout, "timeout").total_seconds()
    if tables.is_non_member(group) and group is not None:
        return
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidOptionError(
            f"barrier(group={group!r}) is not a process group. Nothing was done. Pass a group that "
            f"new_group() returned, or None for the default group."
        )
    what = f"barrier {reason!r}" if reason else "barrier"
    chosen = tables.world() if group is None else group
    if chosen is None:
        if identify(os.environ).world_size != 1:
            raise _no_group(f"barrier({reason!r})")
        return
    rendezvous = _rendezvouses.of(chosen, "barrier")
    with _in_job_ranks(chosen, what), rendezvous.open(what, ("arrive",), seconds) as round_:
        round_.barrier("arrive")


def leave_together(
    timeout: timedelta, group: ProcessGroup | None = None, purpose: str = "exit"
) -> None:
    """Reach a last barrier with all ranks of a group, or of the job.

    Collective, blocking, with a timeout. For the job, rank 0, which hosts the store, leaves last:
    otherwise the store could end with its process before other ranks have read the decision.
    """
    rendezvous, seconds = rendezvous_of(group, purpose), timeout.total_seconds()
    with _in_job_ranks(group, purpose), rendezvous.open(purpose, ("arrive",), seconds) as round_:
        round_.barrier("arrive")
    if rendezvous.alone or group not in (None, tables.world()):
        return
    count, all_left = f"left/{round_.label}", f"all left/{round_.label}"

    def leave(store: Store) -> None:
        if rendezvous.rank == 0:
            store.wait([all_left], timeout)
        elif store.add(count, 1) == rendezvous.size - 1:
            store.set(all_left, "1")

    try:
        rendezvous.ask(leave, Deadline(purpose, seconds))
    except (ReloadpgError, RuntimeError, TimeoutError) as error:
        # All ranks had arrived; a later death of one does not matter here.
        logging.getLogger(__name__).warning(
            "%s: not all ranks confirmed their exit: %s", purpose, error
        )


def rendezvous_of(group: ProcessGroup | None, purpose: str) -> Rendezvous:
    """The rendezvous of a group, or of the job, for one purpose. Local."""
    chosen = tables.world() if group is None else group
    if chosen is None:
        raise _no_group(purpose)
    return _rendezvouses.of(chosen, purpose)


def _no_group(what: str) -> ReloadpgError:
    return ReloadpgError(
        f"{what}: the launcher started several ranks, but this process has no default group. "
        f"Nothing was done. Call reloadpg.environment.init_distributed() first."
    )


@contextmanager
def _in_job_ranks(group: ProcessGroup | None, what: str) -> Iterator[None]:
    """Convert group ranks to ranks of the job in a timeout error."""
    try:
        yield
    except RendezvousTimeoutError as error:
        members = tuple(map(int, dist.get_process_group_ranks(group)))
        if not error.missing:  # the store itself did not respond
            raise
        missing = [members[rank] for rank in error.missing]
        late = " This rank arrived too late." if dist.get_rank() in missing else ""
        raise RendezvousTimeoutError(
            f"{what}: {error.arrived} of {len(members)} ranks arrived within {error.seconds:g} s; "
            f"missing: {named_ranks(missing)}.{late} No collective was started. Find out "
            f"why they are delayed (py-spy dump on their nodes), then end the job or try again.",
            phase=what,
            seconds=error.seconds,
            arrived=error.arrived,
            missing=missing,
        ) from None
