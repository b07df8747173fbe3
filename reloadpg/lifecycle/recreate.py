"""The strategy "recreate": communicators are destroyed, and rebuilt by a replay of the calls that
created them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import PrefixStore, ProcessGroup, Store

from ..c10d import backends, devices, nccl, stores, tables
from ..errors import BorrowedError
from ..groups.loans import is_of
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState
from ..groups.proxy import ReloadableProcessGroup
from ..threads import CancelToken, Deadline
from .callbacks import Callback, callbacks, for_groups, for_sets
from .connect import (
    Connect,
    check_group,
    connect_group,
    connects_alone,
    needs_collective,
)
from .destroy import Releases, abort_communicator, discard, released_backends
from .operation import Operation

_CREATORS = 16384
"""Maximum number of creating threads over all ranks of a job (or one per rank, if it has more
ranks). The store's server has a file descriptor for each, and 65,536 is a common limit."""


def release(op: Operation) -> None:
    """The steps of an offload after its entry; see :func:`.offload.offload`.

    All that can fail comes before the first barrier: the callbacks, what other code holds of the
    groups, the device's work. When the last rank has arrived, every rank may change its groups.
    """
    live = let_go_of(op, live_groups(op), for_sets(callbacks.offload, op.scope.sets))
    quiesce(op)
    op.agree()
    destroy(op, live)


def live_groups(op: Operation) -> list[ManagedGroup]:
    """The live groups of an offload, in the order in which they are released. Local."""
    return [group for group in reversed(op.scope.groups) if group.is_live]


def let_go_of(op: Operation, live: list[ManagedGroup], due: list[Callback]) -> list[ManagedGroup]:
    """Call callbacks before communicators end, callbacks of groups last. Local.

    Returns:
        The groups that are still live: a callback may destroy groups.

    Raises:
        BorrowedError: other code holds what would end.
    """
    _refuse_borrowed(live, op.options.borrowed)
    call_callbacks(op, [*due, *for_groups(callbacks.offload, live)])
    for group in live:
        for package in callbacks.packages_of(group.proxy):  # it has dropped what it has taken
            group.loans.forget(package)
    return [group for group in live if group.is_live]


_UNCHANGED = (
    ". No group was changed on any rank. Remove the cause, then call offload() again on all ranks; "
    "or call reload() on all ranks, which calls the callbacks of on_reload()."
)
"""The state and the remedy after a callback has failed."""


def call_callbacks(op: Operation, due: list[Callback]) -> None:
    """Call callbacks of an offload. Until it is complete, callbacks of a reload are owed."""
    if due:
        op.scope.owe(op.scope.groups)
    op.call(due, _UNCHANGED)


def quiesce(op: Operation) -> None:
    """Wait for work that uses the groups on this rank; with a timeout.

    No collective is in flight, so this is where the devices of communicators can be read.
    """

    def synchronize() -> None:
        live = [group for group in op.scope.groups if group.is_live]
        devices.record({group.proxy: _devices_of(group) for group in live})
        devices.synchronize()

    op.workers.do("device", synchronize, "synchronizing the accelerator")
    backends.raise_for_aborted()  # the release of the communicators would hide it


def _devices_of(group: ManagedGroup) -> tuple[int, ...]:
    released = released_backends(group.communicator, group.construction)
    return tuple({index for backend in released for index in nccl.devices_of(backend)})


def destroy(op: Operation, live: list[ManagedGroup], reason: str = "") -> None:
    """Destroy the communicators of live groups, up to the last barrier. Collective.

    From here on, groups change: the operation completes, or sets them all to failed.
    """
    for group in live:
        group.history.record("recreate", group.memory_stats(), reason)
    releases = Releases(op.job)
    backends.await_monitors(*(group.communicator for group in live))
    op.workers.over(live, releases.destroy)
    op.barrier("released")
    op.record.warn(*releases.held())


def _refuse_borrowed(groups: Sequence[ManagedGroup], policy: str) -> None:
    """Refuse to release communicators whose pointers other code holds. Local.

    What a package has taken counts no longer once a callback of the group drops it.

    Raises:
        BorrowedError: with ``install(borrowed="refuse")``; it names the holders.
    """
    if policy != "refuse":
        return
    held = []
    for group in groups:
        dropped = callbacks.packages_of(group.proxy)
        for loan in group.loans.held():
            if loan.raw and not loan.ended and not any(is_of(loan, name) for name in dropped):
                held.append(str(loan))
    if held:
        raise BorrowedError(
            f"offload: {'; '.join(held)}. The offload would release the communicator, and a later "
            "use of it is a use after free. Nothing was changed on any rank. Let the holder drop "
            "it and take it again, with reloadpg.on_offload(..., group=..., package=...) and "
            "on_reload(); or accept the danger with install(borrowed='warn')."
        )


def restore(op: Operation, connect: Connect) -> None:
    """Rebuild the groups without a communicator, and call the callbacks. Collective, with timeouts.

    A callback may have destroyed groups, which are not rebuilt.
    """
    with op.record.step("device"):
        devices.empty_cache()
    there = [group for group in op.scope.groups if group.state is not GroupState.DESTROYED]
    gone = [group for group in there if group.communicator is None]
    _delete_spent_keys(op, gone)
    threads = 1 if _share_options(gone) else _creators(op)
    rebuilds = Rebuilds(op, gone, connect)
    # A group that was resumed may never have been connected.
    back = [g for g in there if g in gone or (connect != "none" and g.name in op.record.groups)]
    op.workers.over(back, rebuilds.create, threads)
    checked = [
        g for g in back if connect == "canary" or (connect == "eager" and needs_collective(g))
    ]
    op.workers.over(checked, lambda group, wanted, _: check_group(group, connect, wanted), 1)
    op.barrier("done")
    op.record.note("" if op.record.groups else "no reloadable group here")
    op.call_reloaded()
    op.job.watch_dumps()


