"""Record of one operation for its report: times, groups, warnings."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..c10d import memory
from ..groups.managed import ManagedGroup
from ..groups.registry import registry
from ..reports import GroupReport, RankFault, Report, Span, groups_of_one_rank
from .job import Job
from .kinds import Kind
from .scope import Scope
from .status import bypassed_groups, dropped_groups, not_reloadable, nothing_released

logger = logging.getLogger("reloadpg")


class Record:
    """The record of one operation on this rank.

    Attributes:
        activity: this rank's current activity other than with groups, as text.
        started_at: Unix time of the call.
        groups: the reports on the groups that it has changed, by name.
    """

    def __init__(self, kind: Kind) -> None:
        self.started_at = time.time()
        self.activity = ""
        self.groups: dict[str, GroupReport] = {}
        self._kind = kind
        self._started = time.perf_counter()
        self._spans: list[Span] = []
        self._warnings: list[str] = []
        self._faults: tuple[RankFault, ...] = ()
        self._retries: list[str] = []
        self._note = ""
        self._before: dict[str, int] = {}

    def do(self, activity: str) -> None:
        """Record what this rank does now, for the status. Local."""
        self.activity = activity

    def measure(self) -> None:
        """Record the memory in use before the operation. Idempotent."""
        self._before = self._before or memory.in_use()

    def warn(self, *texts: str) -> None:
        self._warnings += texts

    def note(self, text: str) -> None:
        """Record why nothing was done; empty if something was."""
        self._note = text

    def retry(self, reason: str, pause: float) -> None:
        """Record why an attempt failed on all ranks; the next one follows after a pause."""
        self._retries.append(reason.splitlines()[0])
        logger.warning(
            "%s: attempt %d failed, the next one follows in %.1f s: %s",
            self._kind.name,
            len(self._retries),
            pause,
            self._retries[-1],
        )

    def blame(self, faults: Iterable[RankFault]) -> None:
        """Record the faults that ranks have reported to a recovery."""
        self._faults = tuple(faults)

    @contextmanager
    def step(self, name: str, doing: str = "") -> Iterator[None]:
        """Record the time of this block for the report; ``doing`` is what the status shows."""
        self.activity, begun = doing, time.perf_counter()
        try:
            yield
        finally:
            self.activity, start = "", (begun - self._started) * 1e3
            self._spans.append(Span(name, start, (time.perf_counter() - begun) * 1e3))

    def add(self, group: ManagedGroup, ms: float) -> None:
        """Record a group, once: it is first resumed and then connected."""
        if group.name in self.groups:
            return
        history, releases = group.history, self._kind.releases
        suspended = releases and history.strategy == "suspend"
        self.groups[group.name] = GroupReport(
            name=group.name,
            desc=group.desc,
            backend=group.construction.backend,
            size=group.construction.size,
            strategy=history.strategy,
            ms=ms,
            reason=history.reason if releases else "",
            bytes=history.held_bytes,
            set=group.set_name,
            pinned_bytes=history.suspended_bytes if suspended else 0,
        )

    def report(self, job: Job, scope: Scope) -> Report:
        """Build the report at the end of the operation. Local."""
        return Report(
            operation=self._kind.name,
            changed=bool(self.groups),
            generation=job.generation,
            groups=tuple(self.groups.values()),
            spans=tuple(self._spans),
            total_ms=(time.perf_counter() - self._started) * 1e3,
            note="" if job.last_error else self._note,
            memory={"before": self._before, "after": memory.in_use()},
            warnings=tuple(self._all_warnings(job, scope)),
            error=job.last_error,
            started_at=self.started_at,
            rank=job.rendezvous.rank,
            world_size=job.rendezvous.size,
            faults=self._faults,
            retries=tuple(self._retries),
            sets=scope.shown_sets,
        )

    def _all_warnings(self, job: Job, scope: Scope) -> Iterator[str]:
        yield from self._warnings
        if self._kind.releases:
            yield from not_reloadable()
            if registry.selection is not None and not registry.managed():
                yield from nothing_released(registry.selection)
            yield from job.warn_of_one_rank(groups_of_one_rank(bypassed_groups(True)))
        elif self.groups and not self._kind.whole:
            yield from dropped_groups(scope.planned.values())
        yield from (f"{entry}: its memory is not free" for entry in job.unfinished if entry.runs())
        chosen = [group for group in registry.managed() if group.set_name in scope.chosen]
        held = [one for group in chosen for one in group.loans.held()]
        yield from (text for loan in held if (text := loan.consequence))
