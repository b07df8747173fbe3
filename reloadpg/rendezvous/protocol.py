"""Agreement of the ranks of a job on their operations, through a key-value store. Without I/O.

An operation is a sequence of barriers. One key, ``current``, holds the truth: the number of the
open operation, the barrier that it is at, and how the last one ended. It changes by compare-and-set
alone. Passing a barrier, a failure, a timeout, a disagreement and the request for a recovery are
the same step, so each is decided once. All other keys count ranks, wake them, or name them in
messages: the loss of one changes no decision.

A rank remembers one number, ``next``: the number of the first operation that it has not entered.

* ``current.number == next``: the rank enters the operation, and increments ``next`` before it
  arrives. So no rank arrives twice.
* ``current.number < next``: the rank has left the operation without an end, since it lost the
  store. It ends the operation for all ranks, and enters the next one.
* ``current.number > next``: operations have failed without this rank. It raises how the last one
  failed, once. A reload or a recovery repairs, and enters the open operation; but it raises too if
  it may be the call that has failed on another rank, an operation of the same name.

A rank that fails before it has entered an operation ends the open one for all ranks.

A request for a recovery ends the open operation, and opens the next one for recoveries only.

A rank that is new in a job whose ranks have met without it has found an old one, and counts the
next one. A rank is missing if it had not arrived when the timeout was decided, whenever it comes.

=============  ===============================  ================================================
key            value                            written by
=============  ===============================  ================================================
``current``    :class:`Current`                 the rank that decides, by compare-and-set
``count``      the number of arrivals, and      each rank that arrives at a barrier
               the sum of the plans' digests
``go``         nothing: it wakes the ranks      the rank that has decided, for each barrier
``said``       what ranks say to all others     ranks that say something at the first barrier
``answers``    what each rank was doing         each rank, after an operation has ended early
``result``     the decision with all names      the last rank that has answered
``job``        number of the newest job         the first rank of that job
``jobs/rank``  number of jobs of a rank         that rank
``hosts``      the processes of a host          each rank that has counted the job
``polls``      the number of ranks that poll    each rank that waits long (``waiting``)
=============  ===============================  ================================================

All keys except the keys of jobs begin with the number of the job. The keys from ``count`` to
``result`` also have the number of the operation, and ``go`` the barrier's.
``tests/helpers/explorer.py`` runs this module for two and three ranks in every order, with faults
at every command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..errors import ReloadpgError
from .decision import Decision, store_unreadable
from .plan import MOST, Plan, differences, reconciled

T = TypeVar("T")

OK = Decision("ok")

NAMES = ("go", "count", "said", "answers", "answered", "result", "left", "all left")
"""The names of the keys of an operation. Each barrier has the first; the last five exist after an
early end."""

# -- commands: a generator yields one and receives the reply ---------------------------------------


class Read(NamedTuple):
    """The value of a key; None if there is no such key."""

    key: str


class Swap(NamedTuple):
    """Write a key if it holds ``expected`` (empty: if there is no such key). The reply is its value
    afterwards.
    """

    key: str
    expected: str
    value: str


class Add(NamedTuple):
    """Add to a counter; the reply is its value."""

    key: str
    amount: int


class Set(NamedTuple):
    """Write a key."""

    key: str
    value: str = "1"


class Append(NamedTuple):
    """Append to a key."""

    key: str
    text: str


class Delete(NamedTuple):
    """Delete keys."""

    keys: tuple[str, ...]


class Await(NamedTuple):
    """Wait until a key exists, or for a while. The first wait for a key is longer than the others.

    There is no reply. At the deadline, :class:`GaveUp` is thrown.
    """

    key: str


Command: TypeAlias = Read | Swap | Add | Set | Append | Delete | Await
Steps: TypeAlias = Generator[Command, Any, Any]


class Ended(Exception):  # noqa: N818 - never leaves this package
    """The operation has ended early for all ranks, with this decision."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


class GaveUp(Ended):
    """Thrown into a command: this rank ends the operation with this decision."""


# -- the truth -------------------------------------------------------------------------------------


