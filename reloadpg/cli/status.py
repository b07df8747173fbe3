"""``reloadpg status``: the state of the ranks of a running job, from outside the job.

A running operation comes first: which ranks wait at which barrier, since when, and for which ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..settings import STATUS_DIR
from ..texts import counted, format_ranks, table
from .console import CommandError, Finding, say
from .records import RankRecord, Reading, read_directory

WAITING_S = 3.0
"""Seconds after which a wait for ranks that have not arrived is a problem. Each rank reports its
position once per second, so the missing ranks would have reported the operation by then."""

WORKING_S = 30.0
"""The same if all missing ranks are working in the operation."""

_SHOWN_RANKS = 10
_HANG_S = 5.0
"""Seconds for which the members of a group may differ in their number of collectives."""
_NAMED = 3
"""Maximum number of ranks whose position is shown, and of errors."""
_WORKING = "still working"
_ABSENT = {
    "gone": "process gone",
    "stopped": "process stopped",
    "silent": "record not updated",
    "exited": "exited",
    "not seen": "no record in this directory",
}
"""Text for why a rank will not arrive."""

_FRAME = re.compile(r'^File "(?:.*-packages/)?(.*)", line (\d+) in (.*)$')
"""A frame as faulthandler writes it; the first group is the file, in a package for a library."""

_Key = TypeVar("_Key", bound=Hashable)

_REMEDIES = {
    "not installed": "call reloadpg.install() on every rank, before the groups are created",
    "failed": "fix the cause, then call reload() on all ranks",
}
"""States in which a rank has a problem, with the action to take."""


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "status",
        help="show the state of a running job's ranks",
        description=(
            "Show the state of each rank of a running job, and inconsistencies. The job runs with "
            f"{STATUS_DIR} set to a directory that this command can read. Exit code 1 if no rank "
            "runs or a rank has a problem: missing, gone, stopped, silent, failed, not installed, "
            "or stuck."
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
    parser.add_argument("--json", action="store_true", help="all values as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = options.directory or os.environ.get(STATUS_DIR)
    if not directory:
        raise CommandError(
            f"no job was named. Pass its status directory, or set {STATUS_DIR} to it."
        )
    job = JobView(read_directory(Path(directory)))
    say(json.dumps(job.to_dict()) if options.json else page(job))
    return 0 if job.ok else 1


def page(job: JobView) -> str:
    """Show a job as text: the findings, and below them a row for each rank."""
    findings = job.findings()
    indent = max(len(one.check) for one in findings)
    lines = [line for one in findings for line in one.lines(f"{one.check.ljust(indent)}  ")]
    if not job.ranks:
        return "\n".join(lines)
    states = ", ".join(f"{len(ranks)} {state}" for state, ranks in job.states.items())
    size = job.reading.world_size
    known = "?" if size is None else size
    head = f"reloadpg {clock(job.reading.time)}: {len(job.ranks)} of {known} ranks: {states}"
    header = ("rank", "state", "updated", "host", "gen", "offload ms", "reload ms", "groups")
    return "\n".join([head, "", *lines, "", table((*header, "held MiB"), [*map(_row, job.ranks)])])


def _row(record: RankRecord) -> tuple[object, ...]:
    status = record.status
    times = [_rounded(record.last_ms.get(name)) for name in ("offload", "reload")]
    held = _rounded(status.memory_bytes, 1 << 20)
    place = (record.rank, record.state, age(record.age_s), record.host, status.generation)
    return (*place, *times, len(status.groups), held)


def _rounded(value: float | None, unit: float = 1) -> int | None:
    return None if value is None else round(value / unit)


# -- the job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InProgress:
    """The running operation of a job.

    Attributes:
        sequence: its number in the job.
        phase: the next barrier.
        waiting: the ranks that wait at the barrier.
        missing: the ranks that they wait for, by reason.
        stuck: whether the missing ranks are not in the operation, or have been missing for long.
        started_at: Unix time at which the first rank called it.
        since: Unix time at which the first rank arrived at the barrier; None if none waits.
        waited_s: how long that rank had waited at its last update.
        timeout_s: timeout of the wait: seconds without progress; None if unknown.
        groups_done, groups: completed and all groups of the current step, over all ranks.
    """

    operation: str
    sequence: int
    phase: str
    ranks: Sequence[int]
    waiting: Sequence[int]
    missing: Mapping[str, Sequence[int]]
    stuck: bool
    started_at: float
    since: float | None
    waited_s: float
    timeout_s: float | None
    groups_done: int
    groups: int

    @classmethod
    def of(cls, records: Sequence[RankRecord], expected: Iterable[int]) -> InProgress | None:
        """Build it from the records of a job with these ranks; None if no operation runs."""
        inside = [(one, one.running) for one in records if one.running and not one.absent]
        if not inside:
            return None
        sequence = max(running.sequence for _, running in inside)
        inside = [(one, running) for one, running in inside if running.sequence == sequence]
        waits = [(one, running) for one, running in inside if running.waiting]
        # A record that is a second old may be from the previous barrier.
        latest, last = max(waits or inside, key=lambda pair: pair[1].since)
        waits = [(one, running) for one, running in waits if running.phase == last.phase]
        here = {one.rank for one, _ in waits}
        name = inside[0][1].operation
        known = {one.rank: one for one in records}
        absent = [rank for rank in expected if rank not in here] if waits else []
        missing = _by(absent, lambda rank: _why_missing(known.get(rank), name, sequence))
        waited = max((one.time - running.since for one, running in waits if one.time), default=0.0)
        return cls(
            name,
            sequence,
            last.phase,
            [one.rank for one, _ in inside],
            sorted(here),
            missing,
            _is_stuck(missing, waited),
            min(running.started_at for _, running in inside),
            min((running.since for _, running in waits), default=None),
            waited,
            latest.status.options.get("timeout_s"),
            sum(running.groups_done for _, running in inside),
            sum(running.groups for _, running in inside),
        )

    def findings(self, records: Sequence[RankRecord]) -> Iterator[Finding]:
        """Yield findings about it; a stuck rank is a problem."""
        begun = f"since {_when(self.started_at)}"
        at = f", before barrier {self.phase!r}" if self.phase else ""
        yield Finding(self.operation, "", f"in progress on {_ranks(self.ranks)}, {begun}{at}")
        if self.groups:
            done = f"{self.groups_done} of {counted(self.groups, 'group')} done"
            yield Finding("groups", "", done)
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
                remedy = _stack(first)
            level, words = "problem" if self.stuck else "", _ABSENT.get(why, why)
            yield Finding("waits for", level, f"{_ranks(ranks)}: {words}", remedy)


def _stack(record: RankRecord) -> str:
    """The position of a rank from its record, or how to find it; empty if unknown."""
    found = record.collectives
    if not found.stack:
        return f"get the stack of rank {record.rank}: {_py_spy(record)}" if record.pid else ""
    # Of libraries only the innermost frame, since the others are torch's decorators.
    outer = [frame for frame in found.stack[1:] if "-packages/" not in frame]
    frames = (_FRAME.sub(r"\3 (\1:\2)", frame) for frame in (found.stack[0], *outer[:_NAMED]))
    unfinished = "".join(f"; not completed: {one}" for one in found.unfinished[-_NAMED:])
    return f"rank {record.rank} is in {', called by '.join(frames)}{unfinished}"


def _py_spy(record: RankRecord) -> str:
    return f"py-spy dump --pid {record.pid}" + (f" on {record.host}" if record.host else "")


def _is_stuck(missing: Mapping[str, Sequence[int]], waited_s: float) -> bool:
    if any(why in _ABSENT for why in missing):
        return True
    works = all(why.startswith(_WORKING) for why in missing)
    return bool(missing) and waited_s >= (WORKING_S if works else WAITING_S)


def _why_missing(record: RankRecord | None, operation: str, sequence: int) -> str:
    """Why a rank is not at a barrier: a key of ``_ABSENT``, or a text."""
    if record is None:
        return "not seen"
    if record.absent:
        return record.absent
    if not record.installed:
        return "reloadpg not installed"
    other = record.running
    if other is None:
        return f"{operation}() not called yet"
    if (other.operation, other.sequence) != (operation, sequence):
        another = "another " if other.operation == operation else ""
        return f"in {another}{other.operation}"
    return f"{_WORKING}: {other.doing}" if other.doing else _WORKING


@dataclass(frozen=True)
class JobView:
    reading: Reading

    @property
    def ranks(self) -> Sequence[RankRecord]:
        return self.reading.ranks

    @property
    def generations(self) -> dict[int, list[int]]:
        known = {one.rank: one.status.generation for one in self.ranks if one.installed}
        return dict(sorted(_by(known, known.__getitem__).items()))

    @property
    def states(self) -> dict[str, list[int]]:
        """The ranks in each state, most first."""
        known = {one.rank: one.state for one in self.ranks}
        return dict(sorted(_by(known, known.__getitem__).items(), key=lambda pair: -len(pair[1])))

    @property
    def ok(self) -> bool:
        runs = any(one.absent != "exited" for one in self.ranks)
        return runs and all(one.level != "problem" for one in self.findings())

    @property
    def in_progress(self) -> InProgress | None:
        return InProgress.of(self.ranks, sorted({*self.reading.missing, *map(_rank, self.ranks)}))

    @property
    def sets(self) -> dict[str, dict[str, list[int]]]:
        """The ranks in each state of each set in which they have groups; empty for one set."""
        found: dict[str, dict[str, list[int]]] = {}
        for record in self.ranks:
            for name, one in record.status.sets.items():
                if one.groups and not record.absent:
                    found.setdefault(name, {}).setdefault(one.state, []).append(record.rank)
        return found if len(found) > 1 else {}

    def absent(self, why: str) -> list[RankRecord]:
        """Ranks that no longer take part: ``exited``, ``gone``, ``stopped`` or ``silent``."""
        return [one for one in self.ranks if one.absent == why]

    def findings(self) -> list[Finding]:
        """Findings about the job as a whole, the running operation first."""
        return [*self.running_findings(), *self.lasting_findings()]

    def running_findings(self) -> list[Finding]:
        running = self.in_progress
        return [] if running is None else [*running.findings(self.ranks)]

    def lasting_findings(self) -> list[Finding]:
        """Findings about the ranks."""
        unreadable = [Finding("unreadable", "warning", one) for one in self.reading.failures]
        if not self.ranks:
            absence = Finding("directory", "problem", self.reading.absence, self.reading.remedy)
            return [absence, *unreadable]
        states = (*self._of_generations(), *self._of_sets(), *self._of_ranks(), *self._of_absent())
        return [*states, *self._of_collectives(), *self._of_errors(), *unreadable]

    def _of_generations(self) -> Iterator[Finding]:
        generations = self.generations
        each = [f"{generation} on {_ranks(ranks)}" for generation, ranks in generations.items()]
        if len(each) > 1:
            # Normal for a moment in each reload.
            yield Finding("generation", "warning", f"differs: {'; '.join(each)}")
        elif each:
            yield Finding("generation", "ok", each[0])
        else:
            yield Finding("generation", "note", "unknown")

    def _of_sets(self) -> Iterator[Finding]:
        each = []
        for name, states in self.sets.items():
            parts = [f"{state} on {_ranks(ranks)}" for state, ranks in states.items()]
            each.append(f"{name} {', '.join(parts if len(states) > 1 else states)}")
        if each:
            yield Finding("sets", "", "; ".join(each))

    def _of_ranks(self) -> Iterator[Finding]:
        if missing := self.reading.missing:
            refused = self.reading.failures
            what = f"{_ranks(missing)} of a job of {self.reading.world_size}: no "
            remedy = "check that it runs, and that reloadpg is installed in it with the same "
            remedy = "see unreadable below" if refused else f"{remedy}status directory"
            what += "readable record" if refused else "record"
            yield Finding("missing", "problem", what, remedy)
        if off := self.states.get("off"):
            what = f"{_ranks(off)}: RELOADPG=off, so no memory of communicators is released"
            remedy = "unset RELOADPG on every rank and start the job again"
            yield Finding("off", "note" if len(off) == len(self.ranks) else "problem", what, remedy)
        for state, remedy in _REMEDIES.items():
            if ranks := self.states.get(state):
                yield Finding(state, "problem", _ranks(ranks), remedy)
        if left_over := self.reading.left_over:
            what = f"{_ranks(left_over)} of an earlier, larger job: their files are ignored"
            yield Finding("left over", "note", what)

    def _of_errors(self) -> Iterator[Finding]:
        known = {one.rank: one.error for one in self.ranks if one.error}
        errors = _by(known, known.__getitem__)
        for error, ranks in list(errors.items())[:_NAMED]:
            yield Finding("error", "warning", f"{_ranks(ranks)}: {error}")
        if len(errors) > _NAMED:
            more = f"{counted(len(errors) - _NAMED, 'more error')}: see the status files"
            yield Finding("error", "note", more)

    def _of_collectives(self) -> Iterator[Finding]:
        """Collectives that some members of a group have begun, and others have not for a while."""
        members: dict[str, dict[int, int]] = {}
        present = {one.rank: one for one in self.ranks if not one.absent and not one.running}
        for rank, record in present.items():
            for key, begun in record.collectives.begun.items():
                members.setdefault(key, {})[rank] = begun
        known: set[int] = set()
        for key, counts in members.items():
            most = max(counts.values())
            late = sorted(rank for rank, begun in counts.items() if begun < most)
            since = max(present[rank].collectives.since for rank in counts)
            seconds = self.reading.time - since
            if not late or seconds < _HANG_S:
                continue
            waiting = sorted({*counts} - {*late})
            known.update(waiting)
            behind = ", ".join(f"rank {rank} has begun {counts[rank]}" for rank in late)
            if len(late) > _NAMED:
                behind = f"{_ranks(late)} have begun fewer"
            what = f"{_ranks(waiting)} in collective {most} of group {key.split('/')[0]!r} for "
            what += f"{seconds:.0f} s; {behind}"
            stacks = (_stack(present[rank]) for rank in (*late[:_NAMED], *waiting[:1]))
            yield Finding("collective", "problem", what, "\n".join(filter(None, stacks)))
        pending = {n: one for n, one in present.items() if one.collectives.unfinished}
        waits = [one for rank, one in pending.items() if rank not in known]
        if waits:
            seconds = min(self.reading.time - one.collectives.since for one in waits)
            what = f"{_ranks(map(_rank, waits))} in a collective, send or receive that has not "
            what += f"completed; no new collective for {seconds:.0f} s"
            others = [one for rank, one in present.items() if rank not in pending]
            stacks = (_stack(one) for one in (*waits[:_NAMED], *others[:1]))
            yield Finding("collective", "warning", what, "\n".join(filter(None, stacks)))

    def _of_absent(self) -> Iterator[Finding]:
        """Findings about ranks that have ended, or that do not update their record."""
        if exited := self.absent("exited"):
            all_ended = all(one.absent in ("exited", "gone") for one in self.ranks)
            state = "no rank runs" if all_ended and not self.reading.missing else "others may run"
            yield Finding("exited", "warning", f"{_ids(exited)}: {_last_seen(exited)}; {state}")
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

    def to_dict(self) -> dict[str, Any]:
        running = self.in_progress
        return {
            "source": self.reading.source,
            "ok": self.ok,
            "operation": None if running is None else asdict(running),
            "world_size": self.reading.world_size,
            "generations": {str(g): ranks for g, ranks in self.generations.items()},
            "sets": self.sets,
            "missing_ranks": self.reading.missing,
            "findings": [asdict(finding) for finding in self.findings()],
            "ranks": [
                {
                    **record.raw,
                    "state": record.state,
                    "age_s": record.age_s,
                    "last_error": record.error,
                }
                for record in self.ranks
            ],
        }


def _rank(record: RankRecord) -> int:
    return record.rank


def _by(ranks: Iterable[int], key: Callable[[int], _Key]) -> dict[_Key, list[int]]:
    found: dict[_Key, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return found


# -- text -----------------------------------------------------------------------------------------


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
    return f"{ranks} (pid {records[0].pid})" if len(records) == 1 and records[0].pid else ranks


def _last_seen(records: Iterable[RankRecord]) -> str:
    return f"last update at {_when(max(one.time or 0.0 for one in records))}"


def _when(at: float) -> str:
    return f"{clock(at)} ({age(max(0.0, time.time() - at))} ago)"


def clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # a record may contain any number
        return "?"


def age(seconds: float | None) -> str:
    """A duration in its largest unit; ``?`` if unknown."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
