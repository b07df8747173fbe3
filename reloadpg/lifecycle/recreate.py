"""Destruction of communicators, and their rebuild by replaying their creation."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup, Store

from ..c10d import backends, nccl, stores, tables
from ..groups.creation import Construction
from ..groups.managed import ManagedGroup
from ..groups.proxy import ReloadableProcessGroup
from ..rendezvous.worker_thread import Attempt, Wait
from .abort import abort_communicator, discard, let_go, parts_of
from .callbacks import callbacks
from .connect import (
    Connect,
    check_group,
    connect_group,
    connects_alone,
    late_connections,
    needs_collective,
)
from .job import Job
from .operation import Operation
from .suspend import released_backends

_ASK_S = 0.1
"""Seconds after which a thread that waits for another one checks whether it was abandoned."""


@dataclass
class Releases:
    """The communicators that one offload destroys.

    Where communicators may share a lock, each is destroyed in an NCCL group call: NCCL destroys at
    the end of the call, when torch holds no lock (:mod:`reloadpg.c10d.nccl`).

    Each is recorded in the job before it is detached, until it is destroyed: if the destruction
    hangs or is interrupted, the communicator is aborted, where an abort can end a destroy.
    """

    job: Job
    released: dict[str, weakref.ref[Any]] = field(default_factory=dict)

    def release(self, group: ManagedGroup, attempt: Attempt, index: int) -> None:
        """Destroy the communicator of a live group. Blocking; an action of an operation."""
        with attempt as wanted:
            if not wanted:
                return
            inner = group.communicator
            parts = parts_of(inner, group.construction)
            monitored = backends.monitored_backends(inner)
            locks = nccl.shares_lock(released_backends(inner, group.construction))
            self.job.doomed[group] = repr(group), parts
            # Detached first: a collective of another thread must find the placeholder, and not a
            # communicator that is being destroyed.
            group.detach()
        if group.has_hooks:
            backends.await_hooks(inner)
        if group.construction.destroy is not None:
            group.construction.destroy(inner)
        else:
            # An abort of this engine waits for the lock that its destroy holds, and then uses the
            # communicator that was destroyed. The destroy ends when the peers abort theirs.
            doomed = self.job.doomed.pop(group, None) if locks else None
            try:
                _end(parts, locks)
            except BaseException:
                if doomed is not None:
                    self.job.doomed[group] = doomed
                raise
        self.job.doomed.pop(group, None)
        if not group.construction.is_mixed:
            self.released[repr(group)] = weakref.ref(inner)
        del inner, parts
        let_go(monitored, aborted=False)

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


class Rebuilds:
    """The communicators that one reload or recovery creates."""

    def __init__(self, op: Operation, job: Job, connect: Connect) -> None:
        self._world = op.world
        self._stores = job.creation_stores  # an abandoned thread must not use those that follow
        self._generation = op.generation
        self._label = op.round.label
        self._notified = op.round.notified
        self._connect = connect
        self._created: dict[ManagedGroup, threading.Event] = {}
        self._after: dict[ManagedGroup, threading.Event] = {}

    def prepare(self, groups: Sequence[ManagedGroup]) -> None:
        """Record the groups to create, in order, and their names in the store.

        Torch writes a group's name, ranks and timeout into the caller's options object, where the
        backend reads them. So groups that share options are created one after another.
        """
        last: dict[int, threading.Event] = {}
        for group in groups:
            group.names_in_store.append(self._name(group))
            created = self._created[group] = threading.Event()
            options = group.construction.options
            if options is not None:
                if id(options) in last:
                    self._after[group] = last[id(options)]
                last[id(options)] = created

    def rebuild(self, group: ManagedGroup, attempt: Attempt, index: int) -> None:
        """Recreate the communicator of an offloaded group; an action of an operation.

        If possible without a collective, the same thread also connects it, since only this thread
        uses the store client of the communicator.
        """
        if group.communicator is None:
            try:
                before = self._after.get(group)
                while before is not None and not before.wait(_ASK_S):
                    if attempt.abandoned:  # the other creation may never return
                        return
                self._rebuild(group, attempt, index)
            finally:
                self._created[group].set()
        if self._connect != "none" and not attempt.abandoned and connects_alone(group):
            backend = connect_group(group)
            if attempt.abandoned:
                # ``ProcessGroupNCCL`` had no communicator yet when it was aborted, and would keep
                # the one that it has got since (torch 2.8.0 to 2.15.0 over stand-ins for NCCL).
                self._notified.wait()  # an abort makes other members fail, as in `_rebuild`
                abort_communicator(backend)

    def check(self, group: ManagedGroup, attempt: Attempt, index: int) -> None:
        check_group(group, self._connect)

    def _rebuild(self, group: ManagedGroup, attempt: Attempt, index: int) -> None:
        if attempt.abandoned:  # its name and store client belong to an operation that has ended
            return
        construction = group.construction
        store = self._store(index, construction)
        device = group.device
        if device is not None and device.type not in construction.devices:
            device = None  # torch binds a split to the default group's device
        # A user's function may give its group the old name. Torch must not count a new generation:
        # groups that other threads create here would get other names than on the other ranks.
        freed = tables.name_freed(group.proxy) if construction.is_handed_over else nullcontext()
        with tables.Unseen(), freed:
            # A recovery also aborts the backends that stay alive in an offload.
            inner = construction.replay(self._name(group), store, device, whole=group.kept is None)
        if construction.is_handed_over and (
            not isinstance(inner, ProcessGroup)
            or isinstance(inner, ReloadableProcessGroup)
            or tables.is_known(inner)
        ):
            raise TypeError(
                f"the rebuild function given to register_group() returned {inner!r}; it must "
                "return the group that it has created"
            )
        if isinstance(inner, ReloadableProcessGroup) or inner is group.last_inner:
            raise RuntimeError(
                "its backend returned the object that was released: such a group manages itself; "
                "leave it out with install(backends=...)"
            )
        # The operation may have ended while torch created the group, which cannot be interrupted.
        with attempt as wanted:
            if wanted:
                group.attach(inner, self._generation)
                group.history.strategy = "recreate"
        if not wanted:
            # The destruction makes other members fail, so they are notified of the reason first.
            self._notified.wait()
            discard(inner)

    def _store(self, index: int, construction: Construction) -> Store:
        """The store that a worker thread uses to create a group. Blocking until connected."""
        store = stores.root_store(self._world) if self._stores is None else self._stores.get(index)
        return (
            store
            if construction.is_world
            else PrefixStore(f"{tables.name_of(self._world)}/", store)
        )

    def _name(self, group: ManagedGroup) -> str:
        return group.construction.name_of_generation(f"{self._generation}.{self._label}")


def rebuild(
    op: Operation,
    job: Job,
    gone: Sequence[ManagedGroup],
    connect: Connect,
    *,
    resumed: Sequence[ManagedGroup] = (),
) -> None:
    """Rebuild the groups in ``gone``, call the callbacks, and commit. Collective, with timeouts.

    ``resumed`` are groups that were resumed, which may need to be connected.
    """
    rebuilds = Rebuilds(op, job, connect)
    _delete_spent_keys(op, job, gone)
    if job.creation_stores is not None and gone:
        with op.record.timed("store", measure=False):
            clients = partial(job.creation_stores.connect, min(op.creators, len(gone)))
            op.do("done", clients, "connecting to the store")
    rebuilds.prepare(gone)
    back = [g for g in op.groups if g in gone or (connect != "none" and g in resumed)]
    op.each("done", back, rebuilds.rebuild, parallelism=op.creators)
    checked = [
        g for g in back if connect == "canary" or (connect == "eager" and needs_collective(g))
    ]
    op.each("done", checked, rebuilds.check, parallelism=1)
    op.record.measure("rebuilt")
    if connect == "none" and op.options.recoverable and (text := late_connections(back)):
        op.record.warnings.append(f"{text} Pass connect='eager'.")
    op.barrier("done")
    op.call_after([*op.of_generations(callbacks.reload, gone), *callbacks.reload])
    op.complete("" if op.record.groups else "no reloadable group here")
    job.watch_dumps()


def leave_out(op: Operation) -> None:
    """Mark the groups that an operation leaves without a communicator. Local, idempotent."""
    for group in op.skipped:
        text = "It was left out of the last reload (skip). The next one without skip rebuilds it."
        group.leave_out(text)
        op.record.warnings.append(f"{group!r} was left out")


def _delete_spent_keys(op: Operation, job: Job, groups: Sequence[ManagedGroup]) -> None:
    spent = [key for group in groups for key in spent_keys(group, op.world)]
    if not spent or job.rendezvous.alone:
        return

    def delete(store: Store) -> None:
        for key in spent:
            with suppress(NotImplementedError):
                store.delete_key(key)

    with op.record.timed("store"):
        job.rendezvous.ask_root(delete, Wait(op.name, op.round.seconds, op.round.phase))


def spent_keys(group: ManagedGroup, world: ProcessGroup) -> list[str]:
    """List the keys in the job's store that no rank reads any more, each once.

    Call it before a rebuild, when no member uses the earlier generations.
    """
    names, group.names_in_store = group.names_in_store, []
    construction = group.construction
    devices = construction.devices if group.kept is None else construction.released
    if len(set(construction.devices.values())) == 1:
        # torch creates one backend, for the first device
        devices = dict(list(devices.items())[:1])
    under = "" if construction.is_world else f"{tables.name_of(world)}//"
    return [
        under + key
        for name in names
        for key in stores.rendezvous_keys(name, devices, construction.rank, len(construction.ranks))
    ]