def _creators(op: Operation) -> int:
    """Number of threads that create groups, each with a separate store client."""
    return min(op.options.threads, max(1, _CREATORS // op.scope.world.size()))


def _share_options(groups: Sequence[ManagedGroup]) -> bool:
    """Whether two groups were created with one options object.

    Torch writes a group's name, ranks and timeout into it, where the backend reads them.
    """
    options = [group.construction.options for group in groups]
    shared = [id(one) for one in options if one is not None]
    return len(shared) != len(set(shared))


class Rebuilds:
    """The communicators that one attempt creates: the actions of its threads."""

    def __init__(self, op: Operation, gone: Sequence[ManagedGroup], connect: Connect) -> None:
        # An abandoned thread must use nothing of the attempt that follows.
        self._scope, self._round, self._workers = op.scope, op.round, op.workers
        self._clients, self._has_peers = op.job.creation_stores, not op.job.rendezvous.alone
        self._connect = connect
        suffix = f"{self._scope.generation}.{self._round.label}"
        self._names = {group: group.construction.name_of_generation(suffix) for group in gone}
        for group, name in self._names.items():
            group.history.begin(name)

    def create(self, group: ManagedGroup, wanted: CancelToken, index: int) -> None:
        """Replay the creation of a group without a communicator, and connect it if wanted."""
        if group.communicator is None:
            construction, name = group.construction, self._names[group]
            store = self._store(index, group)
            if wanted.cancelled:  # the name and the client are of an ended operation
                return
            whole = group.kept is None  # a recovery also aborts the kept backends
            inner = construction.replay(name, store, group.proxy, whole=whole)
            self._commit(group, inner, wanted)
        if self._connect != "none" and not wanted.cancelled and connects_alone(group):
            # In this thread: only it uses the store client of the communicator.
            self._connect_alone(group, wanted)

    def _store(self, index: int, group: ManagedGroup) -> Store:
        """The store that a thread uses to create a group. Blocking until connected.

        Each thread has a separate client, kept for later reloads: an abandoned creation holds it
        while it waits for its peers, and two creations on one client would wait for each other.
        """
        world = self._scope.world
        store = stores.root_store(world)
        if self._has_peers:
            if not self._clients.is_ready(index):
                self._workers.set_doing(index, f"{group!r} (connecting to the store)")
            store = self._clients.of(index, store)
            self._workers.set_doing(index, repr(group))
        if group.construction.is_world:
            return store
        return PrefixStore(f"{tables.name_of(world)}/", store)

    def _commit(self, group: ManagedGroup, inner: ProcessGroup, wanted: CancelToken) -> None:
        """Make a generation the live one; discard it if the operation has ended."""
        if group.construction.is_handed_over and (
            not isinstance(inner, ProcessGroup)
            or isinstance(inner, ReloadableProcessGroup)
            or tables.is_known(inner)
        ):
            raise TypeError(
                f"the rebuild function given to register_group() returned {inner!r}; it must "
                "return the group that it has created"
            )
        with wanted as is_wanted:
            if is_wanted:
                group.attach(inner, self._scope.generation)
                group.history.rebuild()
        if not is_wanted:
            # The destruction makes other members fail, so they are notified of the reason first.
            self._round.notified.wait()
            discard(inner)

    def _connect_alone(self, group: ManagedGroup, wanted: CancelToken) -> None:
        backend = connect_group(group)
        if wanted.cancelled:
            # ``ProcessGroupNCCL`` had no communicator yet when it was aborted, and would keep
            # the one that it has got since (torch 2.8.0 to 2.15.0 over stand-ins for NCCL).
            self._round.notified.wait()  # as in `_commit`
            abort_communicator(backend)


def _delete_spent_keys(op: Operation, groups: Sequence[ManagedGroup]) -> None:
    spent = [key for group in groups for key in spent_keys(group, op.scope.world)]
    if not spent or op.job.rendezvous.alone:
        return

    def delete(store: Store) -> None:
        stores.delete_keys(store, spent)

    deadline = Deadline(op.name, op.round.seconds, op.round.phase)
    with op.record.step("store"):
        op.job.rendezvous.client.ask(delete, deadline, repeats=True)


def spent_keys(group: ManagedGroup, world: ProcessGroup) -> list[str]:
    """List the keys in the job's store that no rank reads any more, each once.

    Call it before a rebuild, when no member uses the earlier generations.
    """
    construction = group.construction
    devices = construction.devices if group.kept is None else construction.released
    if len(set(construction.devices.values())) == 1:
        # torch creates one backend, for the first device
        devices = dict(list(devices.items())[:1])
    under = "" if construction.is_world else f"{tables.name_of(world)}//"
    return [
        under + key
        for name in group.history.take_names()
        for key in stores.rendezvous_keys(name, devices, construction.rank, len(construction.ranks))
    ]
