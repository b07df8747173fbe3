"""The record of one operation on this rank, and the report built from it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from ..c10d import tables
from ..groups.borrowed import borrowed
from ..groups.managed import ManagedGroup
from ..groups.registry import Options, registry
from ..groups.sets import Chosen
from ..reports import Borrowed, GroupReport, RankFault, Report, Span
from ..texts import warn
from . import memory
from .callbacks import callbacks
from .job import Job

logger = logging.getLogger("reloadpg")


class Record:
    def __init__(self, operation: str, chosen: Chosen) -> None:
        self.operation = operation
        self.chosen = chosen
        self.started_at = time.time()
        self.groups: list[GroupReport] = []
        self.warnings: list[str] = []
        self.faults: tuple[RankFault, ...] = ()
        self._started = time.perf_counter()
        self._spans: list[Span] = []
        self._memory: dict[str, dict[str, int]] = {}
        self._moments: dict[str, float] = {}

    def measure(self, moment: str) -> None:
        self._memory[moment] = memory.in_use()
        self._moments[moment] = (time.perf_counter() - self._started) * 1e3

    @contextmanager
    def timed(self, phase: str, *, measure: bool = True) -> Iterator[None]:
        """Record the time of this block, and the memory in use after it, as a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            start = (begun - self._started) * 1e3
            self._spans.append(Span(phase, start, (time.perf_counter() - begun) * 1e3))
            if measure:
                self.measure(phase)

    def add(self, group: ManagedGroup, begun: float, ms: float) -> None:
        """Record a group, its begin (``time.perf_counter()``) and duration, also in its history."""
        if any(report.name == group.name for report in self.groups):
            return  # first resumed, then connected
        history, offloads = group.history, self.operation == "offload"
        copies = offloads and history.strategy == "suspend"
        if offloads:
            history.offload_ms = ms
            history.cycles += 1
        else:
            history.reload_ms = ms
        self.groups.append(
            GroupReport(
                name=group.name,
                desc=group.desc,
                backend=group.construction.backend,
                size=group.construction.size,
                strategy=history.strategy,
                ms=ms,
                start_ms=(begun - self._started) * 1e3,
                reason=history.reason if offloads else "",
                bytes=history.held_bytes,
                set=group.set_name,
                pinned_bytes=history.suspended_bytes if copies else 0,
            )
        )

    def report(self, job: Job, note: str = "", error: str = "") -> Report:
        self.measure("after")
        unfinished = [str(entry) for entry in job.unfinished if not entry.task.ended]
        warnings = [*self.warnings, *memory.warnings(job.offloaded, self.chosen)]
        if self.operation == "offload":
            warnings += not_reloadable()
            if registry.options is not None and not registry.managed():
                warnings += nothing_released(registry.options)
        warnings += [f"{entry}: its memory is not free" for entry in unfinished]
        held = borrowed([g for g in registry.managed() if g.set_name in self.chosen])
        warnings += [text for loan in held if (text := _lost(loan))]
        return Report(
            operation=self.operation,
            changed=bool(self.groups),
            generation=job.generation,
            groups=tuple(self.groups),
            spans=tuple(self._spans),
            total_ms=(time.perf_counter() - self._started) * 1e3,
            note=note,
            memory=self._memory,
            warnings=tuple(warnings),
            error=error,
            started_at=self.started_at,
            rank=job.rendezvous.rank,
            world_size=job.rendezvous.size,
            unfinished=tuple(unfinished),
            moments_ms=self._moments,
            faults=self.faults,
            sets=str(self.chosen),
            borrowed=held,
        )


def publish(report: Report) -> None:
    """Log a report and pass it to the registered callbacks; their errors are logged. Local.

    Each kind of warning is given once: at the program's line if the program can change it there,
    and otherwise in the log. The exception of a failed operation has the text of its error.
    """
    logger.info("%s", report)
    for warning in report.warnings:
        first = is_new(warning)
        if first and warning.startswith(_NOTHING):
            warn(f"reloadpg.{report.operation}(): {warning}")
        else:
            logger.log(
                logging.WARNING if first else logging.DEBUG, "%s: %s", report.operation, warning
            )
    for callback in list(callbacks.report):
        try:
            callback(report)
        except Exception:
            logger.exception("a callback registered with reloadpg.on_report failed")


def is_new(warning: str) -> bool:
    """Whether no warning of this kind was given yet; from now on one was. Local."""
    kind = re.sub(r"\d[\d.]*", "#", warning)
    first = kind not in registry.warned
    registry.warned.add(kind)
    return first


def not_reloadable() -> list[str]:
    """Name the groups that should be reloadable and are not, with the reason. Local."""
    return [
        f"not reloadable, keeps its communicator: {text}"
        for text in _by_reason(registry.unmanaged())
    ]


_NOTHING = "nothing was released"


def nothing_released(options: Options) -> list[str]:
    """Return why an offload releases nothing if no group is reloadable. Local."""
    bypassed = registry.bypassed()
    if not bypassed:
        return []
    why = "; ".join(_by_reason((group, bypass.reason) for group, bypass in bypassed))
    remedies = " or ".join(dict.fromkeys(f"install({bypass.remedy})" for _, bypass in bypassed))
    return [
        f"nothing was released, since no group is reloadable: {why}. Installed with "
        f"{options.selection}; call {remedies} to make them reloadable."
    ]


def _lost(loan: Borrowed) -> str:
    """Warn of what can no longer be used, or is no longer in effect; empty if it can be."""
    if not loan.ended:
        return ""
    if loan.raw:
        return f"{loan}: a use of it is a use after free; it must be taken again after each reload"
    if loan.what == "backend":
        return f"{loan}: it no longer belongs to the group; take it again after each reload"
    if loan.what in ("abort hook", "memory pool"):
        return f"{loan}: it is no longer registered; register it again after each reload"
    return ""


def _by_reason(groups: Iterable[tuple[ProcessGroup, str]]) -> list[str]:
    by_reason: dict[str, list[ProcessGroup]] = {}
    for group, reason in groups:
        by_reason.setdefault(reason, []).append(group)
    return [f"group {tables.labels_of(those)}: {reason}" for reason, those in by_reason.items()]
