"""The mutable state of the library in this process: the installation and the current job.

It has no list of managed groups: a managed group is a proxy in c10d's tables. So a destroyed group
is no longer managed, and a proxy without other references is not kept alive.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed import ProcessGroup

from .. import c10d
from ..errors import ReloadpgError
from ..rendezvous.predecessor import Predecessor
from ..rendezvous.round import Rendezvous, Round
from ..rendezvous.store_client import StorePool
from ..rendezvous.worker_thread import Task, Wait, exiting
from .offloaded import Offloaded
from .proxy import GroupState, ReloadableProcessGroup
from .selection import Bypass, Selection, StrategyPolicy
from .sets import TRAINER, Chosen, SetStates

_CONNECT_S = 6.0
"""Seconds within which a connection to the store succeeds without a response from DNS."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``install``; equal ones make a second ``install`` a no-op."""

    selection: Selection
    strategy: StrategyPolicy
    timeout: timedelta
    parallelism: int | None = None
    recoverable: bool = False

    @property
    def threads(self) -> int:
        """Number of groups that a rank processes in parallel, for backends with known locks."""
        return 8 if self.parallelism is None else self.parallelism

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
            "parallelism": "default" if self.parallelism is None else self.parallelism,
            "exclude": list(selection.exclude),
            "sets": dict(selection.sets),
            "recoverable": self.recoverable,
        }


class Unfinished(NamedTuple):
    """A call that still runs after its operation has failed: it creates or destroys a group."""

    group: str
    task: Task[Any]
    creates: bool = False

    def __str__(self) -> str:
        doing = "created, by a call that was abandoned" if self.creates else "destroyed"
        return f"the communicator of {self.group} is still being {doing}"


class Position(NamedTuple):
    """Where a rank is in the loops of ``retrying``, counted from 0.

    Attributes:
        steps: number of completed steps, over all loops.
        loop: index of the next step's loop among the outermost loops.
        attempt: number of failed attempts at that step.
        number: index of the step in its loop.
        nested: whether the loop is inside another one.
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
        sets: the states of the sets. Blocks refer to these and not to the job, whose store ends
            with the default group.
        generation: number of completed reloads, of any set.
        cycles: number of completed offloads, of any set.
        doomed: detached communicators that are not destroyed yet, with a description of their
            groups.
        creation_stores: store clients for creating groups; None without peers.
        connecting: connections to the store that are made in the background.
        suspend_obstacle: the suspend or resume that has failed; empty if none has.
        loops: the loops of ``retrying`` on this rank; used by that module only.
        replaced: the ranks that were replaced since the last completed step; equal on all ranks
            at the same step.
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
        return any(state.offloaded for state in self.sets.all())

    def end(self) -> None:
        """End the job before its default group is destroyed. Local; waits a limited time."""
        self.rendezvous.end()
        self.await_connections()

    def connect_ahead(self, creators: int) -> None:
        """Connect the store clients of the next reload in the background. Local, non-blocking."""
        if self.creation_stores is not None:
            self.connecting = [task for task in self.connecting if not task.ended]
            with suppress(RuntimeError):  # no thread can be started: the reload connects them
                self.connecting += self.creation_stores.connect_ahead(creators)

    def await_connections(self) -> None:
        """Wait a limited time for connections in progress, which hold rank 0's store."""
        if self.creation_stores is not None:
            self.creation_stores.end()
        wait = Wait("the end of the job", _CONNECT_S)
        for task in self.connecting:
            if not task.is_current:  # that thread may have released the last reference
                task.wait(wait.left)


class Callback(NamedTuple):
    """A user's callback: its name, and the sets for whose operations it is called."""

    name: str
    function: Callable[[], object]
    sets: Chosen


@dataclass
class Callbacks:
    """The callbacks that users registered.

    Those in ``begin`` are called at the start of an operation, before any change; they must not
    raise. Those in ``uninstall`` are called once.
    """

    begin: list[Callable[[], object]] = field(default_factory=list)

    offload: list[Callback] = field(default_factory=list)
    before_reload: list[Callback] = field(default_factory=list)
    reload: list[Callback] = field(default_factory=list)
    report: list[Callable[[Any], object]] = field(default_factory=list)
    install: list[Callable[[], object]] = field(default_factory=list)
    uninstall: list[Callable[[], object]] = field(default_factory=list)


