"""The current job of this process, from ``init_process_group`` to its destruction.

It connects the groups to the rendezvous: ``groups`` knows no store, and each installation lets
a new default group register its job (:meth:`Jobs.register`).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch.distributed import ProcessGroup

from ..c10d import stores, tables
from ..errors import ReloadpgError
from ..groups.proxy import managed
from ..groups.registry import registry
from ..rendezvous.rendezvous import Rendezvous
from ..reports import OperationStatus
from ..threads import Deadline, Task
from .callbacks import Owed
from .dumps import DumpWatch, lacks_dumps

_CONNECT_S = 6.0
"""Seconds within which a connection to the store succeeds without a response from DNS."""


@dataclass(eq=False)
class SetState:
    """The state of one set in a job.

    Attributes:
        offloaded: whether the last operation left its groups without communicators.
        generation: the job's number of reloads when the set was last reloaded.
        depth: number of open blocks that keep it offloaded.
    """

    offloaded: bool = False
    generation: int = 0
    depth: int = 0

    def __str__(self) -> str:
        return f"{'offloaded' if self.offloaded else 'live'}, generation {self.generation}"

    def offload(self) -> None:
        """Record that its groups have no communicators. Local, idempotent."""
        self.offloaded = True

    def reload(self, generation: int) -> None:
        """Record that its groups are live. Local."""
        self.generation, self.offloaded = generation, False

    def open_block(self) -> None:
        self.depth += 1

    def close_block(self) -> None:
        self.depth -= 1


class Running(Protocol):
    """An operation, for the others of the process."""

    @property
    def name(self) -> str: ...

    def status(self) -> OperationStatus: ...


@dataclass(eq=False)
class Unfinished:
    """A communicator that is not gone yet, though it is detached from its group or abandoned.

    Attributes:
        group: its group, for messages.
        parts: the objects to abort, if its operation fails.
        task: the thread that still creates or destroys it after its operation has failed.
        creates: whether that thread creates it.
    """

    group: str
    parts: list[Any] = field(default_factory=list)
    task: Task[Any] | None = None
    creates: bool = False

    @contextmanager
    def without_aborts(self) -> Iterator[None]:
        """A block in which no abort can end its destruction; if it fails, an abort is to."""
        parts, self.parts = self.parts, []
        try:
            yield
        except BaseException:
            self.parts = parts
            raise

    def abort(self, act: Callable[[list[Any]], object]) -> None:
        """Abort its objects in a thread. Local, non-blocking."""
        self.task = Task(partial(act, self.parts), "abort")

    def runs(self, seconds: float = 0) -> bool:
        """Whether the thread still runs after a wait of at most this many seconds."""
        return self.task is not None and not self.task.wait(seconds)

    def __str__(self) -> str:
        doing = "created, by a call that was abandoned" if self.creates else "destroyed"
        return f"the communicator of {self.group} is still being {doing}"


@dataclass
class Job:
    """One initialised ``torch.distributed``: from ``init_process_group`` to its destruction.

    Attributes:
        of: the default group of the job; the job ends with it.
        sets: the states of the sets. Blocks refer to these and not to the job, whose store ends
            with the default group.
        generation: number of completed reloads, of any set.
        unfinished: communicators that are not gone yet.
        creation_stores: clients of the store by the number of the creating thread that uses each.
        dumps: the thread that writes the flight recorder's dumps; None while torch does.
        warned_of_one_rank: whether a report has warned of bypassed groups of one rank.
        suspend_obstacle: the suspend or resume that has failed; empty if none has.
        last_error: how the last operation has failed; empty if it has not.
        owed: the callbacks that are due on this rank.
    """

    of: weakref.ref[ProcessGroup]
    rendezvous: Rendezvous
    sets: defaultdict[str, SetState] = field(default_factory=lambda: defaultdict(SetState))
    generation: int = 0
    unfinished: list[Unfinished] = field(default_factory=list)
    creation_stores: stores.Clients = field(default_factory=stores.Clients)
    dumps: DumpWatch | None = None
    suspend_obstacle: str = ""
    warned_of_one_rank: bool = False
    last_error: str = ""
    owed: Owed = field(default_factory=Owed)

    @property
    def world(self) -> ProcessGroup:
        world = self.of()
        if world is None:
            raise ReloadpgError("the default group of this job was destroyed; this is a bug")
        return world

    @property
    def offloaded(self) -> bool:
        return any(state.offloaded for state in list(self.sets.values()))

    def follow(self, of: weakref.ref[ProcessGroup]) -> None:
        """Go on with the reloadable group in the place of the default group. Local."""
        self.of = of

    def begin_operation(self) -> None:
        """Forget how the last operation has failed. Local."""
        self.last_error = ""

    def fail_operation(self, error: str) -> None:
        """Record how an operation has failed. Local."""
        self.last_error = error

    def reload(self, generation: int, sets: Iterable[str]) -> None:
        """Record a completed reload of these sets. Local."""
        self.generation = generation
        for name in sets:
            self.sets[name].reload(generation)

    def warn_of_one_rank(self, text: str) -> list[str]:
        """The warning of bypassed groups of one rank, once. Local."""
        if self.warned_of_one_rank or not text:
            return []
        self.warned_of_one_rank = True
        return [text]

    def stop_suspending(self, obstacle: str) -> None:
        """Recreate groups from now on, and suspend none. Local."""
        self.suspend_obstacle = obstacle

    def forget_clients(self) -> None:
        """Use other store clients for later creations than for abandoned ones. Local."""
        self.creation_stores = stores.Clients()

    def end(self) -> None:
        """End the job with its default group. Local; waits a limited time. Idempotent.

        It waits for threads that use the store, since they hold rank 0's, and the server in it.
        """
        deadline = Deadline("the end of the job", _CONNECT_S)
        if self.dumps is not None:
            self.dumps.end()
        self.rendezvous.end(deadline)

    def watch_dumps(self) -> None:
        """Write the flight recorder's dump at a timeout, if torch no longer does. Local."""
        if self.dumps is None and not self.rendezvous.alone and lacks_dumps():
            root = stores.root_store_of_job(self.world)
            watch = DumpWatch(root, self.rendezvous.rank)
            with suppress(ReloadpgError):  # no thread can be started
                watch.start()
                self.dumps = watch


