"""Destruction of communicators: with the other members, or by an abort without them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup

from ..c10d import backends, nccl, tables
from ..errors import ReloadpgError
from ..groups.creation import Construction
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState
from ..threads import CancelToken, Task
from .job import Job, Unfinished


@dataclass
class Releases:
    """The communicators that one offload destroys: the action of its threads.

    Where communicators may share a lock, each is destroyed in an NCCL group call: NCCL destroys at
    the end of the call, when torch holds no lock (:mod:`reloadpg.c10d.nccl`).

    Each is unfinished from the moment it is detached until it is destroyed: if the destruction
    hangs, it is aborted, where an abort can end a destroy.
    """

    job: Job
    released: dict[str, weakref.ref[Any]] = field(default_factory=dict)

    def destroy(self, group: ManagedGroup, wanted: CancelToken, _: int) -> None:
        """Destroy the communicator of a live group. Blocking, collective over its members."""
        let_go(self._destroy(group, wanted), aborted=False)

    def _destroy(self, group: ManagedGroup, wanted: CancelToken) -> list[Any]:
        """Destroy it, and return the backends that another thread is to drop."""
        with wanted as is_wanted:
            if not is_wanted:
                return []
            inner = group.communicator
            parts = parts_of(inner, group.construction)
            monitored = backends.monitored_backends(inner)
            locks = nccl.shares_lock(released_backends(inner, group.construction))
            entry = Unfinished(repr(group), parts)
            self.job.unfinished.append(entry)
            # Detached first: a collective of another thread must find the placeholder, and not
            # a communicator that is being destroyed.
            group.detach()
        if group.carried.has_hooks:
            backends.await_hooks(inner)
        # An abort of this engine waits for the lock that its destroy holds, and then uses the
        # communicator that was destroyed. The destroy ends when the peers abort theirs.
        with entry.without_aborts() if locks else nullcontext():
            _end(parts, locks)
        if entry.task is None:  # otherwise it is being aborted
            self.job.unfinished.remove(entry)
        if not group.construction.is_mixed:
            self.released[repr(group)] = weakref.ref(inner)
        return monitored

    def held(self) -> list[str]:
        """Warn of groups whose objects created by torch are still referenced. Local."""
        return [
            f"{name}: the object that torch created for it is still referenced outside the "
            "reloadable group; use only groups that torch.distributed returned after "
            "reloadpg.install()"
            for name, inner in self.released.items()
            if inner() is not None
        ]


def _end(parts: Iterable[Any], shares_lock: bool) -> None:
    """Destroy communicators. Blocking."""
    for part in parts:
        if not shares_lock:
            part.shutdown()
            continue
        with nccl.group_call() as grouped:
            if not grouped:  # a destroy would wait for peers in a lock that other threads need
                part.abort()
            part.shutdown()


def abort(
    job: Job,
    groups: Sequence[ManagedGroup],
    state: GroupState,
    reason: str = "",
    *,
    whole: bool = False,
) -> list[Unfinished]:
    """Abort the communicators of groups without waiting for other ranks. Local, non-blocking.

    All groups are marked first: a collective that another thread starts on one of them then raises.
    It does not wait for peers that have aborted. Their communicators, and the communicators that an
    offload was destroying, are then aborted, each in a separate thread: an abort can hang while
    another one is stuck, and several aborts in sequence have hung (pytorch#119797, #150690).

    If no thread can be started, the next call aborts the recorded communicators. With ``whole``,
    backends that stay alive in an offload are aborted too. Groups that the program has shut down or
    aborted, and not destroyed, are then marked as well. Returns the running aborts.
    """
    for group in groups:
        if group.state is not GroupState.DESTROYED or whole:
            _detach(job, group, state, reason, whole)
    aborted = [entry for entry in job.unfinished if entry.task is None and entry.parts]
    with suppress(ReloadpgError):  # no thread can be started: the next operation tries again
        for entry in aborted:
            entry.abort(_abort)
    return [entry for entry in aborted if entry.task is not None]


def _detach(job: Job, group: ManagedGroup, state: GroupState, reason: str, whole: bool) -> None:
    """Mark a group, and record what is to be aborted: the aborting thread drops it."""
    shown, parts = repr(group), []
    if (inner := group.communicator) is not None:
        parts += [inner] if whole else parts_of(inner, group.construction)
        group.detach(state, reason)
    elif state is GroupState.FAILED:
        group.fail(reason)
    if whole and group.kept is not None:
        parts.append(group.kept)
        group.release_kept()
    if parts:
        job.unfinished.append(Unfinished(shown, parts))


def _abort(parts: list[Any]) -> None:
    # Gloo has no abort: its destructor waits for pending work and then closes the connections. So
    # the last references are dropped in this thread, not in the caller's.
    while parts:
        monitored = backends.monitored_backends(parts[-1])
        abort_communicator(parts[-1])
        parts.pop()
        let_go(monitored, aborted=True)


_aborting: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()


def abort_communicator(part: Any) -> None:
    """Abort a group or backend, after another thread that does. Blocking, idempotent.

    NCCL's abort takes up to half a second. ``ProcessGroupNCCL2`` would pass a communicator to it
    that another thread has just freed (torch 2.15.0 over NVIDIA's host code of NCCL 2.30.7).
    """
    lock = _aborting.setdefault(part, threading.Lock())
    with lock, suppress(RuntimeError):
        nccl.end_calls(part)
        with nccl.group_call():
            part.abort()


def let_go(released: list[Any], *, aborted: bool) -> None:
    """Drop the references to backends that were shut down or aborted. Local, non-blocking.

    Their destructors wait for a thread of torch that may have missed the signal to end
    (:func:`~reloadpg.c10d.backends.monitored_backends`), so another thread drops them. A second
    abort wakes that thread; after a shutdown, it would use the communicator that was destroyed.
    """

    def drop() -> None:
        if aborted:
            backends.await_monitors(*released)
            for backend in released:
                with suppress(RuntimeError):
                    backend.abort()
                del backend
        released.clear()

    if released:
        with suppress(ReloadpgError):  # no thread can be started: the caller drops them
            Task(drop, "drop")


def discard(inner: ProcessGroup) -> None:
    """Destroy a group that no other code has seen, without waiting for other ranks. Local."""
    tables.drop_generation(inner)
    monitored = backends.monitored_backends(inner)
    with suppress(RuntimeError):
        inner.abort()
    let_go(monitored, aborted=True)


def released_backends(inner: ProcessGroup, construction: Construction) -> list[Any]:
    """List the backend objects of a group that are released, each once."""
    live = backends.live_backends(inner, construction.selected)
    return list({id(backend): backend for backend in live.values()}.values())


def parts_of(inner: ProcessGroup, construction: Construction) -> list[Any]:
    """List the parts of a live group to release: the group, or the selected backends if mixed."""
    return released_backends(inner, construction) if construction.is_mixed else [inner]
