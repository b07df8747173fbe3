"""The only mutable state of the library, for the life of the process.

Which groups are managed is not kept here: c10d's own tables say it (a managed group is a proxy
that stands in them), so a group that the user destroyed is forgotten by that very act, and a
proxy that nobody holds is not kept alive. What is kept: the installation, the job that the
default group stands for, and the creations in which this rank takes part without being a member.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from . import c10d
from .choice import StrategyPolicy
from .construction import Construction, Order
from .errors import ReloadpgError
from .group import GroupState, ReloadableProcessGroup
from .policy import Policy
from .rendezvous import Rendezvous
from .report import Report
from .supervised import Task

__all__ = ["Callbacks", "Job", "Options", "Registry", "registry"]


class Patched(Protocol):
    """The names that an installation has changed."""

    def foreign(self) -> list[str]:
        """Those that somebody else has changed since, with what they hold."""

    def undo(self) -> None:
        """Put the originals back."""


@dataclass(frozen=True)
class Options:
    """What ``install`` was given; equal options make a second ``install`` a no-op."""

    policy: Policy
    strategy: StrategyPolicy
    timeout: timedelta


@dataclass
class Job:
    """One initialised ``torch.distributed``: from ``init_process_group`` to its destruction.

    Attributes:
        of: the default group that the job stands for; the job ends with it.
        rendezvous: how the ranks of the job meet.
        generation: number of completed reloads.
        cycles: number of completed offloads.
        released: whether the last operation left the groups without communicators.
        torn: whether work of a failed operation was given up and may hold WORLD's store client.
        ending: what a failed operation left going on in the background, if anything.
        shared: creations that torch wants more ranks than the members to replay, by order.
        splits: how often each group was split.
        suspend_obstacle: why this job has learnt not to suspend, in words; empty if it has not.
        last_error: the error that the last operation raised on this rank; empty if none.
        blocks: open ``offloaded()`` blocks; they hold this set, and not the job.
    """

    of: weakref.ref[ProcessGroup]
    rendezvous: Rendezvous
    generation: int = 0
    cycles: int = 0
    released: bool = False
    torn: bool = False
    ending: Task[Any] | None = None
    shared: dict[Order, Construction] = field(default_factory=dict)
    splits: WeakKeyDictionary[ProcessGroup, int] = field(default_factory=WeakKeyDictionary)
    suspend_obstacle: str = ""
    last_error: str = ""
    blocks: set[object] = field(default_factory=set)

    @property
    def world(self) -> ProcessGroup:
        world = self.of()
        if world is None:
            raise ReloadpgError("the default group of this job was destroyed; this is a bug")
        return world


@dataclass
class Callbacks:
    """What users asked to be called: before groups are released, before and after they are
    rebuilt, and with the report of each operation.
    """

    offload: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    before_reload: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    reload: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    report: list[Callable[[Report], object]] = field(default_factory=list)


class Registry:
    """The state behind the public functions. One instance a process: :data:`registry`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self.pid = os.getpid()
        self.options: Options | None = None
        self.patches: Patched | None = None
        self.callbacks = Callbacks()
        self.warned: set[str] = set()
        self._job: Job | None = None
        self._busy: str | None = None
        self._inherited: ProcessGroup | None = None

    def after_fork(self) -> None:
        """In a forked child: keep the patches, forget the parent's job.

        The child inherits the parent's groups and their sockets. Using them would corrupt the
        parent's conversation, so they are refused until the child starts a job of its own.
        """
        options, patches = self.options, self.patches
        self._lock = threading.RLock()
        self._clear()
        self.options, self.patches = options, patches
        self._inherited = c10d.world()

    # -- the job ----------------------------------------------------------------------------

    def job(self, operation: str) -> Job | None:
        """The job of the current default group; None when nothing is initialised.

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
                ended = weakref.ref(world, self._forget)
                self._job = Job(ended, Rendezvous.of_world(world))
            return self._job

    def _forget(self, ended: weakref.ref[ProcessGroup]) -> None:
        if self._job is not None and self._job.of is ended:
            self._job = None

    def managed(self) -> list[ReloadableProcessGroup]:
        """The proxies in c10d's tables, in the order that all ranks share: WORLD first."""
        if c10d.world() is self._inherited is not None:
            return []
        groups = [g for g in c10d.known_groups() if isinstance(g, ReloadableProcessGroup)]
        return sorted(groups, key=lambda group: group.construction.order)

    def offloaded(self) -> list[ReloadableProcessGroup]:
        """The managed groups that own no communicator now."""
        return [group for group in self.managed() if group.state is not GroupState.LIVE]

    @property
    def known_job(self) -> Job | None:
        """The job of the current default group if there was reason to note it. Local, cheap."""
        job = self._job
        return job if job is not None and job.of() is c10d.world() else None

    @property
    def blocks(self) -> set[object]:
        """The open ``offloaded()`` blocks of the present job; without a job, a set of no one's."""
        job = self.known_job
        return set() if job is None else job.blocks

    def is_inherited(self, world: ProcessGroup) -> bool:
        """Whether a default group came with a fork, and is the parent's."""
        return world is self._inherited

    # -- one operation at a time --------------------------------------------------------------

    @contextmanager
    def exclusively(self, operation: str) -> Iterator[None]:
        """Refuse a second lifecycle operation while one runs, from any thread or callback."""
        with self._lock:
            if self._busy is not None:
                raise ReloadpgError(
                    f"{operation} was called while {self._busy} is running in this process; "
                    "nothing was changed. Call them one after the other, from one thread, and "
                    "not from a callback."
                )
            self._busy = operation
        try:
            yield
        finally:
            self._busy = None

    @property
    def busy(self) -> bool:
        """Whether a lifecycle operation is running in this process."""
        return self._busy is not None

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """Guards installation; never held across a callback or a collective step."""
        return self._lock


registry = Registry()
os.register_at_fork(after_in_child=registry.after_fork)
