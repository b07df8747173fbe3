"""The user's barrier with a timeout: on the store, without a collective.

Do not assume that it waits for work on devices: it synchronizes processes only.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..c10d import stores, tables
from ..errors import InvalidOptionError, PeerFailedError, ReloadpgError, RendezvousTimeoutError
from ..lifecycle.job import Job, jobs
from ..rendezvous.decision import Decision
from ..rendezvous.protocol import GaveUp
from ..rendezvous.round import Rendezvous, Round
from ..rendezvous.store_client import StoreClient
from ..settings import as_timedelta
from ..texts import named_ranks
from ..threads import Deadline
from .launchers import identify
from .scopes import open_scopes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store


BARRIER_TIMEOUT = timedelta(seconds=60)

_LOOK_S = 1.0
"""Seconds between two looks at the blocks around a barrier, and for each of them."""


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
            job = _job()
            # All of them send their requests from one thread.
            self._clients[world] = (
                StoreClient(root, dist.get_rank()) if job is None else job.rendezvous.client
            )
        return Rendezvous(root, rank, size, client=self._clients[world], prefix=prefix)


_rendezvouses = _Rendezvouses()


def _job() -> Job | None:
    """The job of the default group; None in a forked child, or if the library is off. Local."""
    with suppress(ReloadpgError):
        return jobs.current("barrier")
    return None


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

    It ends early, within some seconds, if another rank has left a block around it by an exception
    (``process_group_scope``, ``init_distributed``), or if a process of this host has ended: one
    that has called a function of this library since the default group was created.

    Args:
        reason: the purpose of the barrier, for the error.
        timeout: how long to wait; a timedelta, or seconds; 60 s by default.
        group: the group; the default group if None. Ranks outside it return immediately.

    Raises:
        RendezvousTimeoutError: not all ranks arrived. Names reason, seconds and the missing ranks;
            also a TimeoutError.
        PeerFailedError: another rank has left the block, or its process has ended.
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
    _meet(chosen, "barrier", what, seconds)


def leave_together(
    timeout: timedelta, group: ProcessGroup | None = None, purpose: str = "exit"
) -> None:
    """Reach a last barrier with all ranks of a group, or of the job.

    Collective, blocking, with a timeout. For the job, rank 0, which hosts the store, leaves last:
    otherwise the store could end with its process before other ranks have read the decision.
    """
    rendezvous, seconds = rendezvous_of(group, purpose), timeout.total_seconds()
    round_ = _meet(group, purpose, purpose, seconds)
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


def _meet(group: ProcessGroup | None, purpose: str, what: str, seconds: float) -> Round:
    """Reach a barrier on the store. Collective over the group; blocking, with a timeout."""
    rendezvous, watch = rendezvous_of(group, purpose), _Watch(group, what)
    try:
        with rendezvous.open(what, ("arrive",), seconds, watch.look) as round_:
            round_.barrier("arrive")
    except _PeerLeft as left:
        raise left.error from None
    except (RendezvousTimeoutError, PeerFailedError) as error:
        # A rank that knows more may have ended this barrier before this rank has looked.
        raise watch.left_a_block() or _in_job_ranks(error, watch.members, what) from None
    return round_


class _PeerLeft(BaseException):
    """Another rank has left a block around a barrier.

    Not an Exception, so that this rank does not wait for an answer of that rank.
    """

    def __init__(self, error: PeerFailedError) -> None:
        super().__init__(str(error))
        self.error = error


class _Watch:
    """What a rank that waits at a barrier looks for: other ranks that cannot come.

    Args:
        group: the group of the barrier.
        what: the barrier, for messages.

    Attributes:
        members: its ranks in the job.
    """

    def __init__(self, group: ProcessGroup | None, what: str) -> None:
        self._what = what
        self.members = tuple(map(int, dist.get_process_group_ranks(group)))
        # In large jobs less often: all ranks ask one server.
        self._pause_s = max(_LOOK_S, dist.get_world_size() / 1000)
        self._next = time.monotonic() + self._pause_s
        self._job = _job() if tables.has_peers() else None
        if self._job is not None:
            self._job.rendezvous.count_job()  # from now on other ranks watch this process

    def look(self) -> None:
        """Raise if a rank cannot come. Local; sends requests once per second at most."""
        if time.monotonic() < self._next:
            return
        if error := self.left_a_block():
            raise _PeerLeft(error)
        if self._job is not None:
            self._look_at_processes(self._job.rendezvous)
        self._next = time.monotonic() + self._pause_s

    def _look_at_processes(self, job: Rendezvous) -> None:
        if not job.state.confirmed:
            with suppress(ReloadpgError):
                job.watch(Deadline(self._what, _LOOK_S))
        for rank in job.peers.dead():
            if rank in self.members:
                text = f"its process on the host of rank {job.rank} has ended"
                dead = self.members.index(rank)
                raise GaveUp(Decision("failed", dead, text, dead=(dead,)))

    def left_a_block(self) -> PeerFailedError | None:
        """The error for a rank that has left a block around the barrier; None without one."""
        for group in [group for scope in open_scopes for group in scope.meets_on()]:
            exit_ = rendezvous_of(group, "exit")
            if exit_.alone:
                continue
            with suppress(ReloadpgError):
                exit_.count_job(_LOOK_S)
                now = exit_.drive(exit_.state.read(), Deadline(self._what, _LOOK_S))
                if now.last.operation == "exit" and now.number > exit_.state.next:
                    return self._error(now.last, group)
        return None

    def _error(self, decision: Decision, group: ProcessGroup) -> PeerFailedError:
        rank = dist.get_process_group_ranks(group)[decision.rank]
        return PeerFailedError(
            f"{self._what}: rank {rank} has left the block around it: "
            f"{decision.text or 'it had waited for the others at the end of the block'}. Its "
            f"groups of the block are aborted. Let this error end the block here, too.",
            rank=rank,
            phase="arrive",
        )


def _in_job_ranks(
    error: RendezvousTimeoutError | PeerFailedError, members: Sequence[int], what: str
) -> ReloadpgError:
    """The error of a barrier of a group, with ranks of the job."""
    missing = [members[rank] for rank in error.missing]
    if isinstance(error, PeerFailedError):
        text = str(error)
        if [*members] != [*range(len(members))]:
            text += f"\nThese are ranks of the group, which has {named_ranks(members)} of the job."
        return PeerFailedError(text, rank=members[error.rank], phase=error.phase, missing=missing)
    if not missing:  # the store itself did not respond
        return error
    late = " This rank arrived too late." if dist.get_rank() in missing else ""
    return RendezvousTimeoutError(
        f"{what}: {error.arrived} of {len(members)} ranks arrived within {error.seconds:g} s; "
        f"missing: {named_ranks(missing)}.{late} No collective was started. Find out "
        f"why they are delayed (py-spy dump on their nodes), then end the job or try again.",
        phase=what,
        seconds=error.seconds,
        arrived=error.arrived,
        missing=missing,
    )
