"""Explores the agreement protocol completely: every order of commands, with faults at each of them.

It runs the generators of ``reloadpg.rendezvous.protocol`` over a store that is a dictionary. A
world is one state of the whole system: the store, the ranks, and the faults and abandoned requests
that are left. The explorer visits every world that can be reached from the first one, and has no
limit: a scenario is complete, or its test fails.

Ranks in equal states of their generators are merged (:func:`signature`), and every value that
occurs in a world is replaced by a number, so the steps of the ranks and of the store are computed
once. Time advances only when no rank can do anything: then the timeouts of those that wait end.

What the protocol writes is compared with what has happened (:meth:`Explorer.written`): each change
of the truth, by its number, barrier, rank and recovery; and the names in each result, by the ranks
that have arrived and answered.

Not explored: more than two faults, two on three ranks except a timeout and a failure, and the
threads, clocks and requests outside the protocol (progress, polls, and the list of a host).
"""

from __future__ import annotations

import json
import types
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from reloadpg.rendezvous import plan as plans
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.protocol import (
    Add,
    Append,
    Await,
    Command,
    Current,
    Delete,
    Ended,
    GaveUp,
    Rank,
    Read,
    Set,
    Swap,
)


class Violation(AssertionError):
    """An invariant does not hold."""


class StoreLost(RuntimeError):
    """The store has ended, or does not respond."""


class Work(NamedTuple):
    """A rank's own work before a barrier."""

    barrier: int


class Init(NamedTuple):
    """The begin of the next job, at which torch makes all ranks meet."""


class Plan(NamedTuple):
    """What a rank does in an operation; ``refused``: it ends that with this text instead."""

    barriers: int
    digest: int
    said: str = ""
    refused: str = ""


PLANS = {
    "refuses": Plan(2, 1, refused="taken twice"),
    "offload": Plan(2, 1),
    "says": Plan(2, 1, "why"),
    "reload": Plan(2, 100),
    "recover": Plan(2, 10_000),
    "barrier": Plan(1, 0),
    "end": Plan(1, 1_000_000),
}
FAULTS = ("lost", "interrupt", "timeout", "failure")


class Groups(NamedTuple):
    """The groups of a rank.

    Attributes:
        offloaded: whether they have no communicator.
        generation: the number of the last reload.
        whole: the generation with which a reload rebuilds them, whatever their state; 0 if not.
    """

    offloaded: bool = False
    generation: int = 0
    whole: int = 0

    def plan(self, operation: str) -> plans.Plan:
        state = {plans.GENERATION: str(self.generation), "offloaded": str(self.offloaded)}
        whole = self.whole or operation == "recover"
        return plans.Plan(operation, (plans.Entry("", (), {}, {} if whole else state),))

    def barriers(self, operation: str) -> int:
        """A reload without an offloaded group ends when all ranks agree on that."""
        only = operation == "reload" and not (self.offloaded or self.whole)
        return 1 if only else PLANS[operation].barriers

    def after(self, operation: str, result: Result) -> Groups:
        """The groups after an operation, as ``Operation`` leaves them."""
        if operation == "end" or (result.barrier == 0 and operation != "recover"):
            return self._replace(whole=0)
        if operation == "offload" or result.barrier < self.barriers(operation):
            return Groups(True, self.generation)
        if operation == "recover":  # a generation above that of any rank
            return Groups(False, result.number)
        return Groups(False, self.whole or self.generation + self.offloaded)


class Scenario(NamedTuple):
    """The configuration of one state space.

    Attributes:
        scripts: the calls of each rank.
        faults: how many faults occur, each at any command.
        kinds: their kinds: ``interrupt`` and ``failure`` of a rank's own work, ``lost`` (the store
            does not respond; executed or not), ``late`` (likewise, and executed at any later
            time), ``reset`` (executed, and repeated on a new connection), ``timeout`` (too early,
            while it waits or works), ``crash``.
        where: the ranks in which they occur.
        outcomes: the kinds of decisions that may occur.
        jobs: the number of jobs that each rank has counted on the store before this one; None to
            begin in a job that all ranks have counted.
        newest: the number of the newest job on the store; None for the highest of ``jobs``.
        old: the value of ``current`` in that job.
        names: whether the ranks exchange names after an early end.
        looks: whether ranks look for failures of others while they work.
        polls: whether long waits end before there is news.
        stays_away: whether a rank that has failed may make no further call.
        patience: errors after which a rank ends its program, while another one has crashed.
        watches: whether ranks notice that another one has crashed.
        states: whether ranks offload and reload groups, with plans that have their state, and
            exchange the names of ranks and their plans after an early end.
        groups: the groups of each rank at the begin, after failures.
        most_errors: how often a rank may raise after the last fault: its error, and a difference
            from what the other ranks call next.
    """

    scripts: tuple[tuple[str, ...], ...]
    faults: int = 0
    kinds: tuple[str, ...] = ()
    where: tuple[int, ...] = ()
    outcomes: str = ""
    jobs: tuple[int, ...] | None = None
    looks: bool = False
    polls: bool = False
    stays_away: bool = False
    patience: int = 5
    watches: bool = False
    states: bool = False
    most_errors: int = 2
    newest: int | None = None
    old: Current = Current()
    names: bool = False
    groups: tuple[Groups, ...] = ()


