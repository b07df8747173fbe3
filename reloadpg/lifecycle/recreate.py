"""Rebuild of communicators, by a replay of the calls that created them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store

from ..c10d import stores, tables
from ..groups.managed import ManagedGroup
from ..groups.proxy import ReloadableProcessGroup
from ..rendezvous.worker_thread import Attempt, Wait
from .callbacks import callbacks
from .connect import (
    Connect,
    check_group,
    connect_group,
    connects_alone,
    late_connections,
    needs_collective,
)
from .destroy import abort_communicator, discard
from .job import Job
from .operation import Operation, Worker

_ASK_S = 0.1
"""Seconds after which a thread that waits for another one checks whether it was abandoned."""


def rebuild(
    op: Operation,
    job: Job,
    gone: Sequence[ManagedGroup],
    connect: Connect,
    *,
    resumed: Sequence[ManagedGroup] = (),
) -> None:
    """Rebuild the groups in ``gone``, and call the callbacks. Collective, with timeouts.

    ``resumed`` are groups that were resumed, which may need to be connected.
    """
    _delete_spent_keys(op, job, gone)
    clients = job.creation_stores  # an abandoned thread must not use those that follow
    if clients is not None and gone:
        with op.timed("store", measure=False):
            count = min(op.creators, len(gone))
            op.do(partial(clients.connect, count), "connecting to the store")
    turns = _Turns(gone)
    suffix = f"{op.generation}.{op.round.label}"
    names = {group: group.construction.name_of_generation(suffix) for group in gone}
    for group, name in names.items():
        group.names_in_store.append(name)

    def create(worker: Worker) -> None:
        for group in worker:
            if group.communicator is None:
                if not turns.wait(group, worker.attempt):  # the other creation may never return
                    return
                client = (
                    stores.root_store(op.world) if clients is None else clients.get(worker.index)
                )
                try:
                    inner = replay(group, names[group], op.world, client)
                finally:
                    turns.end(group)
                # The operation may have ended while torch created the group, which cannot be
                # interrupted.
                with worker.attempt as wanted:
                    if wanted:
                        group.attach(inner, op.generation)
                        group.history.strategy = "recreate"
                if not wanted:
                    # The destruction makes other members fail, so they are notified first.
                    op.round.notified.wait()
                    discard(inner)
                del inner  # the loop must not hold it any longer
            if connect != "none" and not worker.attempt.abandoned and connects_alone(group):
                # In this thread: only it uses the store client of the communicator.
                backend = connect_group(group)
                if worker.attempt.abandoned:
                    # ``ProcessGroupNCCL`` had no communicator yet when it was aborted, and would
                    # keep the one that it has got since (torch 2.8.0 to 2.15.0 over stand-ins).
                    op.round.notified.wait()
                    abort_communicator(backend)
                del backend

    def check(worker: Worker) -> None:
        for group in worker:
            check_group(group, connect)

    back = [g for g in op.groups if g in gone or (connect != "none" and g in resumed)]
    op.over(back, create, parallelism=op.creators)
    checked = [
        g for g in back if connect == "canary" or (connect == "eager" and needs_collective(g))
    ]
    op.over(checked, check, parallelism=1)
    op.measure("rebuilt")
    if connect == "none" and op.options.recoverable and (text := late_connections(back)):
        op.warnings.append(f"{text} Pass connect='eager'.")
    op.barrier("done")
    op.note = "" if op.reports else "no reloadable group here"
    op.call_after([*op.of_generations(callbacks.reload, gone), *callbacks.reload])
    job.watch_dumps()


def replay(group: ManagedGroup, name: str, world: ProcessGroup, client: Store) -> ProcessGroup:
    """Create the next generation of a group, by the call that created it. Blocking, collective.

    Args:
        group: a group without a communicator.
        name: the name of the generation; see :meth:`.Construction.replay`.
        world: the default group.
        client: a client of the job's store that only this thread uses.
    """
    construction = group.construction
    store = client if construction.is_world else PrefixStore(f"{tables.name_of(world)}/", client)
    device: torch.device | None = group.device
    if device is not None and device.type not in construction.devices:
        device = None  # torch binds a split to the default group's device
    # A user's function may give its group the old name. Torch must not count a new generation:
    # groups that other threads create here would get other names than on the other ranks.
    freed = tables.name_freed(group.proxy) if construction.is_handed_over else nullcontext()
    with tables.Unseen(), freed:
        # A recovery also aborts the backends that stay alive in an offload.
        inner = construction.replay(name, store, device, whole=group.kept is None)
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
    return inner


class _Turns:
    """The turns of groups that share an options object, which are created one after another.

    Torch writes a group's name, ranks and timeout into the caller's object, where the backend reads
    them.
    """

    def __init__(self, groups: Sequence[ManagedGroup]) -> None:
        self._ended = {group: threading.Event() for group in groups}
        self._before: dict[ManagedGroup, ManagedGroup] = {}
        last: dict[int, ManagedGroup] = {}
        for group in groups:
            options = group.construction.options
            if options is not None:
                if id(options) in last:
                    self._before[group] = last[id(options)]
                last[id(options)] = group

    def wait(self, group: ManagedGroup, attempt: Attempt) -> bool:
        """Wait for the turn of a group; return False if the work was abandoned."""
        before = self._before.get(group)
        while before is not None and not self._ended[before].wait(_ASK_S):
            if attempt.abandoned:
                return False
        return not attempt.abandoned

    def end(self, group: ManagedGroup) -> None:
        self._ended[group].set()


def leave_out(op: Operation) -> None:
    """Mark the groups that an operation leaves without a communicator. Local, idempotent."""
    for group in op.skipped:
        text = "It was left out of the last reload (skip). The next one without skip rebuilds it."
        group.leave_out(text)
        op.warnings.append(f"{group!r} was left out")


def _delete_spent_keys(op: Operation, job: Job, groups: Sequence[ManagedGroup]) -> None:
    spent = [key for group in groups for key in spent_keys(group, op.world)]
    if not spent or job.rendezvous.alone:
        return

    def delete(store: Store) -> None:
        for key in spent:
            with suppress(NotImplementedError):
                store.delete_key(key)

    with op.timed("store"):
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
