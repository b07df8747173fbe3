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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

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

__all__ = [
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
    """Where a rank is in the loops of ``retrying``, from 0: the next step that is not complete.

    Attributes:
        loop: number of the loop.
        step: number of the step in it.
        attempt: number of attempts at it that have failed.
    """

    loop: int = 0
    step: int = 0
    attempt: int = 0


@dataclass
class Job:
    """One initialised ``torch.distributed``: from ``init_process_group`` to its destruction.

    Attributes:
        of: the default group of the job; the job ends with it.
        rendezvous: where the ranks of the job agree.
        generation: number of completed reloads.
        cycles: number of completed offloads.
        offloaded: whether the last operation left the groups without communicators.
        unfinished: what failed operations have left running.
        creation_stores: store clients for creating groups; None without peers.
        connecting: connections to the store that were begun in the background.
        suspend_obstacle: why this job has learnt not to suspend; empty if it has not.
        last_error: the error that the last operation raised on this rank; empty if none.
        round: the round that is going on, or the last one.
        blocks: open ``offloaded()`` blocks; they hold this set, and not the job.
        position: where this rank is in the loops of ``retrying``.
        loops: number of these loops that this rank has begun.
        replaced: the ranks that were replaced since the last complete step; equal on all ranks
            that are at one step.
    """

    of: weakref.ref[ProcessGroup]
    rendezvous: Rendezvous
    generation: int = 0
    cycles: int = 0
    offloaded: bool = False
    unfinished: list[Unfinished] = field(default_factory=list)
    creation_stores: StorePool | None = None
    connecting: list[Task[Any]] = field(default_factory=list)
    suspend_obstacle: str = ""
    last_error: str = ""
    round: Round | None = None
    blocks: set[object] = field(default_factory=set)
    position: Position = Position()  # noqa: RUF009 - immutable
    loops: int = 0
    replaced: tuple[int, ...] = ()

    @property
    def world(self) -> ProcessGroup:
        world = self.of()
        if world is None:
            raise ReloadpgError("the default group of this job was destroyed; this is a bug")
        return world

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


@dataclass
class Callbacks:
    """The callbacks that users registered.

    They are called before groups are released, before and after they are rebuilt, with the report
    of each operation, with each call of ``install``, and once by the next ``uninstall``. Those in
    ``begin`` are called as an operation begins, before anything is touched; they raise nothing.
    """

    begin: list[Callable[[], object]] = field(default_factory=list)

    offload: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    before_reload: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    reload: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    report: list[Callable[[Any], object]] = field(default_factory=list)
    install: list[Callable[[], object]] = field(default_factory=list)
    uninstall: list[Callable[[], object]] = field(default_factory=list)


@dataclass(frozen=True)
class _Running:
    """A lifecycle operation that has begun.

    It runs as long as its function does: an interrupt can end the function at any instruction.
    """

    operation: str
    frame: FrameType
    progress: Callable[[], Any]

    def is_active(self) -> bool:
        # Python refuses to clear a frame that is executing, in whatever thread. Looking for it on
        # the stacks of all threads (sys._current_frames) can deadlock in a garbage collection, or
        # crash, where other threads start meanwhile: seen on Python 3.11.7 (python#106883).
        try:
            self.frame.clear()
        except RuntimeError:
            return True
        return False


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
        self.variables: dict[str, str] = {}
        """Variables of the environment that the installation has set."""
        self.left_alone: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
        """Groups that the selection would take, and that cannot be managed, with the reason."""
        self._job: Job | None = None
        self._running: _Running | None = None
        self._inherited: ProcessGroup | None = None

    def after_fork(self) -> None:
        """In a forked child: keep the patches, forget the parent's job.

        The child inherits the parent's groups and their sockets. Using them would corrupt the
        parent's conversation, so they are refused until the child starts a job of its own.
        """
        options, patches, callbacks = self.options, self.patches, self.callbacks
        by_environment, variables = self.by_environment, self.variables
        c10d.forget_saves()
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
        return [
            (group, self.left_alone.get(group, _RAW))
            for group, bypass in self._others()
            if bypass is None
        ]

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

    @property
    def blocks(self) -> set[object]:
        """The open ``offloaded()`` blocks of the present job; without a job, an empty set."""
        job = self.known_job
        return set() if job is None else job.blocks

    def is_inherited(self, world: ProcessGroup) -> bool:
        """Whether a default group came with a fork, and is the parent's."""
        return world is self._inherited

    # -- one operation at a time --------------------------------------------------------------

    def begin(
        self,
        operation: str,
        frame: FrameType,
        progress: Callable[[], Any],
    ) -> None:
        """Refuse a second lifecycle operation while one runs, from any thread or callback.

        Args:
            operation: its name.
            frame: of the function that runs it.
            progress: says how far it is, to any thread; must not keep the operation alive.
        """
        with self._lock:
            if self.busy:
                running = self._running.operation if self._running else ""
                raise ReloadpgError(
                    f"{operation} was called while {running} is running in this process; "
                    "nothing was changed. Call them one after the other, from one thread, and "
                    "not from a callback; after one with wait=False, when result() on its handle "
                    "has returned."
                )
            self._running = _Running(operation, frame, progress)

    def continue_in(self, frame: FrameType) -> None:
        """Note that the operation goes on in another function, of another thread."""
        with self._lock:
            if self._running is not None:
                self._running = replace(self._running, frame=frame)

    def end(self) -> None:
        """End the operation that was begun."""
        self._running = None

    @property
    def busy(self) -> bool:
        """Whether a lifecycle operation is running in this process."""
        return self._running is not None and self._running.is_active()

    def progress(self) -> Any:
        """Say how far the running operation is; None if none runs. Local, from any thread."""
        running = self._running
        return running.progress() if running is not None and running.is_active() else None

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
    )


_RAW = (
    "it was created before reloadpg.install(), or by a function that reloadpg does not patch; "
    "install earlier, or hand it over with reloadpg.manage()"
)

registry = Registry()
Offloaded.block_is_open = staticmethod(lambda: bool(registry.blocks))
os.register_at_fork(after_in_child=registry.after_fork)
