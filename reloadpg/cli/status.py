"""``reloadpg status``: the state of the ranks of a running job, from outside the job.

A running operation comes first: the ranks that wait, their barrier, since when, and for whom.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..observability.record import RankRecord, Reading, read_directory
from ..reports import OperationStatus
from ..settings import STATUS_DIR
from ..texts import counted, format_ranks, table
from .console import CommandError, Finding, say

WAITING_S = 30.0
"""Seconds after which a wait for running ranks is a problem."""

_SHOWN_RANKS = 10
_NAMED = 3
"""Maximum number of errors that are shown."""
_ABSENT = {
    "gone": "process gone",
    "stopped": "process stopped",
    "silent": "record not updated",
    "exited": "exited",
    "not seen": "no record in this directory",
}
"""Text for why a rank will not arrive."""

_Key = TypeVar("_Key", bound=Hashable)


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "status",
        help="show the state of a running job's ranks",
        description=(
            "Show the state of each rank of a running job, and inconsistencies. The job runs with "
            f"{STATUS_DIR} set to a directory that this command can read; each rank keeps a file "
            "there, as JSON. Exit code 1 if no rank runs or a rank has a problem: missing, gone, "
            "stopped, silent, failed, not installed, or stuck."
        ),
        epilog="Example: reloadpg status /tmp/job",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the job's status directory (default: ${STATUS_DIR})",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = options.directory or os.environ.get(STATUS_DIR)
    if not directory:
        raise CommandError(
            f"no job was named. Pass its status directory, or set {STATUS_DIR} to it."
        )
    job = JobView(read_directory(Path(directory)))
    say(page(job))
    return 0 if job.ok else 1


def page(job: JobView) -> str:
    """Show a job as text: the findings, and below them a row for each rank."""
    indent = max((len(one.check) for one in job.findings), default=0)
    lines = [line for one in job.findings for line in one.lines(f"{one.check.ljust(indent)}  ")]
    if not job.ranks:
        return "\n".join(lines)
    states = ", ".join(f"{len(ranks)} {state}" for state, ranks in job.states.items())
    known = "?" if job.reading.world_size is None else job.reading.world_size
    now = job.reading.time
    head = f"reloadpg {clock(now)}: {len(job.ranks)} of {known} ranks: {states}"
    header = ("rank", "state", "updated", "host", "gen", "offload ms", "reload ms", "groups")
    rows = [
        (
            *(one.rank, state_of(one), age(now - one.time), one.host, one.generation),
            *(_rounded(one.last_ms.get(name)) for name in ("offload", "reload")),
            *(one.groups, _rounded(one.memory_bytes, 1 << 20)),
        )
        for one in job.ranks
    ]
    lines += [""] * bool(lines)
    return "\n".join([head, "", *lines, table((*header, "held MiB"), rows)])


def _rounded(value: float | None, unit: float = 1) -> int | None:
    return None if value is None else round(value / unit)


# -- the running operation ------------------------------------------------------------------------


@dataclass(frozen=True)
class InProgress:
    """The running operation of a job.

    Attributes:
        progress: of the rank that arrived first at the next barrier, or began last.
        inside: the progress of each rank that is in it.
        waiting: the ranks that wait at the next barrier.
        since: Unix time at which the first of them arrived; None if none waits.
        missing: the ranks that they wait for, by reason.
        stuck: whether missing ranks will not arrive, or have been missing for long.
        timeout_s: timeout of the wait: seconds without progress; None if unknown.
    """

    progress: OperationStatus
    inside: Mapping[int, OperationStatus]
    waiting: Sequence[int]
    since: float | None
    missing: Mapping[str, Sequence[int]]
    stuck: bool
    timeout_s: float | None

    @classmethod
    def of(cls, records: Sequence[RankRecord], expected: Iterable[int]) -> InProgress | None:
        """Build it from the records of a job with these ranks; None if no operation runs."""
        known = {one.rank: one for one in records}
        inside = {one.rank: one.running for one in records if one.running and not one.absent}
        if not inside:
            return None
        sequence = max(one.sequence for one in inside.values())
        inside = {rank: one for rank, one in inside.items() if one.sequence == sequence}
        waits = {rank: one for rank, one in inside.items() if one.waiting}
        # A record that is a second old may be from the previous barrier.
        rank, last = max((waits or inside).items(), key=lambda pair: pair[1].since)
        waits = {rank: one for rank, one in waits.items() if one.phase == last.phase}
        absent = [rank for rank in expected if rank not in waits] if waits else []
        missing = _by(absent, lambda rank: _why_missing(known.get(rank), last))
        waited = max((known[rank].time - one.since for rank, one in waits.items()), default=0.0)
        since = min((one.since for one in waits.values()), default=None)
        stuck = _is_stuck(missing, waited)
        return cls(last, inside, sorted(waits), since, missing, stuck, known[rank].timeout_s)

    def findings(self, records: Sequence[RankRecord]) -> Iterator[Finding]:
        """Yield findings about it; a stuck rank is a problem."""
        progress, each = self.progress, self.inside.values()
        begun = f"since {_when(min(one.started_at for one in each))}"
        at = f", before barrier {progress.phase!r}" if progress.phase else ""
        what = f"in progress on {_ranks(self.inside)}, {begun}{at}"
        yield Finding(progress.operation, "", what)
        if groups := sum(one.groups for one in each):
            done = sum(one.groups_done for one in each)
            yield Finding("groups", "", f"{done} of {counted(groups, 'group')} done")
        if self.since is None:
            return
        waiting = f"{_ranks(self.waiting)}, since {_when(self.since)}"
        if self.timeout_s is not None:
            waiting += f"; timeout: {self.timeout_s:g} s without progress on any rank"
        yield Finding("waiting", "", waiting)
        known = {one.rank: one for one in records}
        for why, ranks in self.missing.items():
            remedy, first = "", known.get(ranks[0])
            if self.stuck and why not in _ABSENT and first is not None:
                remedy = f"get the stack of rank {first.rank}: {_py_spy(first)}"
            level, words = "problem" if self.stuck else "", _ABSENT.get(why, why)
            yield Finding("waits for", level, f"{_ranks(ranks)}: {words}", remedy)


def _is_stuck(missing: Mapping[str, Sequence[int]], waited_s: float) -> bool:
    return any(why in _ABSENT for why in missing) or (bool(missing) and waited_s >= WAITING_S)


def _why_missing(record: RankRecord | None, here: OperationStatus) -> str:
    """Why a rank is not at a barrier: a key of ``_ABSENT``, or a text."""
    if record is None:
        return "not seen"
    if record.absent:
        return record.absent
    if record.state == "not installed":
        return "reloadpg not installed"
    other = record.running
    if other is None:
        return f"{here.operation}() not called yet"
    if (other.operation, other.sequence) != (here.operation, here.sequence):
        another = "another " if other.operation == here.operation else ""
        return f"in {another}{other.operation}"
    return f"still working: {other.doing}" if other.doing else "still working"


# -- the job --------------------------------------------------------------------------------------


def state_of(record: RankRecord) -> str:
    """Why a rank is absent, or what it does, or the state of its groups."""
    return record.absent or (f"in {record.running.operation}" if record.running else record.state)


@dataclass(frozen=True)
class JobView:
    reading: Reading

    @property
    def ranks(self) -> Sequence[RankRecord]:
        return self.reading.ranks

    @property
    def states(self) -> dict[str, list[int]]:
        """The ranks in each state, most first."""
        known = {one.rank: state_of(one) for one in self.ranks}
        return dict(sorted(_by(known, known.__getitem__).items(), key=lambda pair: -len(pair[1])))

    @property
    def ok(self) -> bool:
        runs = any(one.absent != "exited" for one in self.ranks)
        return runs and all(one.level != "problem" for one in self.findings)

    @property
    def in_progress(self) -> InProgress | None:
        return InProgress.of(self.ranks, sorted({*self.reading.missing, *map(_rank, self.ranks)}))

    def absent(self, why: str) -> list[RankRecord]:
        """Ranks that no longer take part: ``exited``, ``gone``, ``stopped`` or ``silent``."""
        return [one for one in self.ranks if one.absent == why]

    @cached_property
    def findings(self) -> list[Finding]:
        """Findings about the job as a whole, the running operation first."""
        return [*self._findings()]

    def _findings(self) -> Iterator[Finding]:
        if running := self.in_progress:
            yield from running.findings(self.ranks)
        if self.ranks:
            yield from self._of_ranks()
            yield from self._of_absent()
            yield from self._of_errors()
        else:
            remedy = f"set {STATUS_DIR} to this directory on every rank; reloadpg.install() then "
            yield Finding("directory", "problem", self.reading.absence, f"{remedy}creates a file")
        for failure in self.reading.failures:
            yield Finding("unreadable", "warning", failure)

    def _of_ranks(self) -> Iterator[Finding]:
        if missing := self.reading.missing:
            what = f"{_ranks(missing)} of a job of {self.reading.world_size}: no readable record"
            remedy = "check that it runs, and that reloadpg is installed in it with the same "
            yield Finding("missing", "problem", what, f"{remedy}status directory")
        if off := self.states.get("off"):
            what = f"{_ranks(off)}: RELOADPG=off, so no memory of communicators is released"
            remedy = "unset RELOADPG on every rank and start the job again"
            yield Finding("off", "note" if len(off) == len(self.ranks) else "problem", what, remedy)
        if ranks := self.states.get("not installed"):
            remedy = "call reloadpg.install() on every rank, before the groups are created"
            yield Finding("not installed", "problem", _ranks(ranks), remedy)
        if ranks := [one.rank for one in self.ranks if "failed" in state_of(one)]:
            remedy = "fix the cause, then call reload() on all ranks"
            yield Finding("failed", "problem", _ranks(ranks), remedy)
        if holding := [one for one in self.ranks if one.alone]:
            groups = counted(sum(one.alone for one in holding), "bypassed group")
            what = f"{_ranks(map(_rank, holding))}: {groups} of one rank with a communicator"
            remedy = "install(min_size=1) on all ranks makes such groups reloadable"
            yield Finding("one rank", "warning", what, remedy)

    def _of_absent(self) -> Iterator[Finding]:
        """Findings about ranks that have ended, or do not update their record."""
        if exited := self.absent("exited"):
            yield Finding("exited", "warning", f"{_ids(exited)}: {_last_seen(exited)}")
        if gone := self.absent("gone"):
            remedy = "look for the cause in the rank's log and in dmesg; restart the job"
            what = f"{_ids(gone)}: ended without an orderly exit, {_last_seen(gone)}"
            yield Finding("gone", "problem", what, remedy)
        if stopped := self.absent("stopped"):
            what = f"{_ids(stopped)}: stopped, by SIGSTOP or by a debugger"
            remedy = f"continue it: kill -CONT {' '.join(str(one.pid) for one in stopped[:8])}"
            yield Finding("stopped", "problem", what, remedy)
        if silent := self.absent("silent"):
            remedy = "it may hang in a call that holds Python's GIL, have ended, or be on a host "
            remedy += f"whose clock is behind: {_py_spy(silent[0])}"
            yield Finding("silent", "problem", f"{_ids(silent)}: {_last_seen(silent)}", remedy)

    def _of_errors(self) -> Iterator[Finding]:
        known = {one.rank: one.error for one in self.ranks if one.error}
        errors = _by(known, known.__getitem__)
        for error, ranks in list(errors.items())[:_NAMED]:
            yield Finding("error", "warning", f"{_ranks(ranks)}: {error}")
        if len(errors) > _NAMED:
            more = f"{counted(len(errors) - _NAMED, 'more error')}: see the status files"
            yield Finding("error", "note", more)


def _rank(record: RankRecord) -> int:
    return record.rank


def _by(ranks: Iterable[int], key: Callable[[int], _Key]) -> dict[_Key, list[int]]:
    found: dict[_Key, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


# -- text -----------------------------------------------------------------------------------------


def _py_spy(record: RankRecord) -> str:
    return f"py-spy dump --pid {record.pid} on {record.host}"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as text that fits a line."""
    ranks = list(ranks)
    several = "ranks" if len(ranks) > 1 else "rank"
    runs = format_ranks(ranks).split(", ")
    if len(runs) > _SHOWN_RANKS:
        runs = [*runs[:_SHOWN_RANKS], f"... ({len(ranks)} in all)"]
    return f"{several} {', '.join(runs)}"


def _ids(records: Sequence[RankRecord]) -> str:
    ranks = _ranks(map(_rank, records))
    return f"{ranks} (pid {records[0].pid})" if len(records) == 1 else ranks


def _last_seen(records: Iterable[RankRecord]) -> str:
    return f"last update at {_when(max(one.time for one in records))}"


def _when(at: float) -> str:
    return f"{clock(at)} ({age(time.time() - at)} ago)"


def clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # a record may contain any number
        return "?"


def age(seconds: float) -> str:
    """A duration in its largest unit. The clock of another host may be ahead of this one."""
    if seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
