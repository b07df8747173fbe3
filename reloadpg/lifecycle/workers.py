"""The threads of one operation: blocking work, and an action with each group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from ..c10d import nccl
from ..errors import ReloadpgError
from ..groups.creation import HANDED_OVER
from ..groups.managed import ManagedGroup
from ..groups.offloaded import GroupState
from ..rendezvous.round import Round
from ..threads import CancelToken, Deadline, Task
from .destroy import abort
from .installation import Options
from .job import Job, Unfinished
from .kinds import Kind
from .report import Record
from .scope import Scope

Action = Callable[[ManagedGroup, CancelToken, int], object]
"""What a thread does with a group. It has the token of its results, which are committed only while
they are wanted, and the number of its thread."""

_OUTSIDE = (
    "If its members outside the job have ended, destroy_process_group(group) leaves it out of the "
    "next reload; pass its successor to register_group()."
)
"""What to do about a registered group that cannot be rebuilt, for the error."""

_ABORT_S = 2.0
"""Seconds that a failed operation waits for its communicators to abort before it raises."""

_UNFINISHED_S = 10.0
"""Seconds that an operation waits for the communicators of a failed one to be destroyed."""


class Workers:
    """The threads of one attempt of an operation on this rank."""

    def __init__(
        self, kind: Kind, job: Job, record: Record, round_: Round, options: Options
    ) -> None:
        self._kind, self._job, self._record = kind, job, record
        self._round, self._options = round_, options
        self._busy: dict[int, str] = {}  # the group that each thread processes
        self._took: dict[ManagedGroup, float] = {}  # milliseconds
        self._to_do = 0

    @property
    def progress(self) -> tuple[int, int]:
        """The number of completed groups of the current or last step, and of all its groups."""
        return len(self._took), self._to_do

    def doing(self) -> str:
        """The groups that the threads process, for messages."""
        return ", ".join(self._busy.values())

    def set_doing(self, index: int, doing: str) -> None:
        """Set what a thread does, for messages. Local."""
        self._busy[index] = doing

    def do(self, step: str, work: Callable[[], object], doing: str) -> None:
        """Run blocking work before the next barrier, in a thread; see :meth:`Round.watch`."""
        with self._record.step(step, doing):
            self._round.watch([Task(work, self._kind.name)], CancelToken(), lambda: doing)

    def over(
        self, groups: Sequence[ManagedGroup], action: Action, threads: int | None = None
    ) -> None:
        """Process groups in parallel, in this order, before the next barrier.

        Each thread takes the next group that no thread has taken. All ranks share one order, so all
        members of the first unfinished group of the job are working on it. No topology can
        deadlock, provided a thread that waits for peers holds no lock of another thread
        (:mod:`reloadpg.c10d.nccl`). The default group is processed alone. Groups that users
        rebuild, and by default groups of a backend whose locks are unknown, are processed one after
        the other.

        Args:
            groups: in the order that all ranks share.
            action: what to do with a group.
            threads: number of threads; None for the installation's.

        Raises:
            ReleaseError, RebuildError: the action raised on this rank; the cause is chained.
        """
        if groups:
            self._took, self._to_do = {}, len(groups)
        for order, part in groupby(groups, lambda group: group.construction.order[0]):
            together = list(part)
            alone = order == HANDED_OVER[0] or (
                self._options.parallelism is None
                and any(nccl.needs_one_thread(g.construction.released.values()) for g in together)
            )
            most = 1 if alone else min(threads or self._options.threads, len(together))
            with self._record.step("groups"):
                self._process(deque(together), action, most)
        for group in groups:
            self._record.add(group, self._took[group])

    def _process(self, left: deque[ManagedGroup], action: Action, threads: int) -> None:
        """Process groups in some threads; the job records abandoned groups."""
        wanted, busy, took = CancelToken(), self._busy, self._took

        def loop(index: int) -> None:
            while not wanted.cancelled:
                try:
                    group = left.popleft()
                except IndexError:  # none is left
                    return
                busy[index], begun = repr(group), time.perf_counter()
                try:
                    action(group, wanted, index)
                except Exception as cause:
                    raise self._failure(group, cause) from cause
                finally:
                    del busy[index]
                took[group] = (time.perf_counter() - begun) * 1e3
                self._round.advance()

        tasks: list[Task[object]] = []
        try:
            for index in range(threads):
                tasks.append(Task(partial(loop, index), self._kind.name))
            self._round.watch(tasks, wanted, self.doing)
        finally:
            wanted.cancel()  # also if a thread could not be started
            creates = not self._kind.releases
            for index, group in list(busy.items()):
                self._job.unfinished.append(Unfinished(group, [], tasks[index], creates))

    def _failure(self, group: ManagedGroup, cause: Exception) -> ReloadpgError:
        outside = f". {_OUTSIDE}" if group.construction.is_handed_over else ""
        return self._kind.error(
            f"{self._kind.name} failed at {group!r} on rank {self._job.rendezvous.rank}: "
            f"{type(cause).__name__}: {cause}{outside if not self._kind.releases else ''}"
        )

    # -- what failed operations have left ---------------------------------------------------

    def await_unfinished(self) -> None:
        """Wait a limited time for communicators that failed operations are still destroying.

        A call in C++ may never return and must not block the job.
        """
        job = self._job
        abort(job, [], GroupState.FAILED)  # those for which no thread could be started
        for entry in list(job.unfinished):
            if entry.task is not None and entry.task.ended:
                job.unfinished.remove(entry)
        destroying = [entry for entry in job.unfinished if entry.runs() and not entry.creates]
        end = Deadline(self._kind.name, min(_UNFINISHED_S, self._round.seconds / 2))

        def wait() -> None:
            while end.left and any(entry.runs(min(0.2, end.left)) for entry in destroying):
                self._round.advance()  # the other ranks may wait for this limited time

        if destroying:
            names = ", ".join(dict.fromkeys(entry.group for entry in destroying))
            doing = f"waiting for communicators that are still being destroyed: {names}"
            self.do("unfinished", wait, doing)

    def abandon(self, scope: Scope, reason: str) -> None:
        """Set the groups to failed, and abort their communicators. Local; waits a limited time."""
        job = self._job
        scope.mark_offloaded()
        job.forget_clients()  # abandoned creations may hold the clients indefinitely
        # Some ranks may have rebuilt a group and others not. With different generations, the ranks
        # would disagree in every later attempt.
        for group in scope.groups:
            group.fall_back(job.generation)
        # A recovery replaces all backends: some ranks may already have the new ones, and others
        # not.
        groups = list(reversed(scope.groups))
        aborts = abort(job, groups, GroupState.FAILED, reason, whole=scope.kind.whole)
        # Usually their memory is free before the caller sees the error. An abort that hangs must
        # not withhold the error: the report names it, and the next operation waits for it again.
        end = Deadline(self._kind.name, _ABORT_S)
        for aborting in aborts:
            aborting.runs(end.left)
