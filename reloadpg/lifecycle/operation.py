"""One offload, reload or recovery on this rank: its begin, its barriers, its steps, its end.

It runs in a separate thread (:mod:`.pending`), as the ``with`` block of an :class:`Operation`: its
steps in order, each up to the next barrier. An error leaves the groups unchanged or failed, on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import NotInstalledError, ReloadpgError
from ..groups.offloaded import UnderWay
from ..groups.registry import registry
from ..rendezvous.round import Round
from ..reports import OperationStatus, Report
from ..threads import Interrupted
from .callbacks import Callback
from .caller import Caller
from .installation import Options, installation
from .job import Job, jobs
from .kinds import Kind
from .report import Record
from .scope import Scope
from .workers import Workers


class Operation:
    """One lifecycle operation of the job on this rank.

    Args:
        kind: offload, reload or recover.
        job: the job.
        options: the installation's.
        chosen: the sets that it is for.
        caller: the thread that has called it. If that does not wait, the threads of the operation
            have exclusive use of the groups until it ends.
        seconds: the timeout of the wait for ranks that have not made the call; None for the
            installation's.

    Attributes:
        scope: what it works on.
        record: what it records for its report.
        round: the barriers to reach.
        workers: its threads.
        committed: whether all ranks have passed the last barrier.
        report: the report of this rank; set when the operation has ended.
    """

    def __init__(
        self,
        kind: Kind,
        job: Job,
        options: Options,
        chosen: frozenset[str],
        caller: Caller,
        seconds: float | None = None,
    ) -> None:
        self.kind, self.job, self.options = kind, job, options
        self.scope = Scope.of(kind, job, options, chosen)
        self.record = Record(kind)
        self.committed = False
        self.report = Report(operation=kind.name, changed=False, generation=job.generation)
        self._caller, self._seconds = caller, seconds
        self._under_way = None if caller.waits else UnderWay(kind.name)
        self._begin_attempt()

    @classmethod
    def begin(
        cls, kind: Kind, named: frozenset[str], caller: Caller, seconds: float | None = None
    ) -> Operation | None:
        """Begin an operation in this process; its ``with`` block ends it. Local.

        Args:
            kind, caller, seconds: as for :class:`Operation`.
            named: the sets named in the call; empty for all.

        Returns:
            The operation; None without a default group, or if the library is off.

        Raises:
            NotInstalledError: ``install`` was not called.
            InvalidOptionError: ``install`` does not declare a chosen set.
            ReloadpgError: another operation runs, or the groups belong to a parent process.
        """
        options = installation.options
        if options is None and not registry.off:
            raise NotInstalledError(
                f"{kind.name}() was called, but reloadpg is not installed; nothing was changed. "
                "Call reloadpg.install() before the process groups are created."
            )
        if registry.selection is not None:
            registry.selection.refuse_undeclared(sorted(named), kind.name)
        with registry.lock:
            jobs.refuse_second(kind.name)
            job = jobs.current(kind.name)
            if job is None or options is None:
                return None
            op = cls(kind, job, options, named or registry.sets, caller, seconds)
            jobs.begin(op)
            return op

    @property
    def name(self) -> str:
        return self.kind.name

    # -- its begin and its end --------------------------------------------------------------

    def __enter__(self) -> Operation:
        return self

    def enter(self, *, reason: str = "") -> None:
        """Enter the next operation of the job with all ranks; see :meth:`Round.enter`."""
        self.record.measure()
        self.job.begin_operation()
        self._begin_attempt()
        self.round.enter(reason)

    def _begin_attempt(self) -> None:
        """Prepare the next operation of the job, which this rank has not entered yet. Local."""
        self._failed = False  # in this attempt, and the other ranks know
        seconds, phases = self.options.timeout.total_seconds(), self.scope.barriers
        self.round = Round(self.job.rendezvous, self.name, phases, seconds, self._caller)
        self.workers = Workers(self.kind, self.job, self.record, self.round, self.options)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End it as all ranks do, build the report, and free its groups for other threads."""
        told = self._caller.error
        if isinstance(error, Interrupted) and told is not None:
            error = told
        try:
            if error is not None and not self._failed:
                self._end_early(error)
            self.report = self.record.report(self.job, self.scope)
        finally:
            self.round.notified.set()
            if self._under_way is not None:
                self.scope.free(self._under_way)
            jobs.end(self)
            if self._under_way is not None:
                self._under_way.end()
        if error is not None and told is error:
            raise error

    def _end_early(self, error: BaseException) -> None:
        """End it as all ranks do: complete, unchanged, or failed. Local, with a timeout.

        The phase at which the operation ended decides: the last rank may have arrived at a barrier
        just before this error, so the others may be in a later phase, or done.
        """
        self.record.do(f"ending it after {type(error).__name__}")
        self._failed = True
        phase = self.round.fail(error)
        text = f"{type(error).__name__}: {error}"
        if phase is None:
            self._commit()
        elif phase in self.kind.touching:
            self.workers.abandon(self.scope, text.splitlines()[0])
        self.job.fail_operation(text)

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
        self._end_early(error)
        decision = self.round.decision
        if decision is None or not decision.is_failed_rebuild:
            return True
        self.record.retry(f"rank {decision.rank}: {decision.text}", pause)
        with self.record.step("pause", "waiting before the next attempt"):
            self._caller.pause(pause)
        return False

    def _commit(self) -> None:
        """Record the state that all ranks have after the last barrier. Once."""
        if not self.committed:
            self.committed = True
            self.scope.commit()
            if self.kind.whole:
                self.job.rendezvous.note_recovery(self.round.number)

    # -- its scope --------------------------------------------------------------------------

    def rebuild_all(self, generation: int) -> None:
        """Make it rebuild all groups of the chosen sets, whatever their state. Local."""
        self.scope = self.scope.rebuilding_all(generation)

    def reserve(self) -> None:
        """Restrict the groups that it changes to its threads until it ends, if it is pending."""
        if self._under_way is not None:
            self._under_way.enter()
            self.scope.reserve(self._under_way)

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
        with self.record.step("wait.enter"):
            return self.round.barrier("enter", plan, said, summary, seconds or self._seconds)

    def barrier(self, phase: str) -> None:
        """Wait until all ranks arrive; the last one commits. See :meth:`Round.barrier`."""
        with self.record.step(f"wait.{phase}"):
            self.round.barrier(phase)
        if phase == self.scope.barriers[-1]:
            self._commit()

    # -- steps ------------------------------------------------------------------------------

    def in_caller(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the caller, if that waits."""
        self._caller.call(function)

    def call(self, due: Iterable[Callback], then: str = "") -> None:
        """Call user callbacks in the caller's thread.

        An error names the callback and ends with ``then``: the state and the remedy.
        """
        for callback in due:
            with self.record.step("callbacks", f"callback {callback.name}"):
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
        for callback in self.job.owed.of(self.scope.chosen):
            try:
                self.call([callback], _LIVE)
            except ReloadpgError as error:
                first = first or error
            else:
                self.job.owed.strike(callback)
        if first is not None:
            raise first

    # -- its status -------------------------------------------------------------------------

    def status(self) -> OperationStatus:
        """Return the progress of this operation on this rank. Local, from any thread."""
        round_, waiting = self.round, self.round.waiting
        doing = "" if waiting else self.record.activity or self.workers.doing()
        return OperationStatus(
            self.name,
            round_.number,
            round_.phase,
            waiting,
            self.record.started_at,
            round_.since,
            doing,
            *self.workers.progress,
        )


_LIVE = (
    ". All groups are live on all ranks. reload() on all ranks calls the callbacks of this rank "
    "that have not returned."
)
"""The state and the remedy after a callback after a reload has failed."""
