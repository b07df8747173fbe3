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
from .console import Line, Page, Table, follow, positive, say, seconds, show, terminal_size
from .records import (
    STATUS_DIR,
    RankRecord,
    Reading,
    items,
    number,
    read_directory,
    read_endpoints,
    text,
)

__all__ = ["SILENT_S", "JobView", "add"]

SILENT_S = 5.0
"""A rank that gave no sign of life for longer is called silent; it gives one each second."""

_SHOWN_RANKS = 10
_SHOWN_FAILURES = 3
_WIDE, _WIDEST = 100, 150
"""Columns of a terminal that has room for all numbers of the table, and for the errors too."""
_REMEDIES_HEIGHT = 30
"""Lines of a terminal that is high enough to say also what to do."""


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
    def silent(self) -> list[RankRecord]:
        """Ranks that gave no sign of life lately."""
        return [one for one in self.ranks if one.age_s is not None and one.age_s > SILENT_S]

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

    def facts(self) -> list[Fact]:
        """Statements about the job as a whole, troubles in their tone."""
        if not self.ranks:
            return []
        found = [self._generation_fact(), *self._trouble_facts()]
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
        if self.silent:
            longest = max(self.silent, key=lambda one: one.age_s or 0.0)
            found.append(
                Fact(
                    "silent",
                    f"{_ranks([one.rank for one in self.silent])}: no sign of life for up to "
                    f"{_age(longest.age_s)}",
                    "warning",
                    "look at that process: it may hang, have ended, or be on a host whose clock "
                    "is behind",
                )
            )
        return found

    def page(self, width: int | None = None, height: int | None = None) -> Page:
        """The job as a page.

        Args:
            width: columns that there are; the least important ones are left out where they do
                not fit. None shows all.
            height: lines that there are; ranks that do not fit are counted only, and those in
                trouble are shown first. None shows all.
        """
        facts = self.facts()
        failures = [Line(f"unreadable: {failure}", "warning") for failure in self.reading.failures]
        if not self.ranks:
            return Page((*self._nothing(), *failures))
        indent = max(len(fact.name) for fact in facts)
        below: list[Line] = []
        for fact in facts:
            below.append(Line(f"{fact.name.ljust(indent)}  {fact.text}", fact.tone, indent + 2))
            if fact.remedy and (height is None or height >= _REMEDIES_HEIGHT):
                below.append(Line(f"{' ' * indent}  -> {fact.remedy}", "", indent + 5))
        if width is not None and width < _WIDEST:
            errors = [f"rank {one.rank}: {one.error}" for one in self.ranks if one.error]
            below += [Line(f"{'error'.ljust(indent)}  {error}", "bad") for error in errors[:3]]
        below += failures[: height and _SHOWN_FAILURES]
        # Heading, table header and rule, the line that counts the rest, three empty ones, and the
        # cursor's own line.
        room = None if height is None else max(1, height - len(below) - 8)
        return Page((self._head(), Line(""), *self._table(width, room), Line(""), *below))

    def _head(self) -> Line:
        states = ", ".join(f"{len(ranks)} {state}" for state, ranks in self.states.items())
        size = self.reading.world_size
        known = "?" if size is None else size
        clock = time.strftime("%H:%M:%S", time.localtime(self.reading.time))
        return Line(f"reloadpg {clock}: {len(self.ranks)} of {known} ranks: {states}", "head")

    def _nothing(self) -> tuple[Line, Line]:
        return Line(_sentence(self.reading.absence), "warning"), Line(
            _sentence(self.reading.remedy)
        )

    def _table(self, width: int | None, room: int | None) -> list[Line | Table]:
        shown = list(self.ranks)
        if room is not None and len(shown) > room:
            worst_first = ("bad", "warning", "")
            shown.sort(key=lambda one: (worst_first.index(self._tone(one)), one.rank))
            del shown[room:]
            shown.sort(key=lambda one: one.rank)
        columns: dict[str, Callable[[RankRecord], object]] = {
            "rank": lambda one: one.rank,
            "host": lambda one: one.host,
            "state": lambda one: one.state,
            "gen": lambda one: one.generation,
            "groups": lambda one: len(one.groups),
            "held MiB": lambda one: _mebibytes(one.status.get("memory_bytes")),
            "in use MiB": lambda one: _mebibytes(_in_use(one)),
            "offload ms": lambda one: _whole(one.last_ms("offload")),
            "reload ms": lambda one: _whole(one.last_ms("reload")),
            "seen": lambda one: _age(one.age_s),
            "last error": lambda one: one.error,
        }
        if len({record.host for record in self.ranks}) < 2:
            del columns["host"]
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
        if not record.installed or record.state == "failed":
            return "bad"
        if record.error or (record.age_s is not None and record.age_s > SILENT_S):
            return "warning"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """All of it, with plain types only."""
        return {
            "source": self.reading.source,
            "world_size": self.reading.world_size,
            "generations": {str(g): ranks for g, ranks in self.generations.items()},
            "generation_is_equal": len(self.generations) == 1,
            "missing_ranks": self.reading.missing,
            "left_over": list(self.reading.left_over),
            "not_installed": self.not_installed,
            "silent": [record.rank for record in self.silent],
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
            "torch's debug server on each rank. Exit code 1 if no rank could be read."
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
        yield view.page(*(terminal_size() or (None, None)))