class Result(NamedTuple):
    """How a call ended."""

    number: int  # of the operation; 0 if the rank entered none
    barrier: int  # at which the operation ended, or the number of barriers if it is complete
    end: str  # of the operation, as this rank knows it: ok, early or unknown
    error: str  # raised: the kind of a decision, own or lost; empty if the call returned
    recovers: bool = False  # whether another rank has requested a recovery
    whole: int = 0  # the generation with which a reload begins again
    groups: Groups = Groups()
    decision: Decision | None = None  # that was raised, or ended the operation early


def call(one: Rank, operation: str, groups: Groups, case: Scenario) -> Generator[Any, Any, Result]:
    """One call on one rank, as ``Operation`` and ``Round`` make it."""
    while True:
        result = yield from one_operation(one, operation, groups, case)
        if case.names and "recover" in case.outcomes:
            yield from asked(one, operation, result)
        groups = groups.after(operation, result)
        if not result.whole:
            return result._replace(groups=groups)
        groups = groups._replace(whole=result.whole)


def one_operation(
    one: Rank, operation: str, groups: Groups, case: Scenario
) -> Generator[Any, Any, Result]:
    plan, barriers = PLANS[operation], PLANS[operation].barriers
    share = plan.digest * (1 if one.rank else 1 - one.size)
    if case.states:
        barriers = groups.barriers(operation)
        share = groups.plan(operation).contribution(one.rank, one.size)
    number, counted, doing = 0, False, ""
    try:
        yield from one.enter(operation)
        if plan.refused:
            number = one.number
            raise GaveUp(Decision("disagree", one.rank, plan.refused))
        for barrier in range(barriers):
            number = one.number
            if barrier:
                doing = "busy"
                yield Work(barrier)
                if case.looks:
                    yield from looked(one)
                doing = ""
            counted = True
            own = (0, "") if barrier else (share, plan.said)
            decision = yield from one.barrier(*own, ends=barrier == barriers - 1)
            counted = False
            if decision.kind != "ok" or (barrier and decision.text):
                raise Violation(f"rank {one.rank} passes barrier {barrier} with {decision}")
            if not barrier and plan.said not in decision.text:
                raise Violation(f"what rank {one.rank} has said is lost")
            if not barrier and decision.text:
                yield Work(0)
        return Result(number, barriers, "ok", "")
    except (Ended, KeyboardInterrupt, RuntimeError) as error:
        if isinstance(error, Violation):
            raise
        gave_up = isinstance(error, GaveUp)
        lost = isinstance(error, StoreLost)
        kind = error.decision.kind if isinstance(error, Ended) else "lost" if lost else "own"
        if not number and isinstance(error, Ended) and not gave_up:
            return Result(0, 0, "none", kind, decision=error.decision)
        at = one.at.barrier + counted if number else 0
        try:
            own = Decision("failed", one.rank, kind)
            if isinstance(error, Ended) and not gave_up:
                decision = error.decision
            elif number:  # also on a new connection to the store
                decision = yield from one.end(error.decision if isinstance(error, Ended) else own)
            else:
                refused = error.decision if isinstance(error, Ended) else own
                decision = yield from one.refuse(operation, refused)
            number = one.number
        except (StoreLost, KeyboardInterrupt, GaveUp):
            return Result(number, at, "unknown", "lost")
        if decision.kind == "ok":
            return Result(number, barriers, "ok", "" if kind == "timeout" else kind)
        if (case.states or case.names) and decision.kind != "recover":
            decision = yield from named(one, decision, error, groups.plan(operation), doing)
        if plan.refused and decision.kind == "disagree" and decision.text != plan.refused:
            raise Violation(f"rank {one.rank} reads of its refusal: {decision}") from None
        told = decision.kind if kind == "timeout" else kind
        ended_at = decision.barrier if decision.barrier >= 0 else at
        whole = decision.generation if operation == "reload" else 0
        recovers = decision.kind == "recover"
        return Result(number, ended_at, "early", told, recovers, whole, decision=decision)


def asked(one: Rank, operation: str, result: Result) -> Generator[Any, Any, None]:
    """``recovery_requested`` after a call, compared with how that has ended."""
    with suppress(StoreLost, KeyboardInterrupt, GaveUp):
        now = yield from one.read()
        joined = operation == "recover" and result.end == "ok" and now.recovery <= result.number
        requested = one.is_requested(now.recovery)
        if (result.error == "recover" and not requested) or (joined and requested):
            raise Violation(f"rank {one.rank} reads of recovery {now.recovery}: {requested}")


