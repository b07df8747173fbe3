"""The mutable state of the library, for the life of the process.

Which groups are managed is not kept here: c10d's own tables say it (a managed group is a proxy
that is in them), so a group that the user destroyed is forgotten by that very act, and a
proxy that nobody holds is not kept alive. Kept are the installation, and the job of the default
group.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import ReloadpgError
from ..rendezvous.predecessor import Predecessor
from ..rendezvous.round import Rendezvous, Round
from ..rendezvous.store_client import StorePool
from ..rendezvous.worker_thread import Task, Wait
from .offloaded import Offloaded
from .proxy import GroupState, ReloadableProcessGroup
from .selection import Bypass, Selection, StrategyPolicy
from .sets import TRAINER, Chosen, SetStates

__all__ = [
    "Callback",
    "Callbacks",
    "Job",
    "Options",
    "Position",
    "Registry",
    "Unfinished",
    "bypass_of",
    "registry",
]


_CONNECT_S = 6.0
"""Seconds in which a connection to the store is made though the name service is silent."""


class Patched(Protocol):
    """The names that an installation has changed."""

    def foreign(self) -> list[str]:
        """Return those that somebody else has changed since, with what they hold."""

    def undo(self) -> None:
        """Put the originals back."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``install``; equal ones make a second ``install`` a no-op."""

    selection: Selection
    strategy: StrategyPolicy
    timeout: timedelta
    parallelism: int = 8
    recoverable: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the options by name, as plain values. Pure."""
        selection = self.selection
        named = selection.backends
        return {
            "backends": "accelerators" if named is None else sorted(named),
            "min_size": selection.min_size,
            "world": selection.world,
            "strategy": str(self.strategy),
            "timeout_s": self.timeout.total_seconds(),
            "parallelism": self.parallelism,
            "exclude": list(selection.exclude),
            "sets": dict(selection.sets),
            "recoverable": self.recoverable,
        }


class Unfinished(NamedTuple):
    """A call that a failed operation has left running.

    Attributes:
        group: the group, in words.
        task: the call.
        creates: whether it creates a communicator, and waits for peers; else it destroys one.
    """

    group: str
    task: Task[Any]
    creates: bool = False

    def __str__(self) -> str:
        doing = "created, by a call that was abandoned" if self.creates else "destroyed"
        return f"the communicator of {self.group} is still being {doing}"


class Position(NamedTuple):
    """Where a rank is in the loops of ``retrying``, counted from 0.

    Attributes:
        steps: number of complete steps, of all loops.
        loop: number of the loop of the next step, among those that are in no other loop.
        attempt: number of attempts at that step that have failed.
        number: number of the step in its loop.
        nested: whether another loop is open around it.
    """

    steps: int = 0
    loop: int = 0
    attempt: int = 0
    number: int = 0
    nested: bool = False


@dataclass
class Job:
    """One initialised ``torch.distributed``: from ``init_process_group`` to its destruction.

    Attributes:
        of: the default group of the job; the job ends with it.
        rendezvous: where the ranks of the job agree.
        sets: the states of the sets of groups; blocks hold these, and not the job, whose store
            ends with the default group.
        generation: number of completed reloads, of any set.
        cycles: number of completed offloads, of any set.
        unfinished: what failed operations have left running.
        doomed: communicators that their groups have let go of and that are not destroyed yet,
            with their groups in words.
        creation_stores: store clients for creating groups; None without peers.
        connecting: connections to the store that were begun in the background.
        suspend_obstacle: the suspend or resume that has failed; empty if none has.
        last_error: the error that the last operation raised on this rank; empty if none.
        round: the round that is going on, or the last one.
        position: where this rank is in the loops of ``retrying``.
        loops: the loops of ``retrying`` on this rank, as that module keeps them.
        replaced: the ranks that were replaced since the last complete step; equal on all ranks
            that are at one step.
    """

    of: weakref.ref[ProcessGroup]
    rendezvous: Rendezvous
    sets: SetStates = field(default_factory=SetStates)
    generation: int = 0
    cycles: int = 0
    unfinished: list[Unfinished] = field(default_factory=list)
    doomed: dict[ReloadableProcessGroup, tuple[str, list[Any]]] = field(default_factory=dict)
    creation_stores: StorePool | None = None
    connecting: list[Task[Any]] = field(default_factory=list)
    suspend_obstacle: str = ""
    last_error: str = ""
    round: Round | None = None
    position: Position = Position()  # noqa: RUF009 - immutable
    loops: Any = None
    replaced: tuple[int, ...] = ()

    @property
    def world(self) -> ProcessGroup:
        world = self.of()
        if world is None:
            raise ReloadpgError("the default group of this job was destroyed; this is a bug")
        return world

    @property
    def offloaded(self) -> bool:
        """Whether any set is offloaded."""
        return any(state.offloaded for state in self.sets.all())

    def end(self) -> None:
        """End the job on this rank: its default group is about to be destroyed. Local, bounded."""
        self.rendezvous.end()
        self.await_connections()

    def await_connections(self) -> None:
        """Wait for connections that are being made: they hold rank 0's store. Bounded.

        One that the server leaves without an answer is not waited for to its end.
        """
        wait = Wait("the end of the job", _CONNECT_S)
        for task in self.connecting:
            if not task.is_current:  # it may have held the last reference to the group
                task.wait(wait.left)


class Callback(NamedTuple):
    """What a user registered for an operation: its name, and the sets that it is for."""

    name: str
    function: Callable[[], object]
    sets: Chosen


@dataclass
class Callbacks:
    """The callbacks that users registered.

    They are called before groups are released, before and after they are rebuilt, with the report
    of each operation, with each call of ``install``, and once by the next ``uninstall``. Those in
    ``begin`` are called as an operation begins, before anything is touched; they raise nothing.
    """

    begin: list[Callable[[], object]] = field(default_factory=list)

    offload: list[Callback] = field(default_factory=list)
    before_reload: list[Callback] = field(default_factory=list)
    reload: list[Callback] = field(default_factory=list)
    report: list[Callable[[Any], object]] = field(default_factory=list)
    install: list[Callable[[], object]] = field(default_factory=list)
    uninstall: list[Callable[[], object]] = field(default_factory=list)


class Owner(Protocol):
    """A lifecycle operation: while ``is_running`` is true, no other one begins."""

    name: str
    is_running: bool

    def status(self) -> Any:
        """Return how far it is. Local, from any thread."""


class Registry:
    """The state behind the public functions. One instance a process: :data:`registry`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.RLock()
        self.pid = os.getpid()
        self.options: Options | None = None
        self.patches: Patched | None = None
        self.by_environment = False
        """Whether the installation is that of ``RELOADPG_AUTOINSTALL``."""
        self.callbacks = Callbacks()
        self.warned: set[str] = set()
        self.variables: dict[str, tuple[str, str | None]] = {}
        """Variables of the environment that the installation has set."""
        self.left_alone: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Groups that the selection would take, and that cannot be managed, with the reason."""
        self.without_set: WeakSet[ProcessGroup] = WeakSet()
        """Groups whose creator is in no set, by a rule or a region."""
        self.outside_tables: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Groups that torch has entered into none of its tables, with the reason."""
        self._job: Job | None = None
        self._running: weakref.ref[Owner] | None = None
        self._inherited: ProcessGroup | None = None

    def after_fork(self) -> None:
        """In a forked child: keep the patches, forget the parent's job.

        The child inherits the parent's groups and their sockets. Using them would corrupt the
        parent's conversation, so they are refused until the child starts a job of its own.
        """
        options, patches, callbacks = self.options, self.patches, self.callbacks
        by_environment, variables = self.by_environment, self.variables
        if c10d.known_groups():
            c10d.drop_inherited_connections()
        self._clear()
        self.options, self.patches, self.by_environment = options, patches, by_environment
        self.variables = variables
        self.callbacks.install, self.callbacks.uninstall = callbacks.install, callbacks.uninstall
        self._inherited = c10d.world()

    # -- the job ----------------------------------------------------------------------------

    def job(self, operation: str, predecessor: Predecessor | None = None) -> Job | None:
        """Return the job of the current default group; None when nothing is initialised.

        Args:
            operation: who asks, for messages.
            predecessor: the place that this process takes in a job that goes on.

        Raises:
            ReloadpgError: the default group was inherited from a parent process.
        """
        world = c10d.world()
        if world is None:
            self._job = None
            return None
        if world is self._inherited:
            raise ReloadpgError(
                f"{operation} in a forked child (pid {os.getpid()}): the process groups here "
                "belong to the parent process and cannot be used or changed. Call it in the "
                "parent, or start the child with the 'spawn' method and initialise it there."
            )
        with self._lock:
            if self._job is None or self._job.of() is not world:
                # A job ends with its default group: rank 0's store, and the server in it, must
                # not outlive it, or the next job would find the keys of this one.
                marks = self.options is not None and self.options.recoverable
                rendezvous = Rendezvous.of_world(world, predecessor=predecessor, marks=marks)
                job = Job(weakref.ref(world, self._forget), rendezvous)
                job.connecting += job.rendezvous.connect_ahead()
                if c10d.has_peers():
                    job.creation_stores = StorePool(c10d.root_store_of_job(world))
                    job.connecting.append(job.creation_stores.connect_ahead())
                if isinstance(world, ReloadableProcessGroup):
                    world.before_end = job.end
                self._job = job
            return self._job

    def begin_job(self) -> None:
        """Note the job of a default group that was created just now, on all ranks alike."""
        job = self.job("init_process_group")
        if job is not None and not job.rendezvous.alone:
            job.rendezvous.count_job(c10d.root_store(job.world))

    def _forget(
        self,
        ended: weakref.ref[ProcessGroup],
        finalizing: Callable[[], bool] = sys.is_finalizing,  # the module's names are gone by then
    ) -> None:
        if finalizing():
            return
        job = self._job
        if job is not None and job.of is ended:
            self._job = None
            job.await_connections()

    def managed(self) -> list[ReloadableProcessGroup]:
        """List the proxies in c10d's tables, in the order that all ranks share: WORLD first."""
        if c10d.world() is self._inherited is not None:
            return []
        groups = [g for g in c10d.known_groups() if isinstance(g, ReloadableProcessGroup)]
        return sorted(groups, key=lambda group: group.construction.order)

    def unmanaged(self) -> list[tuple[ProcessGroup, str]]:
        """List the groups that the selection would take and that are not managed, with the reason.

        They keep their communicators while the others are offloaded. Local.
        """
        found = [
            (group, self.left_alone.get(group, _RAW))
            for group, bypass in self._others()
            if bypass is None
        ]
        if self.options is not None:
            for group, reason in list(self.outside_tables.items()):
                if bypass_of(group, self.options.selection) is None:
                    found.append((group, reason))
        return found

    def bypassed(self) -> list[tuple[ProcessGroup, Bypass]]:
        """List the groups that the selection leaves alone, with the reason. Local."""
        return [(group, bypass) for group, bypass in self._others() if bypass is not None]

    def _others(self) -> Iterator[tuple[ProcessGroup, Bypass | None]]:
        """The groups that are not managed, with the reason if that is the selection."""
        options = self.options
        if options is None or c10d.world() is self._inherited is not None:
            return
        for group in c10d.known_groups():
            if not isinstance(group, ReloadableProcessGroup):
                yield group, bypass_of(group, options.selection)

    def offloaded(self) -> list[ReloadableProcessGroup]:
        """List the managed groups that own no communicator now."""
        return [group for group in self.managed() if group.state is not GroupState.LIVE]

    @property
    def known_job(self) -> Job | None:
        """The job of the current default group if there was reason to note it. Local, cheap."""
        job = self._job
        return job if job is not None and job.of() is c10d.world() else None

    def is_inherited(self, world: ProcessGroup) -> bool:
        """Whether a default group came with a fork, and is the parent's."""
        return world is self._inherited

    # -- one operation at a time --------------------------------------------------------------

    def begin(self, owner: Owner) -> None:
        """Refuse a second lifecycle operation while one runs, from any thread or callback.

        The operation ends when its ``is_running`` is false, or when the object is gone: so an
        interrupt, at whatever instruction, leaves no process busy. It is called within the ``try``
        whose ``finally`` resets ``is_running``.

        Raises:
            ReloadpgError: another operation runs.
        """
        with self._lock:
            running = self._owner()
            if running is not None:
                raise ReloadpgError(
                    f"{owner.name} was called while {running.name} is running in this process; "
                    "nothing was changed. Call them one after the other, from one thread, and "
                    "not from a callback; after one with wait=False, when result() on its handle "
                    "has returned."
                )
            self._running = weakref.ref(owner)

    def _owner(self) -> Owner | None:
        owner = None if self._running is None else self._running()
        return owner if owner is not None and owner.is_running else None

    @property
    def busy(self) -> bool:
        """Whether a lifecycle operation is running in this process."""
        return self._owner() is not None

    def progress(self) -> Any:
        """Say how far the running operation is; None if none runs. Local, from any thread."""
        running = self._owner()
        return None if running is None else running.status()

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """Guards installation; never held across a callback or a collective step."""
        return self._lock


def bypass_of(group: ProcessGroup, selection: Selection) -> Bypass | None:
    """Say why the selection leaves a group alone that torch has made; None if it takes it."""
    return selection.bypass(
        c10d.device_backends(group),
        len(c10d.ranks_of(group)),
        name=c10d.name_of(group),
        desc=c10d.desc_of(group),
        is_world=group is c10d.world(),
        in_set=None if group in registry.without_set else TRAINER,
    )


_RAW = (
    "it was created before reloadpg.install(), or by a function that reloadpg does not patch; "
    "install earlier, or hand it over with reloadpg.manage()"
)

registry = Registry()
Offloaded.block_is_open = staticmethod(
    lambda name: (job := registry.known_job) is not None and job.sets[name].in_block()
)
os.register_at_fork(after_in_child=registry.after_fork)
