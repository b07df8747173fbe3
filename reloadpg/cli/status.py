"""``reloadpg status``: the state of the ranks of a running job, seen from outside."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import format_ranks
from .console import Line, Page, Table, counted, follow, positive, say, seconds, show, terminal_size
from .records import (
    LATE_S,
    SILENT_S,
    STATUS_DIR,
    RankRecord,
    Reading,
    items,
    number,
    read_directory,
    read_endpoints,
    text,
    whole,
)

__all__ = ["SILENT_S", "InProgress", "JobView", "add"]

WAITING_S = 3.0
"""A rank that waits for longer, for ranks that have not come, is in trouble. Each rank says once a
second where it is, so by then the others would have said that they are on their way."""

_SHOWN_RANKS = 10
_SHOWN_FAILURES = 3
_WIDE, _WIDEST = 100, 150
"""Columns of a terminal that has room for all numbers of the table, and for the errors too."""
_REMEDIES_HEIGHT = 30
"""Lines of a terminal that is high enough to say also what to do."""


WORKING_S = 30.0
"""The same where all that have not come are in the operation, and work."""

_ON_ITS_WAY = "on its way"


@dataclass(frozen=True)
class Fact:
    """A statement about the whole job.

    Attributes:
        name: what it is about.
        text: what is so.
        tone: as in :class:`reloadpg.cli.console.Line`.
        remedy: what to do; empty where nothing is to be done.
    """

    name: str
    text: str
    tone: str = ""
    remedy: str = ""

    def lines(self, indent: int, *, remedies: bool) -> Iterator[Line]:
        """The fact, its name in a column of that width."""
        yield Line(f"{self.name.ljust(indent)}  {self.text}", self.tone, indent + 2)
        if self.remedy and remedies:
            yield Line(f"{' ' * indent}  -> {self.remedy}", "", indent + 5)


@dataclass(frozen=True)
class InProgress:
    """The operation that ranks of a job are in.

    Attributes:
        name: ``offload`` or ``reload``.
        sequence: its number in the job.
        phase: the barrier at which ranks wait, or to which they are on their way.
        ranks: those that are in it.
        waiting: those that wait at the barrier.
        missing: those that they wait for, by why they are not there.
        started_at: Unix time at which the first rank called it.
        since: Unix time at which the first rank arrived at the barrier; None if none waits.
        waited_s: how long that rank had waited when it last said so.
        bound_s: the wait ends after so many seconds without progress; None if unknown.
        groups_done, groups: groups of the present step that are done, and all, on all ranks.
    """

    name: str
    sequence: int
    phase: str
    ranks: Sequence[int]
    waiting: Sequence[int]
    missing: Mapping[str, Sequence[int]]
    started_at: float
    since: float | None
    waited_s: float
    bound_s: float | None
    groups_done: int
    groups: int

    @property
    def stuck(self) -> bool:
        """Whether ranks wait for ranks that are not on their way, or have been so for long."""
        if not self.waiting or not self.missing:
            return False
        if all(why.startswith(_ON_ITS_WAY) for why in self.missing):
            return self.waited_s >= WORKING_S
        return self.waited_s >= WAITING_S or any(why in _ABSENT for why in self.missing)

    @classmethod
    def of(cls, ranks: Sequence[RankRecord], expected: Sequence[int]) -> InProgress | None:
        """From the records of a job that has these ranks; None if none is in an operation."""
        known = {one.rank: one for one in ranks}
        inside = [one for one in ranks if one.running and not one.absent]
        if not inside:
            return None
        sequence = max(_sequence(one) for one in inside)
        inside = [one for one in inside if _sequence(one) == sequence]
        name = text(inside[0].running.get("operation"))
        waits = [one for one in inside if one.running.get("waiting") is True]
        # A record that is a second old may still be of the barrier before.
        latest = max(waits or inside, key=lambda one: number(one.running.get("since")) or 0.0)
        phase = text(latest.running.get("phase"))
        waits = [one for one in waits if text(one.running.get("phase")) == phase]
        here = {one.rank for one in waits}
        missing: dict[str, list[int]] = {}
        for rank in expected if waits else ():
            if rank not in here:
                missing.setdefault(_why_missing(known.get(rank), name, sequence), []).append(rank)
        since = [number(one.running.get("since")) or 0.0 for one in waits]
        waited = [one.time - (number(one.running.get("since")) or 0.0) for one in waits if one.time]
        return cls(
            name,
            sequence,
            phase,
            [one.rank for one in inside],
            sorted(here),
            missing,
            min(number(one.running.get("started_at")) or 0.0 for one in inside),
            min(since, default=None),
            max(waited, default=0.0),
            number(latest.options.get("timeout_s")),
            sum(whole(one.running.get("groups_done")) or 0 for one in inside),
            sum(whole(one.running.get("groups")) or 0 for one in inside),
        )

    def facts(self, records: Mapping[int, RankRecord], *, still: bool) -> list[Fact]:
        """Statements about it, what is wrong in its tone."""
        begun = f"since {_when(self.started_at, still)}"
        at = f", before its barrier {self.phase!r}" if self.phase else ""
        found = [Fact(self.name, f"in progress on {_ranks(self.ranks)}, {begun}{at}")]
        if self.groups:
            found.append(Fact("groups", _bar(self.groups_done, self.groups)))
        if not self.waiting or self.since is None:
            return found
        waiting = f"{_ranks(self.waiting)}, since {_when(self.since, still)}"
        if self.bound_s is not None:
            waiting += f"; the wait ends after {self.bound_s:g} s without progress on any rank"
        found.append(Fact("waiting", waiting))
        for why, ranks in self.missing.items():
            remedy = ""
            first = records.get(ranks[0])
            if self.stuck and why not in _ABSENT and first is not None and first.pid:
                where = f" on {first.host}" if first.host else ""
                remedy = f"see what rank {first.rank} does: py-spy dump --pid {first.pid}{where}"
            missing = f"{_ranks(ranks)}: {_ABSENT.get(why, why)}"
            found.append(Fact("waits for", missing, "bad" if self.stuck else "", remedy))
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it, with plain types only."""
        return {
            "operation": self.name,
            "sequence": self.sequence,
            "phase": self.phase,
            "ranks": list(self.ranks),
            "waiting": list(self.waiting),
            "missing": {why: list(ranks) for why, ranks in self.missing.items()},
            "stuck": self.stuck,
            "started_at": self.started_at,
            "since": self.since,
            "waited_s": self.waited_s,
            "timeout_s": self.bound_s,
            "groups_done": self.groups_done,
            "groups": self.groups,
        }