def looked(one: Rank) -> Generator[Any, Any, None]:
    """``look``, which raises if what it reads shows that the operation has ended."""
    steps, reply = one.look(), None
    try:
        command = next(steps)
        while True:
            try:
                reply = yield command
            except BaseException as error:
                command = steps.throw(error)
            else:
                command = steps.send(reply)
    except StopIteration:
        if Current.from_text(reply).at != one.at.at:
            raise Violation(f"rank {one.rank} works on in an operation that has ended") from None


def named(
    one: Rank, decision: Decision, error: BaseException, plan: plans.Plan, doing: str
) -> Generator[Any, Any, Decision]:
    """The decision with the names, if they are known."""
    doing = plan.to_json() if decision.kind == "disagree" else doing
    waits = not isinstance(error, KeyboardInterrupt)
    try:
        return (yield from one.close(decision, doing, waits=waits))
    except (StoreLost, KeyboardInterrupt):
        return decision


class Seat(NamedTuple):
    """A rank, and its present call."""

    rank: int
    script: tuple[str, ...]
    next: int = 1
    job: int = 1
    confirmed: bool = False
    replies: tuple[Any, ...] = ()
    errors: int = 0  # raised since the last fault
    live: bool = True
    away: int = 0  # the operation that it failed in, if it makes no further call
    groups: Groups = Groups()
    process: int = 0  # the number of the job on this rank, from 0
    raised: int = 0  # the last operation of which it knew, when it raised, that it had ended


class World(NamedTuple):
    store: int
    seats: tuple[int, ...]
    faults: int
    history: int
    late: tuple[Any, ...] = ()