class Jobs:
    """The current job and its current operation. One instance per process: :data:`jobs`."""

    def __init__(self) -> None:
        self.begin_process()

    def begin_process(self) -> None:
        """Forget the job and the operation, which in a forked child are the parent's. Local."""
        self._job: Job | None = None
        self._expected: Rendezvous | None = None
        self._running: Running | None = None

    def current(self, operation: str) -> Job | None:
        """Return the job of the current default group, which may join one; None without a group.

        Also None if the library is off: every operation is then one without a job.
        """
        world = tables.world()
        if world is None or registry.off:
            self._job = None
            return None
        if registry.is_inherited(world):
            raise ReloadpgError(
                f"{operation} in a forked child (pid {os.getpid()}): the process groups here "
                "belong to the parent process and cannot be used or changed. Call it in the "
                "parent, or start the child with the 'spawn' method and initialise it there."
            )
        with registry.lock:
            if self._job is None or self._job.of() is not world:
                self._job = self._begun(world)
            return self._job

    def _begun(self, world: ProcessGroup) -> Job:
        """The job of a default group that has none. Local."""
        # Rank 0's store, and the server in it, must not outlive the default group: otherwise the
        # next job would find the keys of this one.
        group, of = managed(world), weakref.ref(world, self._forget)
        if (job := self._job) is not None and group is not None and job.of() is group.communicator:
            job.follow(of)  # a barrier has begun it before install has made the group reloadable
        else:
            rendezvous, self._expected = self._expected, None
            if rendezvous is None:
                root = stores.root_store_of_job(world) if tables.has_peers() else None
                rendezvous = Rendezvous(root, world.rank(), world.size(), watches=True)
            job = Job(of, rendezvous)
        if group is not None:
            group.call_before_end(job.end)
        return job

    @contextmanager
    def expecting(self, rendezvous: Rendezvous) -> Iterator[None]:
        """Make this the rendezvous of the job whose default group is created in the block. Local.

        Its ranks have counted the job, and have met. Otherwise a job counts itself, with a separate
        connection to the store.
        """
        self._expected = rendezvous
        try:
            yield
            self.current("init_distributed")
        finally:
            self._expected = None

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
            job.end()

    @property
    def known(self) -> Job | None:
        """The job of the current default group, if it is registered. Local, cheap."""
        job = self._job
        return job if job is not None and job.of() is tables.world() else None

    def register(self) -> None:
        """Count the job of a new default group on its store. Local, or a request to the store."""
        job = self.current("install")
        if job is not None and not job.rendezvous.alone:
            job.rendezvous.count_job()

    # -- one operation at a time --------------------------------------------------------------

    def refuse_second(self, operation: str) -> None:
        """Refuse a second lifecycle operation while one runs, from any thread or callback."""
        running = self._running
        if running is not None:
            raise ReloadpgError(
                f"{operation} was called while {running.name} is running in this process; nothing "
                "was changed. Call them one after the other, from one thread and not from a "
                "callback. After a call with wait=False, first call result() on its handle."
            )

    def begin(self, operation: Running) -> None:
        """Begin an operation that was not refused; the registry's lock is held since. Local."""
        self._running = operation

    def end(self, operation: Running) -> None:
        """End an operation that has begun. Local."""
        with registry.lock:
            if self._running is operation:
                self._running = None

    @property
    def busy(self) -> bool:
        return self._running is not None

    def progress(self) -> OperationStatus | None:
        """Return the progress of the running operation, or None. Local, cheap."""
        running = self._running
        return None if running is None else running.status()


jobs = Jobs()
os.register_at_fork(after_in_child=jobs.begin_process)
