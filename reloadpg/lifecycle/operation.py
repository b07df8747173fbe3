"""One offload, reload or recovery on this rank: its begin, its barriers, its steps, its end.

It runs in a separate thread (:mod:`.pending`), as the ``with`` block of an :class:`Operation`: its
steps in order, each up to the next barrier. An error leaves the groups unchanged or failed, on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from ..errors import NotInstalledError, ReloadpgError
from ..groups.managed import ManagedGroup
from ..groups.offloaded import UnderWay
from ..groups.registry import registry
from ..rendezvous.round import Round
from ..reports import OperationStatus, Report
from ..settings import IS_OFF
from ..threads import Interrupted
from .callbacks import Callback
from .caller import Caller
from .installation import Options, installation
from .job import Job, jobs
from .kinds import Kind
from .report import Record
from .scope import Scope
from .workers import Action, Workers

_CREATORS = 16384
"""Maximum number of creating threads over all ranks of a job (or one per rank, if it has more
ranks). The store's server has a file descriptor for each, and 65,536 is a common limit."""


class Operation:
    """One lifecycle operation on this rank.

    Args:
        kind: offload, reload or recover.
        named: the sets named in the call; empty for all.
        seconds: the timeout of the wait for ranks that have not made the call; None for the
            installation's.

    Attributes:
        options: the installation's.
        job: the job; None if torch.distributed is not initialized.
        record: what it records for its report.
        committed: whether all ranks have passed the last barrier.
        report: the report of this rank; set when the operation has ended.
    """

    def __init__(
        self, kind: Kind, named: frozenset[str] = frozenset(), seconds: float | None = None
    ) -> None:
        self.kind = kind
        self.options = installation.options or Options()  # it does nothing if the library is off
        self.record = Record(kind)
        self.job: Job | None = None
        self.committed = False
        self._named, self._seconds = named, seconds
        self._caller = Caller()
        self._under_way: UnderWay | None = None
        self._scope: Scope | None = None
        self._workers: Workers | None = None
        self._round: Round | None = None
        self._failed = False  # in this attempt, and the other ranks know
        note = IS_OFF if registry.off else "torch.distributed is not initialized"
        self.report = Report(operation=kind.name, changed=False, generation=0, note=note)

    @property
    def name(self) -> str:
        return self.kind.name

    # -- its begin and its end --------------------------------------------------------------

    def begin(self, caller: Caller) -> Operation:
        """Begin the operation in this process; the ``with`` block that follows ends it. Local.

        Args:
            caller: the thread that has called it. If that does not wait, the threads of the
                operation have exclusive use of the groups until it ends.

        Raises:
            NotInstalledError: ``install`` was not called.
            InvalidOptionError: ``install`` does not declare a chosen set.
            ReloadpgError: another operation runs, or the groups belong to a parent process.
        """
        if installation.options is None and not registry.off:
            raise NotInstalledError(
                f"{self.name}() was called, but reloadpg is not installed; nothing was changed. "
                "Call reloadpg.install() before the process groups are created."
            )
        if registry.selection is not None:
            registry.selection.refuse_undeclared(sorted(self._named), self.name)
        jobs.begin(self)
        try:
            job = jobs.current(self.name)
            if job is not None:
                chosen = self._named or registry.sets
                self._scope = Scope.of(self.kind, job, self.options, chosen)
                self._workers = Workers(self.kind, job, self.record)
            self._caller, self.job = caller, job
            if not caller.waits:
                self._under_way = UnderWay(self.name)
                self._under_way.enter()
                self.reserve()
        except BaseException:
            jobs.end(self)
            raise
        return self

    def __enter__(self) -> Operation:
        return self

    def enter(self, *, reason: str = "") -> None:
        """Enter the next operation of the job with all ranks; see :meth:`Round.enter`."""
        self.record.measure()
        self._known.begin_operation()
        self._round, self._failed = self._new_round(), False
        self._round.enter(reason)

    def _new_round(self) -> Round:
        """The next operation of the job, which this rank has not entered yet."""
        seconds = self.options.timeout.total_seconds()
        rendezvous, phases = self._known.rendezvous, self.scope.barriers
        return Round(rendezvous, self.name, phases, seconds, self._caller)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End it as all ranks do, build the report, and free its groups for other threads."""
        told = self._caller.error
        if isinstance(error, Interrupted) and told is not None:
            error = told
        try:
            if self.job is not None:
                if error is not None and not self._failed:
                    self._end_early(self.job, error)
                self.report = self.record.report(self.job, self.scope)
        finally:
            if self._round is not None:
                self._round.notified.set()
            if self._under_way is not None and self._scope is not None:
                self._scope.free(self._under_way)
            jobs.end(self)
            if self._under_way is not None:
                self._under_way.end()
        if error is not None and told is error:
            raise error

    def _end_early(self, job: Job, error: BaseException) -> None:
        """End it as all ranks do: complete, unchanged, or failed. Local, with a timeout.

        The phase at which the operation ended decides: the last rank may have arrived at a barrier
        just before this error, so the others may be in a later phase, or done.
        """
        self.record.activity, self._failed = f"ending it after {type(error).__name__}", True
        phase = (self._round or self._new_round()).fail(error)
        text = f"{type(error).__name__}: {error}"
        if phase is None:
            self._commit()
        elif phase in self.kind.touching:
            self.workers.abandon(self.scope, text.splitlines()[0])
        job.fail_operation(text)

    def fails(self, error: ReloadpgError, pause: float) -> bool:
        """End this attempt on all ranks; return False, after a pause, if all make another one.

        They do if a rank could not rebuild a group and all have responded: they read the same
        decision. :meth:`enter` begins the next attempt. Local, with a timeout.

        Args:
            error: why the attempt ends on this rank.
            pause: in seconds.
        """
        if self.committed:
            return True
        self._end_early(self._known, error)
        decision = self.round.decision
        if decision is None or not decision.is_failed_rebuild:
            return True
        self.record.retry(f"rank {decision.rank}: {decision.text}", pause)
        with self.step("pause", "waiting before the next attempt"):
            self._caller.pause(pause)
        return False

    def _commit(self) -> None:
        """Record the state that all ranks have after the last barrier. Once."""
        if not self.committed:
            self.committed = True
            self.scope.commit()
            if self.kind.whole:
                self._known.rendezvous.note_recovery(self.round.number)

    # -- its parts --------------------------------------------------------------------------

    @property
    def _known(self) -> Job:
        if self.job is None:
            raise ReloadpgError(f"{self.name} has no job; this is a bug")
        return self.job

    @property
    def scope(self) -> Scope:
        """What it works on."""
        if self._scope is None:
            raise ReloadpgError(f"{self.name} has no job; this is a bug")
        return self._scope

    @property
    def workers(self) -> Workers:
        """Its threads."""
        if self._workers is None:
            raise ReloadpgError(f"{self.name} has no job; this is a bug")
        return self._workers

    @property
    def round(self) -> Round:
        """The barriers to reach."""
        if self._round is None:
            raise ReloadpgError(f"{self.name} has no barriers before all ranks have entered it")
        return self._round

    @property
    def groups(self) -> list[ManagedGroup]:
        """The managed groups that it may change, in the shared order."""
        return self.scope.groups

    @property
    def creators(self) -> int:
        """Number of threads that create groups, each with a separate store client."""
        return min(self.options.threads, max(1, _CREATORS // self.scope.world.size()))

    def rebuild_all(self, generation: int) -> None:
        """Make it rebuild all groups of the chosen sets, whatever their state. Local."""
        self._scope = self.scope.rebuilding_all(generation)

    def reserve(self) -> None:
        """Restrict the groups that it changes to its threads until it ends, if it is pending."""
        if self._under_way is not None and self._scope is not None:
            self._scope.reserve(self._under_way)

    # -- barriers ---------------------------------------------------------------------------

    def agree(
        self,
        said: str = "",
        summary: Callable[[Sequence[str]], str] = "\n".join,
        seconds: float | None = None,
        **arguments: str,
    ) -> str:
        """Agree on the plan with all ranks; see :meth:`Round.barrier`.

        Args:
            said, summary: what this rank says to all ranks, and how that is summarized.
            seconds: the timeout of this barrier; None for the timeout of the call, or of
                ``install``.
            arguments: further arguments of the call that must be equal on all ranks.
        """
        plan = self.scope.plan(arguments)
        with self.step("wait.enter"):
            return self.round.barrier("enter", plan, said, summary, seconds or self._seconds)

    def barrier(self, phase: str) -> None:
        """Wait until all ranks arrive; the last one commits. See :meth:`Round.barrier`."""
        with self.step(f"wait.{phase}"):
            self.round.barrier(phase)
        if phase == self.scope.barriers[-1]:
            self._commit()

    # -- steps ------------------------------------------------------------------------------

    def step(self, name: str, doing: str = "") -> AbstractContextManager[None]:
        """Record the time of a block; see :meth:`Record.step`."""
        return self.record.step(name, doing)

    def await_unfinished(self) -> None:
        """Wait for what failed operations have left; see :meth:`Workers.await_unfinished`."""
        self.workers.await_unfinished(self.round)

    def do(self, step: str, work: Callable[[], object], doing: str) -> None:
        """Run blocking work in a thread; see :meth:`Workers.do`."""
        self.workers.do(self.round, step, work, doing)

    def over(
        self, groups: Sequence[ManagedGroup], action: Action, threads: int | None = None
    ) -> None:
        """Process groups, by default in the installation's threads; see :meth:`Workers.over`."""
        options = self.options
        self.workers.over(
            self.round, groups, action, threads or options.threads, options.parallelism
        )

    def in_caller(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the caller, if that waits."""
        self._caller.call(function)

    def call(self, due: Iterable[Callback], then: str = "") -> None:
        """Call user callbacks in the caller's thread.

        An error names the callback and ends with ``then``: the state and the remedy.
        """
        for callback in due:
            with self.step("callbacks", f"callback {callback.name}"):
                try:
                    self.in_caller(callback.function)
                except Interrupted:  # the caller waits no more
                    raise
                except Exception as cause:
                    text = str(cause).rstrip(".") if then else str(cause)
                    raise ReloadpgError(
                        f"{self.name}: callback {callback.name} raised {type(cause).__name__}: "
                        f"{text}{then}"
                    ) from cause

    def call_reloaded(self) -> None:
        """Call the callbacks after a reload that are owed on this rank; raise the first error.

        The groups are live on all ranks by then, so a callback may run collectives on them, and its
        error is this rank's alone: the operation is complete. Each is owed until it has returned.
        """
        first: ReloadpgError | None = None
        for callback in self._known.owed.of(self.scope.chosen):
            try:
                self.call([callback], _LIVE)
            except ReloadpgError as error:
                first = first or error
            else:
                self._known.owed.strike(callback)
        if first is not None:
            raise first

    # -- its status -------------------------------------------------------------------------

    def status(self) -> OperationStatus:
        """Return the progress of this operation on this rank. Local, from any thread."""
        begun, round_, workers = self.record.started_at, self._round, self._workers
        if round_ is None or workers is None:
            return OperationStatus(self.name, 0, "", False, begun, begun)
        waiting = round_.waiting
        doing = "" if waiting else self.record.activity or workers.doing()
        return OperationStatus(
            self.name,
            round_.number,
            round_.phase,
            waiting,
            begun,
            round_.since,
            doing,
            *workers.progress,
        )


_LIVE = (
    ". All groups are live on all ranks. reload() on all ranks calls the callbacks of this rank "
    "that have not returned."
)
"""The state and the remedy after a callback after a reload has failed."""