class Current(NamedTuple):
    """The value of ``current``.

    Attributes:
        number: number of the open operation.
        barrier: the barrier at which its ranks meet next.
        recovery: number of the last operation that was requested as a recovery.
        passed: number of the last operation that all ranks have completed.
        last: the decision of the last barrier, or the early end of the last operation.
        spent: what is not deleted yet: an operation, a barrier, and the number of names of keys.
    """

    number: int = 1
    barrier: int = 0
    recovery: int = 0
    passed: int = 0
    last: Decision = OK
    spent: tuple[tuple[int, int, int], ...] = ()

    @property
    def at(self) -> tuple[int, int]:
        """The open operation and its barrier."""
        return self.number, self.barrier

    def after(self, decision: Decision, *, ends: bool) -> Current:
        """The value after all ranks have arrived at the barrier."""
        number, barrier = (self.number + 1, 0) if ends else (self.number, self.barrier + 1)
        passed = self.number if ends else self.passed
        spent = (*self.at, 2 if ends else 1)
        return Current(number, barrier, self.recovery, passed, decision, (spent,))

    def ended(self, decision: Decision, operation: str = "", *, recovers: bool = False) -> Current:
        """The value after this operation has ended early; ``recovers``: for a recovery."""
        number = self.number + 1
        spent = (*self.spent[-2:], (*self.at, len(NAMES)))
        recovery = number if recovers else self.recovery
        last = replace(decision, barrier=self.barrier, operation=operation)
        return Current(number, 0, recovery, self.passed, last, spent)

    @lru_cache(maxsize=256)  # noqa: B019 - values are small
    def to_text(self) -> str:
        if self == Current():
            return ""
        return json.dumps([*self[:4], self.last.to_json(), self.spent])

    @staticmethod
    @lru_cache(maxsize=256)
    def from_text(text: str | None) -> Current:
        if not text:
            return Current()
        number, barrier, recovery, passed, last, spent = json.loads(text)
        decision = Decision.from_json(last)
        return Current(number, barrier, recovery, passed, decision, tuple(map(tuple, spent)))


# -- one rank --------------------------------------------------------------------------------------


class _Counted:
    """A rank that counts the jobs on its store.

    Args:
        rank: this rank.
        size: number of ranks.
        host: identifier of its host, whose ranks watch each other; empty if they do not.
        process: the line of this process in the list of its host.

    Attributes:
        job: number of the job on its store; 0 until it is counted.
    """

    def __init__(self, rank: int, size: int, host: str = "", process: str = "") -> None:
        self.rank, self.size = rank, size
        self.host, self.process = host, process
        self.job = 0

    @property
    def listed(self) -> str:
        """The key of the list of this host's processes."""
        return f"{self.job}/hosts/{self.host}"

    def count(self) -> Steps:
        """Count this job on its store. The number becomes equal on all ranks: one that has counted
        fewer jobs than others joins the newest one. So a rank may count a job twice, if the store
        did not respond.
        """
        counted = yield Add(f"jobs/{self.rank}", 1)
        newest = yield from self._newest()
        while newest < counted:
            text = yield Swap("job", str(newest or ""), str(counted))
            newest = _decoded(_number, "job", text)
        if newest > counted:
            yield Add(f"jobs/{self.rank}", newest - counted)
        self.job = newest
        if self.host:
            yield Append(self.listed, self.process)

    def join(self, job: int) -> None:
        """Take part in a job without being counted. Local."""
        self.job = job

    @staticmethod
    def _newest() -> Steps:
        """The number of the newest job."""
        return _decoded(_number, "job", (yield Read("job")))