_ABSENT = {
    "gone": "its process is gone",
    "stopped": "its process is stopped",
    "silent": "it gives no sign of life",
    "exited": "it has exited",
    "not seen": "it keeps no record here",
}
"""Why a rank will not come, in words."""


def _why_missing(record: RankRecord | None, operation: str, sequence: int) -> str:
    """Why a rank is not at a barrier: a key of ``_ABSENT``, or words."""
    if record is None:
        return "not seen"
    if record.absent:
        return record.absent
    if not record.installed:
        return "reloadpg is not installed there"
    other = text(record.running.get("operation"))
    if not other:
        return f"it has not called {operation}()"
    if other != operation or _sequence(record) != sequence:
        return f"it is in {'another ' if other == operation else ''}{other}"
    doing = text(record.running.get("doing"))
    return f"{_ON_ITS_WAY}: {doing}" if doing else _ON_ITS_WAY


def _sequence(record: RankRecord) -> int:
    return whole(record.running.get("sequence")) or 0


@dataclass(frozen=True)
class JobView:
    """A reading, and what follows from it."""

    reading: Reading

    @property
    def ranks(self) -> Sequence[RankRecord]:
        return self.reading.ranks

    # -- facts ------------------------------------------------------------------------------

    @property
    def generations(self) -> dict[int, list[int]]:
        """The ranks at each generation; installed ranks only."""
        found: dict[int, list[int]] = {}
        for record in self.ranks:
            if record.installed and record.generation is not None:
                found.setdefault(record.generation, []).append(record.rank)
        return dict(sorted(found.items()))

    @property
    def states(self) -> dict[str, list[int]]:
        """The ranks in each state, most first."""
        found: dict[str, list[int]] = {}
        for record in self.ranks:
            found.setdefault(record.state, []).append(record.rank)
        return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))

    @property
    def ok(self) -> bool:
        """Whether the job runs, and no rank is in trouble."""
        runs = any(one.absent != "exited" for one in self.ranks)
        return runs and all(fact.tone != "bad" for fact in self.facts())

    @property
    def in_progress(self) -> InProgress | None:
        """The operation that ranks are in; None if there is none."""
        size = self.reading.world_size
        ranks = [one.rank for one in self.ranks]
        return InProgress.of(self.ranks, sorted({*ranks, *self.reading.missing}) if size else ranks)

    def absent(self, why: str) -> list[RankRecord]:
        """Ranks that take no part any more: ``exited``, ``gone``, ``stopped`` or ``silent``."""
        return [one for one in self.ranks if one.absent == why]

    @property
    def not_installed(self) -> list[int]:
        return [record.rank for record in self.ranks if not record.installed]

    @property
    def last_operation(self) -> list[RankRecord]:
        """The ranks whose last report is of the operation that was begun last.

        While ranks are on their way, some have reported the next one already.
        """
        reported = [one for one in self.ranks if number(one.report.get("started_at"))]
        if not reported:
            return []
        newest = max(reported, key=lambda one: number(one.report.get("started_at")) or 0.0)
        same = (newest.report.get("operation"), newest.report.get("generation"))
        return [
            one
            for one in reported
            if (one.report.get("operation"), one.report.get("generation")) == same
        ]

    @property
    def skew(self) -> dict[str, Any] | None:
        """Distance of the ranks in the last operation; None before two have reported one.

        ``entered_ms`` compares the clocks of the hosts, ``total_ms`` does not.
        """
        reported = self.last_operation
        if len(reported) < 2:
            return None
        begun = [number(one.report.get("started_at")) or 0.0 for one in reported]
        totals = {one.rank: number(one.report.get("total_ms")) or 0.0 for one in reported}
        slowest = max(totals, key=lambda rank: totals[rank])
        return {
            "operation": text(reported[0].report.get("operation")),
            "ranks": len(reported),
            "entered_ms": (max(begun) - min(begun)) * 1e3,
            "fastest_ms": min(totals.values()),
            "slowest_ms": totals[slowest],
            "slowest_rank": slowest,
        }

    @property
    def slowest_group(self) -> dict[str, Any] | None:
        """The group that took longest on any rank in the last operation."""
        slowest: tuple[float, Mapping[str, Any], RankRecord] | None = None
        for record in self.last_operation:
            for group in items(record.report.get("groups")):
                ms = number(group.get("ms")) or 0.0
                if slowest is None or ms > slowest[0]:
                    slowest = (ms, group, record)
        if slowest is None:
            return None
        ms, group, record = slowest
        name, desc = text(group.get("name")), text(group.get("desc"))
        operation = text(record.report.get("operation"))
        return {"name": name, "desc": desc, "operation": operation, "ms": ms, "rank": record.rank}

    # -- shown ------------------------------------------------------------------------------

    def facts(self, *, still: bool = False) -> list[Fact]:
        """Statements about the job as a whole, troubles in their tone, what is going on first.

        Args:
            still: say when things began and not how long ago, so that nothing changes with time.
        """
        return [*self.running_facts(still=still), *self.lasting_facts(still=still)]

    def running_facts(self, *, still: bool = False) -> list[Fact]:
        """Statements about the operation that is in progress."""
        running = self.in_progress
        if running is None:
            return []
        return running.facts({one.rank: one for one in self.ranks}, still=still)

    def lasting_facts(self, *, still: bool = False) -> list[Fact]:
        """Statements about the ranks, and about the last operation."""
        if not self.ranks:
            return []
        found = [self._generation_fact(), *self._trouble_facts(), *self._absence_facts(still)]
        left_over = self.reading.left_over
        if left_over:
            found.append(
                Fact(
                    "left over",
                    f"{_ranks(left_over)} of an earlier, larger job: their files are not looked at",
                    "note",
                )
            )
        skew = self.skew
        if skew is not None:
            found.append(
                Fact(
                    "skew",
                    f"{skew['ranks']} ranks entered the last {skew['operation']} within "
                    f"{skew['entered_ms']:.0f} ms; it took {skew['fastest_ms']:.0f} to "
                    f"{skew['slowest_ms']:.0f} ms (longest on rank {skew['slowest_rank']})",
                )
            )
        slowest = self.slowest_group
        if slowest is not None:
            called = " ".join(filter(None, (slowest["name"], slowest["desc"])))
            found.append(
                Fact(
                    "slowest group",
                    f"{called}: {slowest['ms']:.1f} ms in the last {slowest['operation']} "
                    f"on rank {slowest['rank']}",
                )
            )
        return found

    def _generation_fact(self) -> Fact:
        generations = self.generations
        if len(generations) > 1:
            each = "; ".join(f"{g} on {_ranks(ranks)}" for g, ranks in generations.items())
            # For a moment in each reload this is as it should be.
            return Fact("generation", f"differs: {each}", "warning")
        if not generations:
            return Fact("generation", "no rank says one", "note")
        generation, ranks = next(iter(generations.items()))
        return Fact("generation", f"{generation} on {_ranks(ranks)}", "good")

    def _trouble_facts(self) -> list[Fact]:
        found = []
        missing = self.reading.missing
        if missing:
            found.append(
                Fact(
                    "missing",
                    f"{_ranks(missing)} of a job of {self.reading.world_size} said nothing",
                    "bad",
                    "see that it runs, and that reloadpg is installed in it with the same status "
                    "directory",
                )
            )
        if self.not_installed:
            found.append(
                Fact(
                    "not installed",
                    _ranks(self.not_installed),
                    "bad",
                    "call reloadpg.install() on every rank, before the groups are created",
                )
            )
        failed = [record.rank for record in self.ranks if record.state == "failed"]
        if failed:
            remedy = "fix the cause, then call reload() on all ranks"
            found.append(Fact("failed", _ranks(failed), "bad", remedy))
        return found

    def _absence_facts(self, still: bool) -> list[Fact]:
        """Statements about ranks that have ended, or that give no sign of life."""
        found = []
        exited = self.absent("exited")
        if exited:
            last = max((one.time or 0.0 for one in exited), default=0.0)
            every = len(exited) == len(self.ranks)
            what = "the job has ended" if every else "other ranks still run"
            found.append(
                Fact(
                    "exited", f"{_ids(exited)}, the last at {_when(last, still)}; {what}", "warning"
                )
            )
        gone = self.absent("gone")
        if gone:
            last = max((one.time or 0.0 for one in gone), default=0.0)
            found.append(
                Fact(
                    "gone",
                    f"{_ids(gone)}: the process is not there any more, and its exit was not an "
                    f"orderly one; last sign of life at {_when(last, still)}",
                    "bad",
                    "its log, or the kernel's, says what killed it; start the job again",
                )
            )
        stopped = self.absent("stopped")
        if stopped:
            found.append(
                Fact(
                    "stopped",
                    f"{_ids(stopped)}: the process is stopped, by SIGSTOP or by a debugger",
                    "bad",
                    f"let it go on: kill -CONT {' '.join(str(one.pid) for one in stopped[:8])}",
                )
            )
        silent = self.absent("silent")
        if silent:
            longest = max(silent, key=lambda one: one.age_s or 0.0)
            ago = f"for up to {_age(longest.age_s)}"
            if still and longest.time is not None:
                ago = f"since {_clock(longest.time)}"
            found.append(
                Fact(
                    "silent",
                    f"{_ranks([one.rank for one in silent])}: no sign of life {ago}",
                    "bad",
                    "look at that process: it may hang, have ended, or be on a host whose clock "
                    "is behind",
                )
            )
        return found

    def page(
        self, width: int | None = None, height: int | None = None, *, still: bool = False
    ) -> Page:
        """The job as a page.

        Args:
            width: columns that there are; the least important ones are left out where they do
                not fit. None shows all.
            height: lines that there are; ranks that do not fit are counted only, and those in
                trouble are shown first. None shows all.
            still: leave out what changes with every look.
        """
        running, facts = self.running_facts(still=still), self.lasting_facts(still=still)
        failures = [Line(f"unreadable: {failure}", "warning") for failure in self.reading.failures]
        if not self.ranks:
            return Page((*self._nothing(), *failures))
        indent = max(len(fact.name) for fact in (*running, *facts))
        remedies = height is None or height >= _REMEDIES_HEIGHT
        above = [line for fact in running for line in fact.lines(indent, remedies=remedies)]
        below = [line for fact in facts for line in fact.lines(indent, remedies=remedies)]
        if width is not None and width < _WIDEST:
            errors = [f"rank {one.rank}: {one.error}" for one in self.ranks if one.error]
            below += [Line(f"{'error'.ljust(indent)}  {error}", "bad") for error in errors[:3]]
        below += failures[: height and _SHOWN_FAILURES]
        # Heading, table header and rule, the line that counts the rest, three empty ones, and the
        # cursor's own line.
        room = None if height is None else max(1, height - len(above) - len(below) - 9)
        if above:
            above.append(Line(""))
        table = self._table(width, room, still=still)
        return Page((self._head(still=still), Line(""), *above, *table, Line(""), *below))

    def _head(self, *, still: bool) -> Line:
        states = ", ".join(f"{len(ranks)} {state}" for state, ranks in self.states.items())
        size = self.reading.world_size
        known = "?" if size is None else size
        clock = "" if still else f" {_clock(self.reading.time)}"
        return Line(f"reloadpg{clock}: {len(self.ranks)} of {known} ranks: {states}", "head")

    def _nothing(self) -> tuple[Line, Line]:
        return Line(_sentence(self.reading.absence), "warning"), Line(
            _sentence(self.reading.remedy)
        )

    def _table(self, width: int | None, room: int | None, *, still: bool) -> list[Line | Table]:
        shown = list(self.ranks)
        if room is not None and len(shown) > room:
            worst_first = ("bad", "warning", "", "note")
            shown.sort(key=lambda one: (worst_first.index(self._tone(one)), one.rank))
            del shown[room:]
            shown.sort(key=lambda one: one.rank)
        columns: dict[str, Callable[[RankRecord], object]] = {
            "rank": lambda one: one.rank,
            "host": lambda one: one.host,
            "state": lambda one: one.state,
            "barrier": _barrier,
            "gen": lambda one: one.generation,
            "groups": lambda one: len(one.groups),
            "held MiB": lambda one: _mebibytes(one.status.get("memory_bytes")),
            "in use MiB": lambda one: _mebibytes(_in_use(one)),
            "offload ms": lambda one: _whole(one.last_ms("offload")),
            "reload ms": lambda one: _whole(one.last_ms("reload")),
            "seen": partial(_seen, still=still),
            "last error": lambda one: one.error,
        }
        if len({record.host for record in self.ranks}) < 2:
            del columns["host"]
        if not any(record.running and not record.absent for record in self.ranks):
            del columns["barrier"]
        if width is not None and width < _WIDE:
            del columns["in use MiB"], columns["groups"]
        below = width is not None and width < _WIDEST
        if below or not any(one.error for one in shown):
            del columns["last error"]
        rows = [[column(one) for column in columns.values()] for one in shown]
        header = list(columns)
        parts: list[Line | Table] = [Table(header, rows, [self._tone(one) for one in shown])]
        if len(shown) < len(self.ranks):
            parts.append(Line(f"and {len(self.ranks) - len(shown)} more ranks", "note"))
        return parts

    def _tone(self, record: RankRecord) -> str:
        if record.absent == "exited":
            return "note"
        if record.absent or not record.installed or record.state == "failed":
            return "bad"
        return "warning" if record.error else ""

    def to_dict(self) -> dict[str, Any]:
        """All of it, with plain types only."""
        running = self.in_progress
        return {
            "source": self.reading.source,
            "ok": self.ok,
            "operation": None if running is None else running.to_dict(),
            "world_size": self.reading.world_size,
            "generations": {str(g): ranks for g, ranks in self.generations.items()},
            "generation_is_equal": len(self.generations) == 1,
            "missing_ranks": self.reading.missing,
            "left_over": list(self.reading.left_over),
            "not_installed": self.not_installed,
            **{
                why: [one.rank for one in self.absent(why)]
                for why in ("exited", "gone", "stopped", "silent")
            },
            "skew": self.skew,
            "slowest_group": self.slowest_group,
            "unreadable": list(self.reading.failures),
            "ranks": [
                {
                    "rank": record.rank,
                    "host": record.host,
                    "pid": record.pid,
                    "installed": record.installed,
                    "state": record.state,
                    "generation": record.generation,
                    "age_s": record.age_s,
                    "running": dict(record.running) or None,
                    "offload_ms": record.last_ms("offload"),
                    "reload_ms": record.last_ms("reload"),
                    "last_error": record.error,
                    "status": dict(record.status),
                    "last_report": dict(record.report),
                }
                for record in self.ranks
            ],
        }


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, no more than fit a line."""
    several = "ranks" if len(ranks) > 1 else "rank"
    runs = format_ranks(ranks).split(", ")
    if len(runs) > _SHOWN_RANKS:
        runs = [*runs[:_SHOWN_RANKS], f"... ({len(ranks)} in all)"]
    return f"{several} {', '.join(runs)}"


def _ids(records: Sequence[RankRecord]) -> str:
    """Ranks in words, with the process of one that is alone."""
    ranks = _ranks([one.rank for one in records])
    return f"{ranks} (pid {records[0].pid})" if len(records) == 1 and records[0].pid else ranks


def _bar(done: int, total: int, width: int = 30) -> str:
    filled = width * min(done, total) // total
    return f"[{'#' * filled}{'-' * (width - filled)}] {done} of {counted(total, 'group')} done"


def _barrier(record: RankRecord) -> str | None:
    """The barrier that a rank is at, or on its way to, and how far."""
    if not record.running or record.absent:
        return None
    phase = text(record.running.get("phase"))
    if record.running.get("waiting") is True:
        return f"{phase}: waits"
    groups = whole(record.running.get("groups"))
    return f"{phase}: {whole(record.running.get('groups_done'))}/{groups}" if groups else phase


def _seen(record: RankRecord, *, still: bool) -> str:
    if not still or record.age_s is None or record.time is None:
        return _age(record.age_s)
    return "now" if record.age_s <= LATE_S else _clock(record.time)


def _clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # a record may say anything
        return "?"


def _when(at: float, still: bool) -> str:
    """A time of day, and how long ago it is by this host's clock."""
    ago = "" if still else f" ({_age(max(0.0, time.time() - at))} ago)"
    return f"{_clock(at)}{ago}"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _in_use(record: RankRecord) -> Any:
    """Bytes by the first source that the rank names, which is the best one that it has."""
    memory = record.status.get("memory")
    return next(iter(memory.values()), None) if isinstance(memory, dict) else None


