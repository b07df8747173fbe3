"""The bounded barrier of users: ranks meet on the rendezvous store, never on a collective.

Do not assume that it waits for work on devices: it says that the ranks' processes are here.
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
from torch._C._distributed_c10d import PrefixStore

from reloadpg import c10d
from reloadpg.environment.bounds import as_timedelta
from reloadpg.environment.detect import detect_environment
from reloadpg.environment.errors import GroupNotInitializedError
from reloadpg.errors import (
    InvalidOptionError,
    ReloadpgError,
    RendezvousTimeoutError,
    format_ranks,
)
from reloadpg.rendezvous.round import Rendezvous, Round
from reloadpg.rendezvous.worker_thread import Wait

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

__all__ = ["barrier", "job_round", "part", "wait_for_rank_zero"]


class _Meetings:
    """The meeting place of each group and purpose, made at the first use of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: weakref.WeakKeyDictionary[ProcessGroup, dict[str, Rendezvous]] = (
            weakref.WeakKeyDictionary()
        )
        self._pid = 0

    def of(self, group: ProcessGroup, purpose: str) -> Rendezvous:
        with self._lock:
            if self._pid != os.getpid():
                # After a fork the child would share the parent's connection and its count.
                self._pid = os.getpid()
                self._places = weakref.WeakKeyDictionary()
            places = self._places.setdefault(group, {})
            if purpose not in places:
                places[purpose] = _meeting_place(group, purpose)
            return places[purpose]


_meetings = _Meetings()


def _meeting_place(group: ProcessGroup, purpose: str) -> Rendezvous:
    world = c10d.world()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1 or world is None or not c10d.has_peers():
        return Rendezvous(None, rank, size)
    prefix = f"reloadpg/{purpose}/{c10d.name_of(group)}"
    return Rendezvous(PrefixStore(prefix, c10d.root_store(world)), rank, size)


def barrier(timeout: timedelta | float, reason: str, group: ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group are here, or say which are not.

    Collective over the group, whose ranks all make the same barriers in the same order; blocking,
    bounded, signals are handled meanwhile. The ranks meet on the rendezvous store, so the barrier
    also works while groups are offloaded, and never makes an accelerator's first call: NCCL's
    first collective ignores its timeout (pytorch#124950). It does not wait for work queued on
    devices. A rank that comes after the others gave up gets the same error at once. A process
    without launcher and without group is alone and returns.

    Args:
        timeout: how long to wait; a timedelta, or seconds.
        reason: what the ranks meet for; named in the error.
        group: the group; the default group if None. Ranks outside it return at once.

    Raises:
        RendezvousTimeoutError: not all ranks came. Names reason, seconds and the missing ranks;
            also a TimeoutError.
        GroupNotInitializedError: several ranks, but no group yet.
        InvalidOptionError: the timeout is not a time, or the group no group. Also a ValueError.
    """
    bound = as_timedelta(timeout, "timeout")
    if c10d.is_non_member(group) and group is not None:
        return
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidOptionError(
            f"barrier(group={group!r}) is not a process group. Nothing was done. Give what "
            f"new_group() returned, or None for the default group."
        )
    chosen = _group_or_world(group, f"barrier({reason!r})")
    if chosen is None:
        return
    seconds = bound.total_seconds()
    round_ = _meetings.of(chosen, "barrier").open(f"barrier {reason!r}", ("arrive",), seconds)
    with _told_in_ranks(chosen, f"barrier {reason!r}"):
        round_.barrier("arrive")


def job_round(purpose: str, gates: tuple[str, ...], bound: timedelta) -> Round:
    """Open a round of all ranks of the job for one purpose. Local; equal order on all ranks.

    Raises:
        GroupNotInitializedError: there is no default group.
    """
    return _job_place(purpose).open(purpose, gates, bound.total_seconds())


def part(bound: timedelta, purpose: str = "exit") -> None:
    """Pass a last gate with all ranks of the job; rank 0, who holds the store, leaves last.

    Collective, blocking, bounded. A rank 0 that ended its process right after a common barrier
    took the store away from ranks that had not yet read that all had come.

    Raises:
        RendezvousTimeoutError: not all ranks came.
        PeerFailedError: a rank failed on its way here.
    """
    place, seconds = _job_place(purpose), bound.total_seconds()
    round_ = place.open(purpose, ("arrive",), seconds)
    with _told_in_ranks(None, purpose):
        round_.barrier("arrive")
    if place.alone:
        return
    count, all_left = f"left/{round_.sequence}", f"all left/{round_.sequence}"

    def leave(store: Store) -> None:
        if place.rank == 0:
            store.wait([all_left], bound)
        elif store.add(count, 1) == place.size - 1:
            store.set(all_left, "1")

    try:
        place.ask(leave, Wait(purpose, seconds))
    except (ReloadpgError, RuntimeError, TimeoutError) as error:
        # All ranks have met; that one of them died since changes nothing for this one.
        logging.getLogger(__name__).warning("%s: not all ranks said goodbye: %s", purpose, error)


def _job_place(purpose: str) -> Rendezvous:
    world = c10d.world()
    if world is None:
        raise _no_group(purpose)
    return _meetings.of(world, purpose)


@contextmanager
def wait_for_rank_zero(timeout: timedelta | float) -> Iterator[None]:
    """The body of ``rank_zero_first``."""
    bound = as_timedelta(timeout, "timeout")
    world = _group_or_world(None, "rank_zero_first()")
    if world is None:
        yield
        return
    round_ = job_round("rank_zero_first", ("rank 0 is done",), bound)
    if dist.get_rank() == 0:
        try:
            yield
        except BaseException as error:
            round_.fail(error)
            raise
        round_.barrier("rank 0 is done")
    else:
        round_.barrier("rank 0 is done")
        yield


def _group_or_world(group: ProcessGroup | None, what: str) -> ProcessGroup | None:
    chosen = c10d.world() if group is None else group
    if chosen is None and detect_environment().world_size > 1:
        raise _no_group(what)
    return chosen


def _no_group(what: str) -> GroupNotInitializedError:
    return GroupNotInitializedError(
        f"{what}: the launcher started several ranks, but this process has no default group to "
        f"meet the others in. Nothing was done. Call reloadpg.init_distributed() first."
    )


@contextmanager
def _told_in_ranks(group: ProcessGroup | None, what: str) -> Iterator[None]:
    """Retell a time-out of group ranks with the ranks of the job."""
    try:
        yield
    except RendezvousTimeoutError as error:
        members = dist.get_process_group_ranks(group)
        if not error.missing:  # the store itself did not answer
            raise
        missing = [members[rank] for rank in error.missing]
        late = " This rank came too late." if dist.get_rank() in missing else ""
        raise RendezvousTimeoutError(
            f"{what}: {error.arrived} of {len(members)} ranks came within {error.seconds:g} s; "
            f"missing: rank {format_ranks(missing)}.{late} No collective was started. Find out "
            f"what holds them up (py-spy dump on their nodes), then end the job or meet again.",
            phase=what,
            seconds=error.seconds,
            arrived=error.arrived,
            missing=missing,
        ) from None