class Rank(_Counted):
    """One rank of a job.

    The methods are generators that yield commands. They raise :class:`Ended`, or what was thrown
    into them: the store may end at any command, whose effect is unknown then.

    Attributes:
        next: number of the first operation that this rank has not entered.
        number: number of the operation that it has entered.
        operation: its name.
        at: the value of ``current`` that this rank acts on.
        confirmed: whether all ranks have met in this job.
        place: how many ranks had arrived at the next barrier, with this one; 0 before it has.
        missed: that it came too late to the operation before, as text.
    """

    def __init__(self, rank: int, size: int, host: str = "", process: str = "") -> None:
        super().__init__(rank, size, host, process)
        self.next, self.confirmed = 1, size == 1
        self.number, self.operation, self.at = 0, "", Current()
        self.place, self.missed = 0, ""

    def key(self, name: str, number: int | None = None, barrier: int | None = None) -> str:
        """A key of an operation: by default the one that this rank has entered."""
        number = self.number if number is None else number
        barrier = self.at.barrier if barrier is None else barrier
        return f"{self.job}/{number}/{name}" + (f"/{barrier}" if name == "go" else "")

    def read(self) -> Steps:
        """Return the value of ``current``."""
        return (yield from self._current((yield Read(f"{self.job}/current"))))

    def _current(self, text: str | None) -> Steps:
        """Decode the value in this text; otherwise raise, and wake the ranks that wait."""
        try:
            return _decoded(Current.from_text, f"{self.job}/current", text)
        except ReloadpgError:  # no rank can end the operation: each finds this value
            for number, barrier in {self.at.at, (self.next, 0)}:
                yield Set(self.key("go", number, barrier))
            raise

    def enter(self, operation: str, reason: str = "") -> Steps:
        """Enter the next operation. ``reason``: of a recovery."""
        if not self.job:
            yield from self.count()
        now = yield from self._present(operation)
        while True:
            recovers, known = now.recovery == now.number, now.number >= self.next
            if operation == "recover":
                if recovers and known:
                    break
                yield from self._raise_missed(now, operation)
                decision = Decision("recover", self.rank, reason)
                now = yield from self._change(now, now.ended(decision, recovers=True))
            elif not known:
                left = "it has left this operation without an end, since it had lost the store"
                new = now.ended(Decision("failed", self.rank, left), self.operation)
                number = now.number
                now = yield from self._change(now, new)
                if now == new:
                    yield from self.close(new.last, "", number=number, waits=False)
            elif recovers:
                raise Ended(now.last)
            else:
                yield from self._raise_missed(now, operation)
                break
        self.at, self.number, self.next, self.operation = now, now.number, now.number + 1, operation
        self.place = 0

    def _present(self, operation: str) -> Steps:
        """The value of ``current``, before this rank enters an operation; of a newer job, if the
        one that it has joined is an old one, whose ranks have agreed on something without it.
        """
        now, self.missed = (yield from self.read()), ""
        while self.next == 1 and now.at != (1, 0):
            met = now.passed or now.barrier  # all ranks have, and this one was not there
            if not met and (yield from self._newest()) <= self.job:
                break
            yield from self.count()
            now = yield from self.read()
        last = now.last
        if now.number > self.next and (last.kind, last.operation) == ("timeout", operation):
            self.missed = (
                f"rank {self.rank} had come too late to the {operation}() before, in which rank "
                f"{last.rank} waited until its timeout"
            )
        return now

    def is_requested(self, recovery: int) -> bool:
        """Whether this rank has not joined the recovery of this number; see :class:`Current`."""
        return recovery >= self.next

    def refuse(self, operation: str, decision: Decision) -> Steps:
        """End the open operation for all ranks: this one has failed before it has entered its
        next one. Returns how it ended.
        """
        if not self.job:
            yield from self.count()
        yield from self._present(operation)
        ended = None
        while ended is None or ended.kind == "recover":  # requested by another rank just now
            now = yield from self.read()
            if now.number >= self.next:
                self.operation = operation
            self.at, self.number, self.next = now, now.number, max(self.next, now.number + 1)
            ended = yield from self.end(decision)
        return ended

    def _raise_missed(self, now: Current, operation: str) -> Steps:
        """Raise how the last operation has failed without this rank, with the names.

        A reload or a recovery repairs that, unless it may be the call that has failed.
        """
        same = now.last.kind == "failed" and now.last.operation == operation
        if now.number <= self.next or (operation in ("reload", "recover") and not same):
            return
        decision, number, self.next = now.last, now.number - 1, now.number
        if decision.barrier >= 0:
            text = yield Read(self.key("result", number))
            if text is None:  # no rank has named the others yet: they wait for this one
                decision = yield from self.close(decision, "", number=number, waits=False)
            else:
                decision = _decoded(Decision.from_json, self.key("result", number), text)
        raise Ended(decision)

    def barrier(
        self,
        share: int = 0,
        said: str = "",
        summary: Callable[[Sequence[str]], str] = "\n".join,
        *,
        ends: bool,
    ) -> Steps:
        """Arrive at the next barrier, and wait until all ranks have. Returns the decision.

        Args:
            share: this rank's summand of the plans; the sum over all ranks is zero if they agree.
            said: what this rank says to the others at the first barrier.
            summary: makes the text of the decision from what ranks have said, in their order.
            ends: whether it is the last barrier of the operation.
        """
        at, bits = self.at, self._bits
        if said:
            yield Append(self.key("said"), _line(self.rank, said))
        # The sum also counts the ranks that have said something, so a missing key is not read.
        total = yield Add(self.key("count"), 1 + ((share + bool(said)) << bits))
        now, self.place = at, self._arrived(total, at)
        if self.place == self.size:
            speakers = 0 if at.barrier else total >> bits
            said_by = (yield from self._texts("said", self.number)) if speakers else {}
            texts = tuple(said_by.values())
            if speakers != len(texts):
                decision, new = OK, at.ended(Decision("disagree", self.rank), self.operation)
            else:
                decision = replace(OK, text=summary(texts)) if texts else OK
                new = at.after(decision, ends=ends)
            now = yield from self._change(at, new)
            if texts:
                yield Delete((self.key("said"),))
        while now.at == at.at:
            yield Await(self.key("go"))
            now = yield from self.read()
            if not self.confirmed and now.at == at.at and (yield from self._moves()):
                return (yield from self.barrier(share, said, summary, ends=ends))
        return self._passed(now)

    @property
    def _bits(self) -> int:
        """The bits of the number of arrivals, at up to eight barriers."""
        return (8 * self.size).bit_length()

    def _arrived(self, total: int, at: Current) -> int:
        """How many ranks have arrived at a barrier, by the counter of its operation."""
        return (total & ((1 << self._bits) - 1)) - self.size * at.barrier

    def _texts(self, name: str, number: int) -> Steps:
        """What ranks have written to a key of an operation, by rank."""
        key = self.key(name, number)
        return _decoded(_said, key, (yield Read(key)))

    def _moves(self) -> Steps:
        """Move to a newer job, which other ranks have counted; return whether there is one."""
        if (yield from self._newest()) <= self.job:
            return False
        yield Delete(tuple(map(self.key, NAMES)))
        self.job, self.next = 0, 1
        yield from self.enter(self.operation)
        return True

    def _passed(self, now: Current) -> Decision:
        """Continue after ``current`` has changed, or raise the end of the operation."""
        number = self.number
        if now.number == number or now.passed == number:
            self.at, self.confirmed, self.place = now, True, 0
            return now.last if now.number <= number + 1 else OK
        raise Ended(self._end_of(now))

    def _end_of(self, now: Current) -> Decision:
        if now.number == self.number + 1:
            return now.last
        self.next = now.number  # the later failures are raised with this one
        text = f"it ended operation {now.number - 1}, and this rank had not left the one before"
        return replace(now.last, kind="failed", text=f"{text}. {now.last.text}", barrier=-1)

    def look(self) -> Steps:
        """Raise if the operation has ended; while this rank works before a barrier."""
        now = yield from self.read()
        if now.at != self.at.at:
            raise Ended(self._end_of(now))

    def end(self, decision: Decision) -> Steps:
        """End the operation for all ranks, unless it has ended. Returns how it ended: ``ok`` if all
        ranks have completed it.
        """
        now, number, timeout = self.at, self.number, decision.kind == "timeout"
        while now.number == number:
            if timeout:  # ranks that arrive from now on are missing
                total = _decoded(_number, self.key("count"), (yield Read(self.key("count"))))
                arrived = self._arrived(total, now)
                decision = replace(decision, text=self.missed, arrived=arrived)
            now = yield from self._change(now, now.ended(decision, self.operation))
        return OK if now.passed == number else self._end_of(now)

    def close(
        self, decision: Decision, doing: str, *, waits: bool, number: int | None = None
    ) -> Steps:
        """Name the ranks after an early end of an operation: who is missing, and what differs.

        It decides nothing. Returns the decision, with the names if they are known.

        Args:
            decision: how the operation ended.
            doing: this rank's work, or its plan after a disagreement; empty if it waited. It may
                have arrived after a timeout was decided, which it says then.
            waits: whether to wait for the answers of the other ranks, or until the deadline.
            number: number of the operation; by default the one that this rank has entered.
        """
        if decision.barrier < 0:  # its keys are deleted
            return decision
        there = number is None and self.at.barrier == decision.barrier
        in_time = there and 0 < self.place <= decision.arrived
        if decision.kind == "timeout" and not (in_time or doing):  # the result names others, too
            decision = replace(decision, late=(self.rank,))
        number = self.number if number is None else number
        key = partial(self.key, number=number)
        yield Append(key("answers"), _line(self.rank, doing or ("" if in_time else None)))
        count, result = (yield Add(key("answered"), 1)), None
        if decision.kind == "disagree" and decision.text:  # it says which process is not counted
            result = decision.to_json()
        elif count < self.size - len(decision.dead):
            result = (yield from self._until(key("result"))) if waits else decision.to_json()
        if result is None:
            named = _named(decision, (yield from self._texts("answers", number)), self.size)
            result = yield Swap(key("result"), "", named.to_json())
        decision = _decoded(Decision.from_json, key("result"), result)
        gone = {*decision.missing, *decision.dead}
        left = yield Add(key("left"), int(self.rank not in gone))
        if left >= self.size - len(gone):
            yield Set(key("all left"))
        elif self.rank == 0 and waits:  # its process often ends next, and the store with it
            yield from self._until(key("all left"))
        return decision

    @staticmethod
    def _until(key: str) -> Steps:
        """The value of a key, when it exists; None at the deadline."""
        text = None
        with suppress(GaveUp):
            while text is None:
                yield Await(key)
                text = yield Read(key)
        return text

    def _change(self, old: Current, new: Current) -> Steps:
        """Try to change ``current``, and wake the ranks at the old barrier. Returns its value."""
        text = yield Swap(f"{self.job}/current", old.to_text(), new.to_text())
        if text != new.to_text():
            return (yield from self._current(text))
        yield Set(self.key("go", *old.at))
        # No rank is there any more; or it has ended early, and a rank there reads `current`.
        spent = tuple(entry for entry in old.spent if entry not in new.spent)
        if spent:
            yield Delete(tuple(self.key(k, n, b) for n, b, many in spent for k in NAMES[:many]))
        return new