def _mebibytes(value: Any) -> int | None:
    size = number(value)
    return None if size is None else round(size / (1 << 20))


def _whole(value: Any) -> int | None:
    known = number(value)
    return None if known is None else round(known)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


# -- the command ------------------------------------------------------------------------------


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "status",
        help="show the state of a running job's ranks",
        description=(
            "Show the state of each rank of a running job, and what does not fit together. The job "
            f"runs with {STATUS_DIR} set to a directory that this command can read, or serves "
            "torch's debug server on each rank. Exit code 1 if none runs or one is in trouble: "
            "missing, gone, stopped, silent, failed, not installed, or waited for in vain."
        ),
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"the job's status directory (default: ${STATUS_DIR})",
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="ask a rank's debug server instead; once a rank",
    )
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="between two looks (default: 1)"
    )
    parser.add_argument(
        "--frames", type=positive, metavar="N", help="with --watch: end after N looks"
    )
    parser.add_argument(
        "--json", action="store_true", help="all that is known, as JSON; one line a look"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = options.directory or Path(os.environ.get(STATUS_DIR, ""))
    read: Callable[[], Reading]
    if options.endpoint:
        read = partial(read_endpoints, options.endpoint)
    elif options.directory is None and not os.environ.get(STATUS_DIR):
        say(
            f"reloadpg status: no job to look at. Name its status directory, set {STATUS_DIR} to "
            "it, or name the debug server of each rank with --endpoint HOST:PORT.",
            sys.stderr,
        )
        return 2
    else:
        read = partial(read_directory, directory)
    looks = _looks(read, options.interval, options.frames if options.watch else 1)
    last: list[JobView] = []
    try:
        if options.json:
            for view in looks:
                last[:] = [view]
                say(json.dumps(view.to_dict()))
        elif options.watch:
            follow(_pages(looks, last))
        else:
            last[:] = [next(looks)]
            show(last[0].page())
    except KeyboardInterrupt:
        say(stream=sys.stderr)  # the usual way to end a watch: no error
        return 0 if last and last[0].ranks else 1
    return 0 if last and last[0].ok else 1


def _looks(read: Callable[[], Reading], interval_s: float, frames: int | None) -> Iterator[JobView]:
    """Views of the job, at a steady pace."""
    due = time.monotonic()
    reading = Reading("")
    for look in count(1):
        reading = read().after(reading)
        yield JobView(reading)
        if look == frames:
            return
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _pages(looks: Iterator[JobView], last: list[JobView]) -> Iterator[Page]:
    for view in looks:
        last[:] = [view]
        size = terminal_size()
        yield view.page() if size is None else view.page(*size, still=True)