class Registry:
    """The state behind the public functions. One instance per process: :data:`registry`."""

    def __init__(self) -> None:
        self.options: Options | None = None
        self.patches: Any = None
        """The ``Patches`` of the installation; None without one."""
        self.by_environment = False
        """Whether ``RELOADPG_AUTOINSTALL`` made the installation."""
        self.variables: dict[str, tuple[str, str | None]] = {}
        """Variables of the environment that the installation has set."""
        self.callbacks = Callbacks()
        self._disowned: list[Any] = []
        """The parent's communicators in a forked child: their destructors would wait."""
        self._begin_process()

    def _begin_process(self) -> None:
        self.lock = threading.RLock()
        """Never held across a callback or a collective step."""
        self.warned: set[str] = set()
        self.rehearsed = False
        """Whether :func:`~reloadpg.lifecycle.rehearsal.rehearse` has succeeded in this process."""
        self.left_alone: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Selected groups that cannot be managed, with the reason."""
        self.without_set: WeakSet[ProcessGroup] = WeakSet()
        """Groups whose creator is in no set, by a rule or a region."""
        self.outside_tables: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Groups that are in none of torch's tables, with the reason."""
        self._job: Job | None = None
        self._running: weakref.ref[Any] | None = None
        self._inherited: ProcessGroup | None = None

    def after_fork(self) -> None:
        """In a forked child: keep the patches, drop the parent's job.

        The child inherits the parent's groups and their sockets, but not the threads that serve
        them: a collective or the end of a group would wait indefinitely. So every operation is
        refused until the child starts its own job.
        """
        if c10d.known_groups():
            c10d.drop_inherited_connections()
        inherited = [g for g in c10d.known_groups() if isinstance(g, ReloadableProcessGroup)]
        self._disowned += [group.disown() for group in inherited]
        self._begin_process()
        old = self.callbacks
        self.callbacks = Callbacks(install=old.install, uninstall=old.uninstall)
        self._inherited = c10d.world()

    # -- the job ----------------------------------------------------------------------------

    def job(self, operation: str, predecessor: Predecessor | None = None) -> Job | None:
        """Return the job of the current default group, which may join one; None without a group."""
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
        with self.lock:
            if self._job is None or self._job.of() is not world:
                # Rank 0's store, and the server in it, must not outlive the default group:
                # otherwise the next job would find the keys of this one.
                marks = self.options is not None and self.options.recoverable
                rendezvous = Rendezvous.of_world(world, predecessor=predecessor, marks=marks)
                job = Job(weakref.ref(world, self._forget), rendezvous)
                job.connecting += job.rendezvous.connect_ahead()
                if c10d.has_peers():
                    job.creation_stores = StorePool(c10d.root_store_of_job(world))
                if isinstance(world, ReloadableProcessGroup):
                    world.before_end = job.end
                self._job = job
            return self._job

    def begin_job(self) -> None:
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
        """List the groups that are selected but not managed, with the reason."""
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
        return [(group, bypass) for group, bypass in self._others() if bypass is not None]

    def _others(self) -> Iterator[tuple[ProcessGroup, Bypass | None]]:
        """Yield the groups that are not managed, with the reason if they bypass."""
        options = self.options
        if options is None or c10d.world() is self._inherited is not None:
            return
        for group in c10d.known_groups():
            if not isinstance(group, ReloadableProcessGroup):
                yield group, bypass_of(group, options.selection)

    def offloaded(self) -> list[ReloadableProcessGroup]:
        return [group for group in self.managed() if group.state is not GroupState.LIVE]

    @property
    def known_job(self) -> Job | None:
        """The job of the current default group, if it is registered. Local, cheap."""
        job = self._job
        return job if job is not None and job.of() is c10d.world() else None

    @property
    def replaces(self) -> bool:
        """Whether this process replaces another one and has not rejoined its job. Local, cheap."""
        job = self._job
        return job is not None and job.rendezvous.replaces and job is self.known_job

    def is_inherited(self, world: ProcessGroup) -> bool:
        """Whether a default group was inherited from the parent process by a fork."""
        return world is self._inherited

    # -- one operation at a time --------------------------------------------------------------

    def begin(self, operation: Any) -> None:
        """Refuse a second lifecycle operation while one runs, from any thread or callback.

        The operation ends when its ``is_running`` is false or when the object is deleted, so an
        interrupt at any instruction leaves no process busy. Call this within the ``try`` whose
        ``finally`` resets ``is_running``.
        """
        if exiting():
            raise ReloadpgError(
                f"{operation.name} was called while the interpreter exits, in an exit handler or a "
                "finalizer; nothing was changed. No thread can be started any more. Call it, and "
                "leave offloaded() blocks, before the program ends."
            )
        with self.lock:
            running = self._operation()
            if running is not None:
                raise ReloadpgError(
                    f"{operation.name} was called while {running.name} is running in this process; "
                    "nothing was changed. Call them one after the other, from one thread and "
                    "not from a callback. After a call with wait=False, first call result() on "
                    "its handle."
                )
            self._running = weakref.ref(operation)

    def _operation(self) -> Any:
        found = None if self._running is None else self._running()
        return found if found is not None and found.is_running else None

    @property
    def busy(self) -> bool:
        return self._operation() is not None

    def progress(self) -> Any:
        running = self._operation()
        return None if running is None else running.status()


def bypass_of(group: ProcessGroup, selection: Selection) -> Bypass | None:
    """Return why a group that torch created is bypassed; None if it is selected."""
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
    "call install() earlier, or pass the group to reloadpg.register_group()"
)

registry = Registry()
Offloaded.block_is_open = staticmethod(
    lambda name: (job := registry.known_job) is not None and job.sets[name].in_block()
)
os.register_at_fork(after_in_child=registry.after_fork)