class Numbers:
    """Replaces values by numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[Any, int] = {}

    def of(self, value: Any, name: Any = None) -> int:
        key = value if name is None else name
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.values)
            self.values.append(value)
        return number


def signature(steps: Any, one: Rank, seat: Seat) -> Any:
    """The state of a suspended generator: equal states continue equally."""
    frames, inner = [], steps
    while isinstance(inner, types.GeneratorType):
        frame = inner.gi_frame
        local = tuple((name, _frozen(value)) for name, value in sorted(frame.f_locals.items()))
        frames.append((frame.f_code.co_name, frame.f_lasti, local))
        inner = inner.gi_yieldfrom
    return tuple(frames), tuple(_frozen(value) for value in vars(one).values())


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, partial):  # of a method of the rank
        return tuple(value.keywords.items())
    if isinstance(value, plans.Plan):
        return value.to_json()
    if isinstance(value, Scenario):
        return None
    if isinstance(value, BaseException):
        return type(value).__name__, tuple(map(_frozen, value.args))
    if isinstance(value, types.FunctionType):  # a function of the generator, over its variables
        cells = value.__closure__ or ()
        return value.__name__, tuple(_frozen(cell.cell_contents) for cell in cells)
    return "self" if isinstance(value, Rank) else value


NAMED = ("/result", "/all left")
"""The keys for which ranks wait after an early end, for a limited time."""


THROWN = {"interrupt": KeyboardInterrupt, "failure": RuntimeError, "lost": StoreLost}


def thrown(kind: str, rank: int) -> BaseException:
    if kind.startswith("death"):
        dead = int(kind.removeprefix("death"))
        return GaveUp(Decision("failed", dead, dead=(dead,)))
    return GaveUp(Decision("timeout", rank)) if kind == "timeout" else THROWN[kind](kind)


def position(key: str) -> tuple[int, tuple[int, int]]:
    """The job, and the operation and barrier, of a key; -1 if it is of no single barrier."""
    job, number, name = key.split("/", 2)
    return int(job), (int(number), int(name.removeprefix("go/")) if name.startswith("go/") else -1)


class Explorer:
    """Explores one scenario.

    Attributes:
        worlds: the number of worlds.
        most_errors: the highest number of errors of a rank after the last fault.
        seen: the kinds of errors that occurred.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.case, self.size = scenario, len(scenario.scripts)
        self.allowed = {*scenario.outcomes.split(), "own", "lost"}
        self.most_errors, self.worlds = 0, 0
        self.seen: set[str] = set()
        self.stores, self.seats, self.histories = Numbers(), Numbers(), Numbers()
        self.now: dict[int, tuple[Any, int, int]] = {}  # of a seat: command, next and barrier
        for name in ("step", "executed", "current", "relieved", "stopped"):
            setattr(self, name, cache(getattr(self, name)))

    # -- a rank -------------------------------------------------------------------------------

    def seated(self, seat: Seat) -> tuple[int, Result | None, int, int]:
        """Run a call with the replies so far: the seat's number, and how the call ended if it did,
        with the operation's barrier and the next number."""
        if not seat.script or not seat.live or seat.away:
            number = self.seats.of(seat)
            self.now[number] = None, seat.next, 0
            return number, None, 0, seat.next
        if seat.script[0] == "init":
            number = self.seats.of(seat)
            self.now[number] = Init(), seat.next, 0
            return number, None, 0, seat.next
        one = Rank(seat.rank, self.size)
        one.job, one.next, one.confirmed = seat.job, seat.next, seat.confirmed
        case = self.case
        steps, known = call(one, seat.script[0], seat.groups, case), 0
        try:
            command = next(steps)
            for reply in seat.replies:
                if isinstance(command, (Read, Swap)) and command.key.endswith("/current"):
                    ends = not isinstance(reply, BaseException)
                    known = max(known, Current.from_text(reply).number - 1 if ends else 0)
                if isinstance(reply, BaseException):
                    command = steps.throw(thrown(str(reply), seat.rank))
                else:
                    command = steps.send(reply)
        except StopIteration as stop:
            return self.ended(seat, one, stop.value, known)
        state = signature(steps, one, seat)
        name = (seat.rank, seat.script, seat.errors, seat.process, seat.raised, state)
        number = self.seats.of(seat, name)
        self.now[number] = command, one.next, one.at.barrier
        steps.close()
        return number, None, one.at.barrier, one.next

    def ended(
        self, seat: Seat, one: Rank, result: Result, known: int
    ) -> tuple[int, Result, int, int]:
        script, errors, raised = seat.script[1:], seat.errors, seat.raised
        if result.decision is not None and result.decision.kind != "recover":
            self.check_raised(seat, one, result, result.decision)
            raised = known if seat.job == one.job else 0
        if result.error:
            errors = min(errors + 1, 9)
            if seat.script[0] != "barrier":
                repairs = "recover" if "recover" in (result.error, seat.script[0]) else "reload"
                rest = script[script.index("init") :] if "init" in script else ()
                script = (repairs, "end", *rest)
        after = seat._replace(
            script=script,
            next=one.next,
            job=one.job,
            confirmed=one.confirmed,
            replies=(),
            errors=errors,
            groups=result.groups if self.case.states else Groups(),
            raised=raised,
        )
        number, *_ = self.seated(after)
        return number, result, one.at.barrier, one.next

    def step(self, number: int, reply: Any) -> tuple[int, Result | None]:
        seat = self.seats.values[number]
        if len(seat.replies) > 200:
            raise Violation(f"a call does not end: {seat}")
        return self.seated(seat._replace(replies=(*seat.replies, reply)))[:2]

    def relieved(self, number: int) -> int:
        """The seat after a fault: its errors are counted from here."""
        seat = self.seats.values[number]
        return self.seated(seat._replace(errors=0))[0] if seat.errors else number

    def stopped(self, number: int, away: int) -> int:
        """The seat of a rank that has crashed, or makes no further call."""
        seat = self.seats.values[number]
        return self.seated(seat._replace(live=bool(away), away=away, replies=()))[0]

    def is_gone(self, number: int) -> bool:
        """Whether the rank has crashed, or makes no further call."""
        seat = self.seats.values[number]
        return not seat.live or bool(seat.away)

    # -- the store ----------------------------------------------------------------------------

    def execute(self, store: int, command: Any) -> tuple[int, Any, bool]:
        """Execute a command: the store, the reply, and whether it can be executed now."""
        return self.executed(store, command, type(command))  # commands are equal as tuples

    def executed(self, store: int, command: Any, kind: type) -> tuple[int, Any, bool]:
        values: dict[str, Any] = dict(self.stores.values[store])
        match command:
            case Read(key):
                return store, values.get(key), True
            case Swap(key, expected, value):
                if values.get(key, "") == expected:
                    values[key] = value
                reply = values.get(key, expected)
            case Add(key, amount):
                reply = values[key] = values.get(key, 0) + amount
            case Set(key, value):
                reply, values[key] = None, value
            case Append(key, text):
                reply, values[key] = None, values.get(key, "") + text
            case Delete(keys):
                reply = None
                for key in keys:
                    values.pop(key, None)
            case Await(key) if key.endswith(NAMED):
                return store, None, key in values
            case Await(key):
                job, at = position(key)
                moved = Current.from_text(values.get(f"{job}/current")).at != at
                moved = moved and (self.case.faults > 0 or self.case.polls)
                moved = moved or int(values.get("job", "0")) > job
                return store, None, key in values or moved or self.case.polls
            case Work():
                return store, None, True
        return self.stores.of(tuple(sorted(values.items()))), reply, True

    def current(self, store: int, job: int) -> Current:
        return Current.from_text(dict(self.stores.values[store]).get(f"{job}/current"))

    # -- worlds -------------------------------------------------------------------------------

    def start(self) -> World:
        jobs = self.case.jobs
        store: tuple[tuple[str, Any], ...] = ()
        if jobs is not None:
            store = tuple((f"jobs/{r}", n) for r, n in enumerate(jobs) if n)
            newest = max(jobs) if self.case.newest is None else self.case.newest
            store = (("job", str(newest)), *store) if newest else store
            if self.case.old != Current():
                store = (*store, (f"{newest}/current", self.case.old.to_text()))
            store = tuple(sorted(store))
        seats = []
        for rank, script in enumerate(self.case.scripts):
            groups = self.case.groups[rank] if self.case.groups else Groups()
            seat = Seat(rank, script, job=int(jobs is None), groups=groups)
            seats.append(self.seated(seat)[0])
        history = self.histories.of((frozenset(), frozenset()))
        return World(self.stores.of(store), tuple(seats), self.case.faults, history)

    def answer(self, world: World, rank: int, reply: Any) -> list[World]:
        """The worlds after a rank has got a reply."""
        after, result = self.step(world.seats[rank], reply)
        if result is not None:
            after_wait = isinstance(reply, BaseException)
            if rank == 0 and "recover" not in self.case.outcomes and not after_wait:
                self.leaves_last(world, result)
            world = self.check(world, rank, result)
            self.check_errors(world, after)
        following = [self.put(world, rank, after)]
        told = result is not None and result.error and result.end == "early"
        if told and self.case.stays_away and result is not None and not result.recovers:
            following.append(self.put(world, rank, self.stopped(after, result.number)))
        return following

    @staticmethod
    def put(world: World, rank: int, seat: int) -> World:
        return world._replace(seats=(*world.seats[:rank], seat, *world.seats[rank + 1 :]))

    def moves(self, world: World) -> list[World]:
        """The worlds that can follow."""
        found: list[World] = []
        waiting: list[int] = []
        for index, (rank, digest, barrier, command) in enumerate(world.late):
            store, _, _ = self.execute(world.store, command)
            self.written(world, rank, command, store)
            left = world._replace(store=store, late=world.late[:index] + world.late[index + 1 :])
            found.append(self.arrived(left, rank, command, barrier, digest))
        for rank, number in enumerate(world.seats):
            command, _, at_barrier = self.now[number]
            if command is None:
                continue
            if isinstance(command, Init):
                found += self.init(world, rank)
                continue
            if isinstance(command, Work):
                self.all_there(world, rank, command.barrier - 1 if command.barrier else 0)
            store, reply, possible = self.execute(world.store, command)
            if possible:
                self.written(world, rank, command, store)
                after = world._replace(store=store)
                after = self.arrived(after, rank, command, at_barrier)
                found += self.answer(after, rank, reply)
            else:
                waiting.append(rank)
            if world.faults and rank in self.case.where:
                found += self.faults(world, rank, command)
            if self.case.watches:
                found += self.deaths(world, rank, command)
        if not found:
            found = self.timeouts(world, waiting)
        return found

    def init(self, world: World, rank: int) -> list[World]:
        """The world after this rank has begun the next job, if all ranks have come to that."""
        seats = [self.seats.values[number] for number in world.seats]
        own = seats[rank]
        if any(o.process == own.process and o.script[:1] != ("init",) for o in seats):
            return []
        if all(other.process <= own.process for other in seats):
            world = world._replace(history=self.histories.of((frozenset(), frozenset())))
        after = Seat(own.rank, own.script[1:], job=0, groups=own.groups, process=own.process + 1)
        return [self.put(world, rank, self.seated(after)[0])]

    def deaths(self, world: World, rank: int, command: Command | Work) -> list[World]:
        """The worlds after this rank has noticed that another one has crashed."""
        if not isinstance(command, (Await, Work)) or getattr(command, "key", "").endswith(NAMED):
            return []
        found: list[World] = []
        if self.seats.values[world.seats[rank]].errors < self.case.patience:
            for other in map(self.seats.values.__getitem__, world.seats):
                if not other.live:
                    found += self.answer(world, rank, error(f"death{other.rank}"))
        return found

    def faults(self, world: World, rank: int, command: Command | Work) -> list[World]:
        """The worlds after a fault of this rank at this command."""
        seat = self.seats.values[world.seats[rank]]
        if seat.script[0] == "end":  # after the last call of the others, none can learn of it
            return []
        found: list[World] = []
        seats = tuple(map(self.relieved, world.seats))
        less = world._replace(faults=world.faults - 1, seats=seats)
        kinds = self.case.kinds
        if "crash" in kinds:
            found.append(self.put(less, rank, self.stopped(less.seats[rank], 0)))
        if "interrupt" in kinds:
            found += self.answer(less, rank, error("interrupt"))
        if "failure" in kinds and isinstance(command, Work):
            found += self.answer(less, rank, error("failure"))
        if "timeout" in kinds and isinstance(command, (Await, Work)):
            found += self.answer(less, rank, error("timeout"))
        if "reset" in kinds and isinstance(command, (Swap, Set, Append, Delete)):
            store, *_ = self.execute(less.store, command)
            self.written(less, rank, command, store)
            found.append(less._replace(store=store))  # it is executed again
        if {"lost", "late"} & {*kinds} and not isinstance(command, Work):
            found += self.answer(less, rank, error("lost"))
            if not isinstance(command, (Read, Await)):
                made = less._replace(store=self.execute(less.store, command)[0])
                self.written(less, rank, command, made.store)
                at_barrier = self.now[less.seats[rank]][2]
                made = self.arrived(made, rank, command, at_barrier)
                found += self.answer(made, rank, error("lost"))
                if "late" in kinds:
                    plan = PLANS[seat.script[0]]
                    late = rank, plan.digest, at_barrier, command
                    held = less._replace(late=(*less.late, late))
                    found += self.answer(held, rank, error("lost"))
        return found

    def timeouts(self, world: World, waiting: Sequence[int]) -> list[World]:
        """The worlds after the timeouts of ranks for which nothing else can happen."""
        seats = [self.seats.values[number] for number in world.seats]
        found: list[World] = []
        for rank in waiting:
            if (key := self.now[world.seats[rank]][0].key).endswith(NAMED):
                if self.all_answered(world, key):
                    raise Violation(
                        f"no rank writes {key}, for which rank {rank} waits: {self.show(world)}"
                    )
                found += self.answer(world, rank, error("timeout"))
        if found:
            return found
        there, _ = self.histories.values[world.history]
        entered = {(number, rank) for (number, _), rank, *_ in there}
        for rank in waiting:
            command = self.now[world.seats[rank]][0]
            job, at = position(command.key)
            joins = self.current(world.store, job).last.kind == "timeout"  # the others waited
            for other in seats:
                told = joins or seats[rank].errors or (other.away, rank) in entered
                if other.away == at[0] or (other.away and not told):
                    raise Violation(
                        f"the failure of rank {other.rank} is not told: {self.show(world)}"
                    )
            if all(seat.live and not seat.away for seat in seats):
                raise Violation(f"ranks wait for each other: {self.show(world)}")
            if seats[rank].errors < self.case.patience:
                found += self.answer(world, rank, error("timeout"))
        return found

    # -- what must hold -----------------------------------------------------------------------

    def arrived(
        self, world: World, rank: int, command: Any, barrier: int, digest: int = 0
    ) -> World:
        """Record an arrival, if the command is one."""
        if not isinstance(command, Add) or not command.key.endswith("/count"):
            return world
        job, (number, _) = position(command.key)
        at = number, barrier
        there, ends = self.histories.values[world.history]
        digest = digest or PLANS[self.seats.values[world.seats[rank]].script[0]].digest
        there = self.recent(world, there) | {(at, rank, digest, job)}
        return world._replace(history=self.histories.of((there, ends)))

    def recent(self, world: World, entries: frozenset[Any]) -> frozenset[Any]:
        """Without those of operations that no rank is in any more."""
        oldest = min(self.now[number][1] for number in world.seats) - 2
        return frozenset(entry for entry in entries if entry[0][0] >= oldest)

    def all_there(self, world: World, rank: int, barrier: int, number: int = 0) -> None:
        """Check that all ranks have arrived at a barrier for the same operation."""
        seat = self.seats.values[world.seats[rank]]
        number = number or self.now[world.seats[rank]][1] - 1
        there, _ = self.histories.values[world.history]
        found = {entry[1:3] for entry in there if entry[0] == (number, barrier)}
        if found != {(other, PLANS[seat.script[0]].digest) for other in range(self.size)}:
            raise Violation(f"rank {rank} goes on without a rank: {self.show(world)}")

    def all_answered(self, world: World, key: str) -> bool:
        """Whether all ranks have given their names that can, before a rank waits for ``key``."""
        if not {"timeout", "failure", "crash"} >= {*self.case.kinds} or self.case.stays_away:
            return False
        if "crash" not in self.case.kinds:
            return True
        job, (number, _) = position(key)
        now, values = self.current(world.store, job), dict(self.stores.values[world.store])
        answers = dict(map(json.loads, values[f"{job}/{number}/answers"].splitlines()))
        dead = {*now.last.dead} if now.number == number + 1 else set()
        gone = {r for r, seat in enumerate(world.seats) if self.is_gone(seat)}
        return not gone - dead and {*range(self.size)} == {*answers} | dead

    def written(self, world: World, rank: int, command: Any, store: int) -> None:
        """Check what a rank writes by what has happened."""
        if isinstance(command, Add) and command.key.endswith("/count"):
            self.check_left(world, rank, command.key)
        if not isinstance(command, (Swap, Set)) or store == world.store:
            return
        before = dict(self.stores.values[world.store]).get(command.key)
        if command.key.endswith("/current"):
            self.check_change(world, rank, Current.from_text(before), command)
        elif command.key.endswith("/result"):
            if before is not None:
                raise Violation(f"rank {rank} writes a second result: {self.show(world)}")
            self.check_names(world, rank, command)

    def check_change(self, world: World, rank: int, old: Current, command: Swap) -> None:
        new = Current.from_text(command.value)
        last, early = new.last, new.number > old.number and new.passed != old.number
        next_one = (old.number, old.barrier + 1)
        expected = (old.number + 1, 0) if new.number > old.number else next_one
        recovery = new.number if early and last.kind == "recover" else old.recovery
        passed = old.passed if early or new.number == old.number else old.number
        if new[:4] != (*expected, recovery, passed):
            raise Violation(f"rank {rank} changes {old} to {new}: {self.show(world)}")
        if (last.kind != "ok") != early:
            raise Violation(f"rank {rank} ends it with {last}: {self.show(world)}")
        gone = {r for r, seat in enumerate(world.seats) if not self.seats.values[seat].live}
        named_rank = {last.rank} <= gone if last.dead else last.rank == rank
        if early and not (named_rank and {*last.dead} <= gone and last.barrier == old.barrier):
            raise Violation(f"rank {rank} ends {old} with {last}: {self.show(world)}")

    def check_left(self, world: World, rank: int, key: str) -> None:
        """Check that a rank has given its name for the operation that it has left and ended."""
        job, (number, _) = position(key)
        now = self.current(world.store, job)
        if now.number == number and now.last.rank == rank and now.last.text.startswith("it has"):
            values = dict(self.stores.values[world.store])
            if f"[{rank}," not in values.get(f"{job}/{number - 1}/answers", ""):
                raise Violation(f"rank {rank} does not answer: {self.show(world)}")

    def check_names(self, world: World, rank: int, command: Swap) -> None:
        """Check the ranks that a result names, of which it has read the answers before."""
        named, (job, (number, _)) = Decision.from_json(command.value), position(command.key)
        texts = dict(self.stores.values[world.store])[f"{job}/{number}/answers"]
        answers = dict(map(json.loads, texts.splitlines()))
        seat = self.seats.values[world.seats[rank]]
        waited = any(str(r) == "timeout" for r in seat.replies if isinstance(r, BaseException))
        silent = {*range(self.size)} - {*answers} - {*named.dead}
        problem = ""
        wrong = {*named.missing} & {*named.dead} or silent - {*named.missing}
        if wrong or (named.missing and not waited):
            problem = "missing"
        if named.kind == "disagree" and named.missing and named.generation:
            problem = "the generation"
        if named.kind == "timeout":
            there, _ = self.histories.values[world.history]
            came = {entry[1] for entry in there if entry[0] == (number, named.barrier)}
            busy = {r for r, doing in answers.items() if doing} - {*named.missing}
            if {*named.stuck} != busy:
                problem = "stuck"
            if {*answers} - came - busy - {*named.missing, *named.late}:
                problem = "late"
            # A rank whose arrival got no reply cannot know that it was counted in time.
            lost = {"lost", "late"} & {*self.case.kinds} and self.case.faults - world.faults > 1
            if not lost and len({*named.late} & came) > len(came) - named.arrived:
                problem = "late"
        if problem:
            raise Violation(f"rank {rank} names {problem} in {named}: {self.show(world)}")

    def check_raised(self, seat: Seat, one: Rank, result: Result, decision: Decision) -> None:
        """Check that a rank raises the failure of another one, and each only once."""
        if result.end == "none":
            if decision.rank == seat.rank and not decision.dead and decision.kind != "timeout":
                raise Violation(f"rank {seat.rank} raises its own failure: {decision}")
            absent = {*decision.late, *decision.missing}
            if (
                decision.kind == "timeout"
                and self.case.old == Current()
                and seat.rank not in absent
            ):
                raise Violation(f"rank {seat.rank} came late, and raises {decision}")
            if seat.job == one.job and one.next - 1 <= seat.raised:
                raise Violation(f"rank {seat.rank} raises again: {decision}, {seat}")
            if decision.kind == "ok" or decision.rank < 0:
                raise Violation(f"rank {seat.rank} raises {decision}")

    def leaves_last(self, world: World, result: Result) -> None:
        """Check that no rank needs the store when rank 0 has raised, unless it has waited long."""
        seat = self.seats.values[world.seats[0]]
        if not (self.case.names or self.case.states):
            return
        if result.end != "early" or result.decision is None or result.recovers:
            return
        if any(isinstance(reply, BaseException) for reply in seat.replies):
            return
        absent = {*result.decision.missing, *result.decision.dead}
        for other, number in enumerate(world.seats[1:], 1):
            there = self.seats.values[number]
            inside = there.next <= result.number < self.now[number][1] and there.replies
            if self.now[number][0] == Set(f"{there.job}/{result.number}/all left"):
                continue  # it has read the result, and wakes rank 0, which needs that no more
            if inside and there.live and other not in absent:
                raise Violation(f"rank 0 leaves before rank {other}: {self.show(world)}")

    def check(self, world: World, rank: int, result: Result) -> World:
        """Check the end of a call."""
        if result.error:
            self.seen.add(result.error)
            away = any(
                self.now[number][0] is None and self.is_gone(number) for number in world.seats
            )
            if result.error not in self.allowed and not (away and result.error == "timeout"):
                raise Violation(f"rank {rank} raises {result.error}: {self.show(world)}")
        else:
            self.all_there(world, rank, result.barrier - 1, result.number)
        if result.end in ("none", "unknown"):
            return world
        there, ends = self.histories.values[world.history]
        if any(at[0] == result.number and end != result.end for at, end in ends):
            raise Violation(f"operation {result.number} ends differently: {self.show(world)}")
        ends = self.recent(world, ends) | {((result.number, 0), result.end)}
        return world._replace(history=self.histories.of((there, ends)))

    def check_errors(self, world: World, number: int) -> None:
        """Check that a rank does not raise again and again while all are there."""
        seat = self.seats.values[number]
        if seat.errors > self.case.most_errors and not any(map(self.is_gone, world.seats)):
            raise Violation(f"rank {seat.rank} raises again and again: {self.show(world)}")

    def at_the_end(self, world: World) -> None:
        seats = [self.seats.values[number] for number in world.seats]
        if all(seat.live and not seat.away for seat in seats):
            for seat in seats:
                if seat.script:
                    raise Violation(f"rank {seat.rank} does not end: {self.show(world)}")
                if (seat.job, seat.next) != (seats[0].job, seats[0].next):
                    raise Violation(f"ranks count differently: {self.show(world)}")
                if seat.groups != seats[0].groups:
                    raise Violation(f"the groups differ: {self.show(world)}")
                self.most_errors = max(self.most_errors, seat.errors)
            self.check_keys(world)
            if self.case.jobs is not None and not self.case.faults:
                self.check_jobs(world)
        else:
            for seat in seats:
                if seat.live and not seat.away and seat.script and seat.errors < self.case.patience:
                    raise Violation(f"rank {seat.rank} hangs: {self.show(world)}")

    def check_jobs(self, world: World) -> None:
        """All ranks are in the newest job, and have counted it."""
        values = dict(self.stores.values[world.store])
        counted = {values[f"jobs/{rank}"] for rank in range(self.size)} | {int(values["job"])}
        if counted != {self.seats.values[world.seats[0]].job}:
            raise Violation(f"the ranks have counted other jobs: {self.show(world)}")

    def check_keys(self, world: World) -> None:
        """Only the keys of the last operation stay, and those of two others for each fault: the
        rank was about to delete them, or its abandoned request has written them again. An old job
        may have one more."""
        left = set()
        for key, _ in self.stores.values[world.store]:
            job, _, rest = key.partition("/")
            if job in ("job", "jobs") or rest == "current":
                continue
            spent = self.current(world.store, int(job)).spent
            due = {(n, b) for n, b, _ in spent} | {(n, -1) for n, _, many in spent if many > 1}
            if position(key)[1] not in due:
                left.add(tuple(key.split("/")[:2]))
        if len(left) > 2 * self.case.faults + (self.case.old != Current()):
            raise Violation(f"keys stay: {left}: {self.show(world)}")

    def show(self, world: World) -> str:
        """A world as text."""
        lines = [f"store {dict(self.stores.values[world.store])}"]
        for number in world.seats:
            lines.append(f"{self.seats.values[number]} at {self.now[number][0]}")
        lines.append(f"{world.faults} faults left, late {world.late}")
        lines.append(f"history {self.histories.values[world.history]}")
        return "\n  ".join(lines)

    def explore(self, most: int | None = None, *, ends: bool = False) -> int:
        """Visit every world; return their number.

        Args:
            most: more worlds are a violation: for a protocol that is known to be wrong.
            ends: also check that an end can be reached from every world, so that ranks do not poll
                indefinitely.
        """
        first = self.start()
        seen, todo, last = {first}, [first], []
        before: dict[World, list[World]] = {}
        while todo:
            world = todo.pop()
            following = self.moves(world)
            if most is not None and len(seen) > most:
                raise Violation(f"more than {most} worlds")
            if not following:
                self.at_the_end(world)
                last.append(world)
            for after in following:
                if ends:
                    before.setdefault(after, []).append(world)
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        if ends:
            self.check_ends(seen, last, before)
        self.worlds = len(seen)
        return self.worlds

    def check_ends(
        self, seen: set[World], last: list[World], before: dict[World, list[World]]
    ) -> None:
        """Check that an end can be reached from every world."""
        found, todo = {*last}, [*last]
        while todo:
            for world in before.get(todo.pop(), ()):
                if world not in found:
                    found.add(world)
                    todo.append(world)
        if found != seen:
            raise Violation(f"ranks poll indefinitely: {self.show((seen - found).pop())}")


@cache
def error(kind: str) -> BaseException:
    """A reply that is an error; one object for each kind."""
    return RuntimeError(kind)