def _decoded(decode: Callable[[Any], T], key: str, text: Any) -> T:
    """What the value of a key means; an error of this library if it is of another program."""
    try:
        return decode(text)
    except (ValueError, TypeError, AttributeError, KeyError):
        raise store_unreadable(key, text) from None


def _number(text: str | int | None) -> int:
    return int(text or 0)


def _line(rank: int, text: str | None) -> str:
    return json.dumps([rank, text]) + "\n"


def _said(lines: str | None) -> dict[int, Any]:
    """The texts of lines by rank, in the order of the ranks."""
    return dict(sorted(dict(map(json.loads, (lines or "").splitlines())).items()))


def _named(decision: Decision, answers: Mapping[int, str | None], size: int) -> Decision:
    """The decision with the names of ranks and what differs."""
    missing = tuple(r for r in range(size) if r not in answers and r not in decision.dead)
    named = replace(decision, missing=missing)
    if decision.kind == "timeout":
        stuck = tuple(rank for rank, doing in answers.items() if doing)
        doing = "; ".join(f"rank {rank} was in: {answers[rank]}" for rank in stuck[:MOST])
        late = tuple(rank for rank, doing in answers.items() if doing is None)
        return replace(named, stuck=stuck, doing=doing, late=late)
    if decision.kind == "disagree":
        if missing:
            return replace(named, text="a rank ended before it could report the difference")
        plans = {rank: Plan.from_json(text) for rank, text in answers.items() if text}
        return replace(named, text=differences(plans), generation=reconciled(plans))
    return named
