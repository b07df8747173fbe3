"""An explicit-state model checker for the agreement protocol.

It runs the library's own state machine over a store that is a dictionary. A world is one state of
the whole system: the store, the ranks, and the abandoned requests that may still take effect. The
explorer enumerates all interleavings of the enabled steps, and injects a fault before each step.
Time advances only when no step is enabled. A timeout therefore expires only because of a rank that
is dead, stalled or disconnected, and no rank that responds may be reported as missing. Each
world is visited once. Modelled on FoundationDB's simulation and on TLC.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reloadpg.rendezvous import protocol
from reloadpg.rendezvous.decision import Decision
from reloadpg.rendezvous.plan import Plan, Proposal
from reloadpg.rendezvous.protocol import (
    Absent,
    Add,
    Arrive,
    Await,
    Close,
    Command,
    Decide,
    Delete,
    Event,
    Fail,
    Join,
    Lost,
    Meet,
    Next,
    OnHost,
    Pause,
    Poll,
    Publish,
    Read,
    ReadAll,
    Recover,
    Reply,
    Set,
    State,
    Swap,
)

RECOVERY = ("enter", "done")
OFFLOAD = ("enter", "released")
RELOAD = ("enter", "done")
COUNTERS = ("/count", "/answers")
RECOVERIES = 3
"""Maximum number of recoveries per rank."""

Store = frozenset[tuple[str, str]]


class Violation(AssertionError):
    """An invariant does not hold."""


class Rank(NamedTuple):
    """The process of one rank, and its program.

    Attributes:
        state: the library's protocol state.
        program: the remaining operations: the barriers of each, ``recover``, or ``join``.
        command: the outstanding request, if there is one.
        running: the current operation; empty between operations.
        log: the results of its last operations.
        life: ``runs``, ``stalled``, ``dead``, or ``over``.
        failing: whether the rank has failed or was interrupted in the current operation.
        polls: whether it still reads the decision once before it arrives.
        tries: the number of recoveries that it may still start.
        replaces: whether this process replaces one that has died.
        epoch: the epoch in which its current operation began.
        strayed: whether it may have lost count of the operations before the current one.
        aligns: whether it begins its current operation in a new epoch.
        asked: the epoch in which it has requested a new one for its current operation.
        whole: the generation with which its current reload rebuilds all groups; otherwise 0.
        live: whether its groups are live.
        generation: the number of the last reload.
        told: whether it has read that another rank was interrupted in a step.
    """

    state: State
    program: tuple[Any, ...]
    command: Command | None = None
    running: Any = ""
    log: tuple[str, ...] = ()
    life: str = "runs"
    failing: bool = False
    polls: bool = False
    tries: int = RECOVERIES
    replaces: bool = False
    epoch: int = 0
    strayed: bool = False
    aligns: bool = False
    asked: int = -1
    whole: int = 0
    live: bool = True
    generation: int = 0
    told: bool = False

    @property
    def plan(self) -> Plan:
        """The plan of its reload."""
        state = {"generation": str(self.generation), "state": "live" if self.live else "offloaded"}
        return Plan("reload", {}, state={} if self.whole else state)


class World(NamedTuple):
    """A state of the system.

    Attributes:
        store: the keys and values of the store.
        ranks: all ranks.
        late: abandoned requests that may still take effect.
        faults: the faults that have not happened yet.
        deleted, arrived, decided: the history that the invariants need.
        timeouts: the number of timeouts that have expired.
    """

    store: Store
    ranks: tuple[Rank, ...]
    late: frozenset[tuple[int, Command]] = frozenset()
    faults: tuple[str, ...] = ()
    deleted: frozenset[str] = frozenset()
    arrived: frozenset[tuple[str, int]] = frozenset()
    decided: frozenset[tuple[str, str]] = frozenset()
    timeouts: int = 0


@dataclass(frozen=True)
class Scenario:
    """The configuration of one state space.

    Attributes:
        size: number of ranks.
        program: the program of each rank.
        faults: injected in this order, each at most once, before any step.
        victims: the ranks in which faults are injected.
        meets: whether each live rank must complete its program.
        waits: whether the timeout of an operation may expire.
        cancels: whether an interrupt cancels a step of ``retrying``.
        polls: whether ranks read the decision before they arrive.
        stuck: whether rank 0 reaches its timeout while it works, before the second barrier.
        late: whether an abandoned request may take effect at any later time.
        watches: whether waiting ranks detect that a process has died.
        again: whether the program continues after a timeout, a disagreement or a failure, and with
            a recovery after an interrupt of a step.
        joins: whether ranks first register the job on the store.
        uneven: ranks that have already registered one job more than the others.
        shares: the summand of each rank's plan, in the first operations.
        proposals: the proposals of each rank, in each operation.
        optional: barriers that are omitted unless a rank requests them.
        extends: the ranks that request them.
        others: the program of ranks that are not victims, if it differs.
        hosts: the ranks of each host; empty if they watch no process.
        lists: whether the store supports the lists of hosts.
        states: whether ranks offload and reload groups, with plans that have their state.
    """

    size: int
    program: tuple[Any, ...]
    faults: tuple[str, ...] = ()
    victims: tuple[int, ...] = (0, 1, 2)
    meets: bool = False
    waits: bool = True
    cancels: bool = False
    polls: bool = False
    stuck: bool = False
    late: bool = False
    watches: bool = False
    again: bool = False
    joins: bool = False
    uneven: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    proposals: tuple[tuple[Proposal, ...], ...] = ()
    optional: tuple[str, ...] = ()
    extends: tuple[int, ...] = ()
    others: tuple[Any, ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()
    lists: bool = True
    states: bool = False


class Explorer:
    """Explores the state space of one scenario.

    Attributes:
        ends: the number of terminal worlds.
        last: the terminal worlds.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.ends = 0
        self.last: list[World] = []

    def start(self) -> World:
        case = self.scenario
        store = {"reloadpg/1/progress": "0"}
        ranks = []
        for rank in range(case.size):
            state = State(rank, tuple(range(case.size)), instance=1)
            for host in case.hosts:
                if rank in host:
                    state = state._replace(host=f"h{host[0]}")
            program = case.others if case.others and rank not in case.victims else case.program
            if case.joins:
                state, program = state._replace(instance=0), ("join", *program)
            if rank in case.uneven:
                store[f"reloadpg/instance/{rank}"] = "1"
            ranks.append(Rank(state, program, polls=case.polls))
        world = World(_frozen(store), tuple(ranks), faults=case.faults)
        for n in range(case.size):
            world = self._settle(world, n)
        return world

    def go_on(self, world: World) -> World:
        """Return a terminal world of another scenario, in which the ranks begin this program."""
        ranks = (
            Rank(one.state, self.scenario.program, live=one.live, generation=one.generation)
            for one in world.ranks
        )
        world = world._replace(ranks=tuple(ranks), faults=(), timeouts=0)
        for n in range(len(world.ranks)):
            world = self._settle(world, n)
        return world

    def explore(self, limit: int, starts: Sequence[World] = ()) -> bool:
        """Search breadth-first up to a number of worlds; return whether the search is complete."""
        known: dict[World, World | None] = dict.fromkeys(starts or [self.start()])
        queue = deque(known)
        before: dict[World, list[World]] = {}
        ends = []
        while queue and len(known) < limit:
            world = queue.popleft()
            try:
                following = list(self.next(world))
                if not following:
                    self.check_end(world)
                    ends.append(world)
            except Violation as found:
                raise Violation(f"{found}\n{_path(known, world)}") from None
            for one in following:
                before.setdefault(one, []).append(world)
                if one not in known:
                    known[one] = world
                    queue.append(one)
        self.ends, self.last = len(ends), ends[:]
        if not queue:
            self._check_all_can_end(known, before, ends)
        return not queue

    def _check_all_can_end(
        self,
        known: dict[World, World | None],
        before: dict[World, list[World]],
        ends: list[World],
    ) -> None:
        """Check that a terminal world is reachable from each world (no livelock)."""
        can_end = {*ends}
        while ends:
            for one in before.get(ends.pop(), ()):
                if one not in can_end:
                    can_end.add(one)
                    ends.append(one)
        for world in known:
            if world not in can_end:
                raise Violation(f"no terminal world is reachable\n{_path(known, world)}")

    def walk(self, seed: int, steps: int, start: World | None = None) -> World:
        """Follow one random path."""
        chance, world = random.Random(seed), self.start() if start is None else start
        for _ in range(steps):
            following = list(self.next(world))
            if not following:
                self.check_end(world)
                self.ends += 1
                break
            world = chance.choice(following)
        return world

    # -- enabled steps --------------------------------------------------------------------------

    def next(self, world: World) -> Iterator[World]:
        """Yield the successors of a world."""
        for one in self._next(world):
            for n in range(len(one.ranks)):
                one = self._settle(one, n)
            yield one

    def _next(self, world: World) -> Iterator[World]:
        enabled = [n for n, rank in enumerate(world.ranks) if self._is_enabled(world, n, rank)]
        for n in enabled:
            yield self._act(world, n)
        for n, command in world.late:
            yield self._late(world, n, command)
        if world.faults:
            yield from self._fault(world)
        detections = list(self._detections(world)) if self.scenario.watches else []
        yield from detections
        if not self.scenario.again and any(key.endswith("/roll") for key, _ in world.store):
            yield from self._wake(world)
        if not enabled and not detections:
            yield from self._time(world)

    def _settle(self, world: World, n: int) -> World:
        """Run the local steps of a rank at once (partial-order reduction).

        No other rank depends on them, so only one interleaving needs to be explored.
        """
        over = world.ranks[n]
        if over.life == "over" and over.tries and self.scenario.meets and not over.program:
            number = int(dict(world.store).get(over.state.of_recovery(), "0"))
            if number > over.state.epoch and over.log[-1:] == ("passed",):
                resumed = over._replace(program=("recover",), life="runs", tries=over.tries - 1)
                world = self._with(world, n, resumed)
        while (rank := world.ranks[n]).life == "runs":
            command = rank.command
            is_local = isinstance(command, Set | Delete) or (
                isinstance(command, Pause) and not command.sleeps
            )
            if not is_local and (command is not None or not (rank.running or rank.program)):
                break
            world = self._act(world, n)
        return world

    def _is_enabled(self, world: World, n: int, rank: Rank) -> bool:
        if rank.life != "runs":
            return False
        command = rank.command
        if isinstance(command, Await):
            return command.key in dict(world.store)
        if isinstance(command, Pause) and command.sleeps:
            return self._poll_has_effect(world, n)
        return command is not None or bool(rank.running or rank.program)

    def _poll_has_effect(self, world: World, n: int) -> bool:
        """Whether the next poll of a sleeping rank would read anything new."""
        state, store = world.ranks[n].state, dict(world.store)
        at, (state, command) = state.at, protocol.step(state, Reply(state.command_number, True))
        while command is not None and not isinstance(command, Pause):
            if isinstance(command, OnHost):
                reply, after = self._perform_on_host(world, n, command)
                changes = after is not None and after != world.store
            else:
                reply, changes = _performed(store, command)
            if changes:
                return True
            state, command = protocol.step(state, Reply(state.command_number, reply))
        return state.at is not at or (isinstance(command, Pause) and command.restart)

    def _act(self, world: World, n: int) -> World:
        rank = world.ranks[n]
        if rank.command is None:
            return self._call(world, n)
        if isinstance(rank.command, Pause):
            reply = Reply(rank.state.command_number, True)
            if rank.command.sleeps and protocol.step(rank.state, reply)[0].at is None:
                raise Violation(f"rank {n} stops waiting before its deadline: {rank.state.at}")
            return self._step(world, n, reply)
        performed, reply = self._perform(world, n, rank.command, live=True)
        following = self._step(performed, n, Reply(rank.state.command_number, reply))
        if following == world:
            raise Violation(f"rank {n} polls without a pause: {rank.command}")
        return following

    def _perform(self, world: World, n: int, command: Command, *, live: bool) -> tuple[World, Any]:
        if isinstance(command, OnHost):
            reply, store_after = self._perform_on_host(world, n, command)
            if live and self._is_deleted(world, command.key):
                raise Violation(f"rank {n} uses a deleted key: {command}")
            return world._replace(store=store_after or world.store), reply
        store, deleted = dict(world.store), world.deleted
        keys = [command.key] if not isinstance(command, Absent | ReadAll | Pause) else []
        # A replacement ends barriers of its predecessor. Several ranks delete the same proposal.
        allowed = world.ranks[n].replaces and isinstance(command, Swap)
        allowed |= isinstance(command, Delete) and "/proposal/" in command.key
        if live and not allowed and any(self._is_deleted(world, key) for key in keys):
            raise Violation(f"rank {n} uses a deleted key: {command}")
        reply, _ = _performed(store, command)
        arrived = world.arrived
        if isinstance(command, Delete):
            if not self.scenario.faults:
                self._check_delete(world, n, command.key)
            deleted |= {command.key}
        elif isinstance(command, Add) and command.key.endswith(COUNTERS):
            size, bits = self.scenario.size, self.scenario.size.bit_length()
            if reply & ((1 << bits) - 1) > size:
                raise Violation(f"{command.key} has a count of {reply} for {size} ranks")
            once = (command.key.removesuffix("/count"), n)
            if command.amount and not command.key.endswith("/count") and once in arrived:
                raise Violation(f"rank {n} is counted twice: {command}")
            if command.amount:
                arrived |= {once}
        most = self.scenario.size * len(self.scenario.program)
        counts = isinstance(command, Add) and command.key.endswith("/progress")
        if counts and reply > most and not self.scenario.faults:  # a fault repeats recoveries
            raise Violation(f"progress is counted more than once: {reply}")
        return world._replace(store=_frozen(store), deleted=deleted, arrived=arrived), reply

    def _is_deleted(self, world: World, key: str) -> bool:
        """Whether a key of the newest job was deleted. Late ranks may use those of earlier jobs."""
        newest = protocol.base(int(dict(world.store).get("reloadpg/instance", "1")))
        return key in world.deleted and key.startswith(f"{newest}/")

    def _perform_on_host(self, world: World, n: int, command: OnHost) -> tuple[Any, Store | None]:
        """Return the reply to a command about the processes of a host, and the changed store."""
        store = dict(world.store)
        match command:
            case Publish() if not self.scenario.lists:
                return None, None
            case Publish(key):
                if not self.scenario.faults and str(n) in store.get(key, "").split():
                    raise Violation(f"rank {n} publishes itself twice: {key}")
                store[key] = " ".join(sorted({*store.get(key, "").split(), str(n)}))
                return None, _frozen(store)
            case Meet(key):
                found = tuple(sorted({*map(int, store.get(key, "").split())}))
                if self.scenario.lists and not self.scenario.faults and n not in found:
                    raise Violation(f"rank {n} has not published itself: {key}")
                return found, None

    def _late(self, world: World, n: int, command: Command) -> World:
        """An abandoned request takes effect, and its late reply is delivered."""
        world, reply = self._perform(world, n, command, live=False)
        world = world._replace(late=world.late - {(n, command)})
        return self._step(world, n, Reply(-1, reply))

    def _time(self, world: World) -> Iterator[World]:
        """Advance time to the next timeout that can expire."""
        waits: list[tuple[Any, Any]] = [(Await, None), (Pause, False)]
        running = [(n, rank) for n, rank in enumerate(world.ranks) if rank.life == "runs"]
        for kinds, reply in waits:
            found = [
                n
                for n, rank in running
                if isinstance(rank.command, kinds) and rank.state.at is not protocol._paused
            ]
            for n in found:
                rank = world.ranks[n]
                if isinstance(rank.command, Pause) and not self.scenario.waits:
                    raise Violation(f"rank {n} waits for responses to its timeout: {rank.state.at}")
                self._check_await(world, n, rank.command)
                yield self._step(world, n, Reply(rank.state.command_number, reply))
            if found:
                return
        yield from self._wake(world)
        for n, rank in running:
            if rank.state.at is protocol._paused:
                if not self.scenario.waits:
                    raise Violation(f"rank {n} reaches its timeout: {rank.state.key()}")
                reply_of = Reply(rank.state.command_number, False)
                yield self._step(world._replace(timeouts=world.timeouts + 1), n, reply_of)

    def _wake(self, world: World) -> Iterator[World]:
        """A stalled rank continues."""
        for n, rank in enumerate(world.ranks):
            if rank.life == "stalled":
                yield self._with(world, n, rank._replace(life="runs"))

    def _check_await(self, world: World, n: int, command: Command | None) -> None:
        """Check a wait on the store that expires before the decision is written."""
        store, state = dict(world.store), world.ranks[n].state
        if not isinstance(command, Await):
            return
        first = not self.scenario.faults and state.phases[0] == protocol.ENTER
        if first and state.of_recovery(state.epoch + 1, "request") in store:
            raise Violation(f"rank {n} notices a requested recovery only after its wait expired")
        if not command.brief and int(store.get("reloadpg/instance", "0")) > state.instance:
            raise Violation(f"rank {n} waits long in the abandoned job {state.instance}")

    def _detections(self, world: World) -> Iterator[World]:
        """A rank detects that a process of its host has died, at a barrier or just after it."""
        dead = tuple(n for n, rank in enumerate(world.ranks) if rank.life == "dead")
        for n, rank in enumerate(world.ranks):
            at_barrier = rank.running not in ("", "join") and not rank.state.decision.kind
            if dead and rank.life == "runs" and at_barrier and rank.command is not None:
                found = list(self._abandon(world, n))
                if self._is_enabled(world, n, rank):
                    found.append(self._act(world, n))
                for one in found:
                    event = Decide(Decision("failed", dead[0], by=n, dead=dead))
                    yield self._step(one, n, event)

    # -- faults ---------------------------------------------------------------------------------

    def _fault(self, world: World) -> Iterator[World]:
        kind, left = world.faults[0], world.faults[1:]
        world = world._replace(faults=left)
        if kind == "store lost":
            for n in range(len(world.ranks)):
                world = self._cut_off(world, n)
            yield world
            return
        for n in self.scenario.victims[: len(world.ranks)]:
            rank = world.ranks[n]
            if kind == "replace":
                if rank.life == "dead":
                    # Its bring-up reads the number of recoveries by adding 0, which writes the key.
                    store = {"reloadpg/1/recovery": "0", **dict(world.store)}
                    began = world._replace(store=_frozen(store))
                    yield self._with(began, n, self._replacement(world, rank))
            elif rank.life != "runs" or not (rank.running or rank.program):
                continue
            elif kind == "crash":
                for abandoned in self._abandon(world, n):
                    yield self._with(abandoned, n, rank._replace(life="dead"))
            elif kind == "stall":
                yield self._with(world, n, rank._replace(life="stalled"))
            elif kind == "silent":
                for abandoned in self._abandon(world, n):
                    yield self._cut_off(abandoned, n)
            elif rank.running not in ("", "join") and kind in ("interrupt", "failure"):
                for abandoned in self._abandon(world, n):
                    yield from self._interrupt(abandoned, n)

    def _abandon(self, world: World, n: int) -> Iterator[World]:
        """Abandon the in-flight request: it never takes effect, or took effect, or will later."""
        command = world.ranks[n].command
        yield world
        if command is not None and not isinstance(
            command, Pause | Await | Read | Absent | ReadAll | Meet
        ):
            yield self._perform(world, n, command, live=False)[0]
            if self.scenario.late:
                yield world._replace(late=world.late | {(n, command)})

    def _cut_off(self, world: World, n: int) -> World:
        rank = world.ranks[n]
        if rank.life != "runs" or rank.command is None:
            return world
        return self._ended(self._step(world, n, Lost()), n, "unknown")

    def _interrupt(self, world: World, n: int) -> Iterator[World]:
        rank = world.ranks[n]
        kinds = ["cancelled" if self.scenario.cancels else "failed"]
        if rank.running == "recover":
            # The call that joins may not have returned, although this rank has joined.
            kinds = ["failed"] if _has_joined(rank) else []
            kinds += [] if rank.state.passed.ok and kinds else ["cancelled"]
        world = self._with(world, n, rank._replace(failing=True))
        for kind in kinds:
            yield self._step(world, n, Fail(Decision(kind, n, "interrupted")))

    def _replacement(self, world: World, rank: Rank) -> Rank:
        epoch = int(dict(world.store).get("reloadpg/1/recovery", "0"))
        state = State(rank.state.rank, rank.state.members, instance=1, confirmed=True, epoch=epoch)
        state = state._replace(host=rank.state.host)
        program = rank.program[rank.program.index("recover") :] if "recover" in rank.program else ()
        if rank.running == "recover":
            program = ("recover", *rank.program)
        return Rank(state, program, replaces=True)

    # -- the caller of the library --------------------------------------------------------------

    def _call(self, world: World, n: int) -> World:
        """Take the next step of the program; the rank has no request in flight."""
        rank, state = world.ranks[n], world.ranks[n].state
        if not self.scenario.faults and state.host and state.passed.ok and not state.watches:
            raise Violation(f"rank {n} passed a barrier and does not watch the ranks of its host")
        if not rank.running:
            return self._begin(world, n)
        if rank.running == "recover" and not _has_joined(rank):
            news = state.noted.kind == "cancelled" and state.noted.rank != n
            if news and not rank.failing:
                return self._ended(world, n, "cancelled")
            if not rank.failing:
                raise Violation(f"rank {n} requested a recovery, but takes part in none")
            return self._ended(world, n, "failed")
        if state.joins and rank.failing:  # interrupted while it requested a new epoch
            return self._ended(world, n, "failed")
        if rank.aligns:
            insists = rank.strayed and rank.epoch == state.epoch
            event = Recover(
                "reload", "", state.phases, False, True, insists, self.scenario.optional
            )
            rank = rank._replace(aligns=False, asked=state.epoch)
            return self._step(self._with(world, n, rank), n, event)
        if rank.running == "join":
            if not state.instance:
                raise Violation(f"rank {n} has not joined a job")
            return self._ended(world, n, "joined")
        if state.decision.kind and not state.ended:
            return self._step(world, n, Close(f"work {n}", not rank.failing, hosts=n == 0))
        if state.ended:
            decision = state.decision
            behind = decision.kind == "timeout" and n in decision.missing and not rank.failing
            first = rank.running != "recover" and state.phases[0] == rank.running[0]
            first = first and not self.scenario.cancels  # a step of retrying begins no other epoch
            aligns = decision.kind == "recover" or (behind and state.strayed)
            if aligns and first and not rank.failing and rank.asked != state.epoch:
                return self._with(world, n, rank._replace(aligns=True))
            if decision.generation and not rank.failing:
                again = rank._replace(whole=decision.generation, state=state.open(rank.running))
                return self._with(world, n, again)
            if behind and first and rank.log[-1:] != ("behind",):
                asked = rank._replace(log=(*rank.log, "behind"))
                return self._step(
                    self._with(world, n, asked), n, Next(rank.running, self.scenario.optional)
                )
            count = state.key_of(state.epoch, state.sequence + 1, state.phases[0], "count")
            if behind and first and count in dict(world.store):
                raise Violation(f"rank {n} does not follow the others to their operation")
            return self._ended(world, n, decision.kind)
        if not state.phases:
            if not state.passed.ok:
                raise Violation(f"rank {n} has ended without a barrier")
            return self._ended(world, n, "passed")
        if state.lost:
            raise Violation(f"rank {n} treats the store as lost: {state.key()}")
        if rank.failing:
            raise Violation(f"rank {n} has failed, but no decision records it")
        if state.arrived:
            raise Violation(f"rank {n} has arrived, but stops waiting without a decision")
        if rank.polls and not state.arrived and state.phases[0] != "enter":
            return self._step(self._with(world, n, rank._replace(polls=False)), n, Poll(1))
        if self.scenario.stuck and n == 0 and state.phases[0] == "released":
            return self._step(world, n, Decide(Decision("timeout", n)))
        return self._step(world, n, self._arrival(n, state, rank))

    def _arrival(self, n: int, state: State, rank: Rank) -> Arrive:
        case = self.scenario
        if state.phases[0] != rank.running[0]:
            return Arrive()
        if case.states and rank.running == RELOAD:
            return Arrive(rank.plan.to_json(), rank.plan.contribution(n, case.size))
        share = case.shares[n] if case.shares and self._differs(state) else 0
        plan = ""
        if case.shares or case.proposals or case.optional or (case.polls and case.joins):
            plan = Plan("offload", {"generation": str(n * bool(share))}).to_json()
        proposals = case.proposals[n] if case.proposals else ()
        return Arrive(plan, share, proposals, n in case.extends)

    def _differs(self, state: State) -> bool:
        """Whether the operation uses ``shares``: all do, except the last of several."""
        return state.sequence <= max(1, len(self.scenario.program) - 1)

    def _begin(self, world: World, n: int) -> World:
        rank = world.ranks[n]
        item, *left = rank.program
        rank = rank._replace(program=tuple(left), running=item, polls=self.scenario.polls)
        if item == "join":
            state = State(n, rank.state.members, host=rank.state.host, mark="a process" * (n == 0))
            return self._step(self._with(world, n, rank._replace(state=state)), n, Join())
        if item == "recover":
            event = Recover("fault", "{}", RECOVERY, rank.replaces)
            rank = rank._replace(epoch=rank.state.epoch)
            return self._step(self._with(world, n, rank), n, event)
        short = self.scenario.states and item == RELOAD and rank.live
        state = rank.state.open(item[:1] if short else item, self.scenario.optional)
        strayed = rank.state.strayed
        rank = rank._replace(state=state, epoch=state.epoch, strayed=strayed, aligns=strayed)
        return self._with(world, n, rank)

    def _ended(self, world: World, n: int, how: str) -> World:
        rank = world.ranks[n]
        if rank.running == "recover" and how == "passed" and self.scenario.cancels:
            self._check_told(world, n)
        program, tries = rank.program, rank.tries
        if how not in ("passed", "joined"):
            if rank.running == "recover" and not self.scenario.states:
                program, tries = ("recover", *program), tries - 1
            elif self.scenario.again and how in ("timeout", "disagree", "failed"):
                pass
            elif "recover" in program:
                program = program[program.index("recover") :]
            else:
                program = ()
            if not tries:
                program = ()
        # A rank whose step was interrupted does not take part in the recovery.
        interrupted = how in ("cancelled", "failed") or rank.failing
        if self.scenario.cancels and interrupted and not self.scenario.again:
            program = ()
        if self.scenario.states:
            rank = _with_groups(rank)
        replaces = rank.replaces and not (rank.running == "recover" and how == "passed")
        log = (*(one for one in rank.log if one != "behind"), how)
        rank = rank._replace(
            running="",
            command=None,
            failing=False,
            strayed=False,
            aligns=False,
            asked=-1,
            whole=0,
            program=program,
            tries=tries,
            log=log[-2:],
            told=rank.told or how == "cancelled",
            replaces=replaces,
            life=rank.life if program or rank.life == "dead" else "over",
        )
        return self._with(world, n, rank)

    # -- one step, and the invariants -------------------------------------------------------------

    def _step(self, world: World, n: int, event: Event) -> World:
        rank = world.ranks[n]
        before = rank.state
        if rank.life == "dead" and isinstance(event, Reply):
            return world
        after, command = protocol.step(before, event)
        if isinstance(event, Reply) and event.number == -1:
            if (after, command) != (before, None):
                raise Violation(f"a late reply changes rank {n}: {before.at} to {after.at}")
            return world
        self._check_command(world, n, before, after, command)
        world = self._check(world, n, before, after, command)
        # Command numbers are only compared for equality: a constant keeps the state space finite.
        state = after._replace(command_number=1)
        return self._with(world, n, world.ranks[n]._replace(state=state, command=command))

    def _check(
        self, world: World, n: int, before: State, after: State, command: Command | None
    ) -> World:
        if isinstance(command, Swap) and command.key.endswith("/roll"):
            self._check_named(world, before, Decision.from_json(command.value))
            self._check_result(world, before, Decision.from_json(command.value))
        if not before.phases or (after.epoch, after.sequence) != (before.epoch, before.sequence):
            return world
        barrier = before.key().removesuffix("/")
        kind = ""
        if len(after.phases) < len(before.phases):
            kind = f"passed {after.passed.kind}"
            if after.passed.ok:
                arrived = {rank for name, rank in world.arrived if name == barrier}
                skipped = () if self.scenario.extends else self.scenario.optional
                if after.phases != tuple(p for p in before.phases[1:] if p not in skipped):
                    raise Violation(f"rank {n} continues with {after.phases} after {before.phases}")
                if before.phases[0] == "enter" and before.epoch == 0:
                    self._check_agreement(world, n, before, after)
                rank = world.ranks[n]
                if not rank.failing and before.arriving != self._arrival(n, before, rank):
                    raise Violation(f"rank {n} passes {barrier} with other data: {before.arriving}")
                if arrived != {*before.members}:
                    raise Violation(f"rank {n} passes {barrier}, but only {arrived} have arrived")
        elif after.decision.kind and after.decision.kind != before.decision.kind:
            kind = after.decision.kind
        if not kind:
            return world
        for name, other in world.decided:
            if name == barrier and other != kind:
                raise Violation(f"two decisions at {barrier}: {other}, and {kind} on rank {n}")
        return world._replace(decided=world.decided | {(barrier, kind)})

    def _check_agreement(self, world: World, n: int, before: State, after: State) -> None:
        """Check that the ranks agree on plans and proposals at a barrier that a rank passes."""
        case, barrier = self.scenario, before.key().removesuffix("/")
        if sum(case.shares) and self._differs(before):
            raise Violation(f"rank {n} passes {barrier}, but the plans differ")
        proposals = [one for ranks in case.proposals for one in ranks]
        for one in proposals:
            same = [other for other in proposals if other.subject == one.subject]
            texts = {other.text for other in same if not other.yields} or {o.text for o in same}
            found = dict(world.store).get(before.key("proposal", one.subject))
            if found not in texts:
                raise Violation(f"rank {n} reads the proposal {found}, expected one of {texts}")
        if after.passed.proposed != bool(proposals):
            raise Violation(f"the decision misreports whether there are proposals: {after.passed}")

    def _check_command(
        self, world: World, n: int, before: State, after: State, command: Command | None
    ) -> None:
        """Check that requests are useful, and that a rank publishes a mark for each long wait."""
        store, replaces = dict(world.store), world.ranks[n].replaces
        if before.phases and after.phases == before.phases and isinstance(after.event, Close):
            self._check_end_of(world, n, before, after)
        self._check_need(world.ranks[n], n, after, command)
        if isinstance(command, Swap) and command.key.endswith(".0/enter/decision"):
            self._check_cancellation(world, n, before, Decision.from_json(command.value))
        if before.phases and not replaces:
            mark = before.key("here", n)
            if isinstance(command, Set) and command.key == mark in store:
                raise Violation(f"rank {n} publishes the mark of its wait twice: {mark}")
            if after.at is protocol._paused and after.arrived and mark not in store:
                raise Violation(f"rank {n} waits without a published mark: {mark}")

    def _check_need(self, rank: Rank, n: int, after: State, command: Command | None) -> None:
        """Check that a rank sends the necessary requests, and no others."""
        before, last = rank.state, rank.command
        if isinstance(command, Await) and command.brief == before.confirmed:
            raise Violation(f"rank {n} uses the wrong timeout: {command}")
        if isinstance(command, Read) and command.key == "reloadpg/instance" and before.confirmed:
            raise Violation(f"rank {n} checks for a newer job after all ranks have met")
        if isinstance(command, Swap) and "/0.0/" in command.key and not rank.replaces:
            raise Violation(f"rank {n} writes a decision outside a barrier: {command}")
        decides = isinstance(command, Swap) and command.key.endswith("/decision")
        written = Decision.from_json(command.value) if decides else protocol.UNDECIDED
        noted = rank.running == "recover" and rank.log[-1:] == ("cancelled",) and not rank.failing
        if noted and written.kind == "cancelled" and written.rank == before.noted.rank:
            raise Violation(f"rank {n} cancels a recovery for an interrupt that all have noted")
        if written.kind == "cancelled" and written.rank == n and not rank.failing:
            raise Violation(f"rank {n} cancels a recovery in which it takes part: {command}")
        if isinstance(command, Add) and "/instance/" in command.key and not command.amount:
            raise Violation(f"rank {n} joins a job without registering it: {command}")
        if isinstance(command, Set) and "/here/" in command.key and not before.arrived:
            raise Violation(f"rank {n} marks a wait before it has arrived: {command}")
        watches = self.scenario.watches or rank.failing
        if written.kind == "failed" and not watches:
            raise Violation(f"rank {n} writes a failure, but has not failed: {command}")
        if written.kind == "failed" and f"/{before.epoch}." not in command.key:
            raise Violation(f"rank {n} fails a recovery that it has not joined: {command}")
        if len({*after.owned}) < len(after.owned):
            raise Violation(f"rank {n} deletes a key twice: {after.owned}")
        if isinstance(command, Pause) and after.at is protocol._paused:
            if command.restart != after.restart:
                raise Violation(f"rank {n} does not restart its deadline on progress: {command}")
            joins = after.host and not after.confirmed and not after.epoch
            if bool(joins) != isinstance(last, Meet):
                raise Violation(f"rank {n} does not watch the processes of its host: {last}")
        if after.at is protocol._roll_read and not after.event.waits:
            raise Violation(f"rank {n} waits for responses, although Close.waits is False")
        if isinstance(command, Pause) and after.at is protocol._leave_paused:
            if not after.event.hosts:
                raise Violation(f"rank {n} waits for the readers, but does not host the store")
            if isinstance(last, Absent) and before.restart and not command.restart:
                raise Violation(f"rank {n} hosts the store, but gives the others no time to read")

    def _check_told(self, world: World, n: int) -> None:
        """Check that the ranks that recover together have all read of the interrupt, or none."""
        others = {*range(len(world.ranks))} - {*self.scenario.victims}
        told = {m for m in others if world.ranks[m].told}
        if told and n in others - told and world.ranks[n].epoch == 0:  # that of the interrupt
            raise Violation(f"rank {n} joins a recovery, and has not read of the interrupt: {told}")

    def _check_cancellation(self, world: World, n: int, before: State, written: Decision) -> None:
        """Check that an interrupted rank cancels no recovery whose ranks all know of it."""
        own = written.kind == "cancelled" and written.rank == n and not before.joins
        if not own or not before.phases or before.decision != written:
            return
        request = dict(world.store).get(before.of_recovery(before.joining, "request"))
        if request is None or Decision.from_json(request).interrupted == n:
            raise Violation(f"rank {n} cancels a recovery whose ranks know of its interrupt")

    def _check_end_of(self, world: World, n: int, before: State, after: State) -> None:
        """Check how a rank leaves a barrier that was not passed."""
        decision, barrier, store = after.decision, before.key().removesuffix("/"), dict(world.store)
        ends, result = after.ended and not before.ended, store.get(f"{barrier}/roll")
        waits = after.event.waits
        if (
            ends
            and result
            and waits
            and decision.kind != "recover"
            and decision.to_json() != result
        ):
            raise Violation(f"rank {n} leaves with {decision}, but the result is {result}")
        gone = {*decision.missing, *decision.silent, *decision.dead}
        gone |= {decision.rank} if decision.kind == "cancelled" else set()
        read = {rank for rank in before.members if before.key("reader", rank) in store}
        waits_for = {*before.members} - gone - read
        asked = before.at is protocol._readers_found
        if asked and after.at is protocol._leave_paused and not waits_for:
            raise Violation(f"rank {n} hosts the store, and waits although all ranks have read")
        if asked and ends and waits_for:
            raise Violation(f"rank {n} hosts the store, and leaves before {waits_for} have read")

    def _check_result(self, world: World, state: State, decision: Decision) -> None:
        """Check the result of an operation: which ranks did not respond, and why."""
        store = dict(world.store)
        lacks = {
            name: {m for m in state.members if state.key(name, m) not in store} - {*decision.dead}
            for name in ("answer", "arrived")
        }
        if decision.kind == "disagree":
            named = "state is" if self.scenario.states else "generation"
            if decision.text == "" or (not lacks["answer"] and named not in decision.text):
                raise Violation(f"the result does not name the difference: {decision}")
            return
        named = decision.missing if decision.kind == "timeout" else decision.silent
        if {*named} & {*decision.dead}:
            raise Violation(f"a dead rank is named twice: {decision}")
        if not lacks["answer"] <= {*named}:
            raise Violation(f"{lacks['answer']} did not respond, and are not named: {decision}")
        states = {m: world.ranks[m].state for m in state.members}
        at = state.epoch, state.sequence, state.phases
        here = {m for m, one in states.items() if (one.epoch, one.sequence, one.phases) == at}
        arrived = {m for m in here if states[m].arrived}
        if decision.kind == "timeout" and here - arrived - {*named} != here & {*decision.stuck}:
            raise Violation(f"only {arrived} have arrived: {decision}")
        if decision.stuck and decision.doing != f"work {decision.stuck[0]}":
            raise Violation(f"the result does not name the work of a stuck rank: {decision}")

    def _check_delete(self, world: World, n: int, key: str) -> None:
        if key in world.deleted and "/proposal/" not in key:
            raise Violation(f"rank {n} deletes a key again: {key}")
        passed = (key.rpartition("/")[0], "passed ok") in world.decided
        if (
            (passed or key.endswith(("/answers", "/roll")))
            and key not in world.deleted
            and key not in dict(world.store)
        ):
            raise Violation(f"rank {n} deletes a key that was never written: {key}")

    def _check_named(self, world: World, state: State, decision: Decision) -> None:
        for named in (*decision.missing, *decision.silent):
            rank = world.ranks[named]
            # The arrival may be that of a process that was replaced.
            counted = (state.key().removesuffix("/"), named) in world.arrived
            here = counted and rank.state.arrived
            same = (rank.state.epoch, rank.state.sequence) == (state.epoch, state.sequence)
            if rank.life == "runs" and here and same and rank.running and not rank.failing:
                raise Violation(f"rank {named} is reported as missing, but responds: {decision}")

    def check_end(self, world: World) -> None:
        for n, rank in enumerate(world.ranks):
            if rank.life in ("runs", "stalled"):
                raise Violation(f"deadlock: rank {n} waits at {rank.state.at}: {rank.state}")
            if self.scenario.meets and rank.life != "dead" and rank.log[-1:] != ("passed",):
                raise Violation(f"rank {n} has not completed its program: {rank.log}")
        if self.scenario.states and self.scenario.meets:
            at = {(r.live, r.generation, r.state.epoch, r.state.sequence) for r in world.ranks}
            if len(at) > 1 or not world.ranks[0].live:
                raise Violation(f"the ranks are not live everywhere: {at}")
        case = self.scenario
        if case.faults:
            return
        store, jobs = dict(world.store), {rank.state.instance for rank in world.ranks}
        if len(jobs) > 1:
            raise Violation(f"the ranks are in different jobs: {jobs}")
        marks = [n for n in range(case.size) if f"reloadpg/{max(jobs)}/process/{n}" in store]
        if case.joins and marks != [0]:
            raise Violation(f"only rank 0 must leave a mark in job {jobs}, not {marks}")
        if (
            case.polls
            and not case.joins
            and int(store["reloadpg/1/progress"]) != case.size * len(case.program)
        ):
            raise Violation(f"progress is missing: {store}")
        if "join" not in case.program:
            left = [key for key, _ in world.store if not _stays(key, world)]
            if left:
                raise Violation(f"keys are left in the store: {left}")

    def _with(self, world: World, n: int, rank: Rank) -> World:
        return world._replace(ranks=(*world.ranks[:n], rank, *world.ranks[n + 1 :]))


def _path(known: dict[World, World | None], world: World) -> str:
    """Format the steps of each rank on the path to a world."""
    lines, before = [], None
    one: World | None = world
    worlds = []
    while one is not None:
        worlds.append(one)
        one = known[one]
    for world in reversed(worlds):
        for n, rank in enumerate(world.ranks):
            if before is None or before.ranks[n] != rank:
                lines.append(f"rank {n} {rank.life} {rank.running}: {rank.state.at} {rank.command}")
        before = world
    return "\n".join(lines)


def _with_groups(rank: Rank) -> Rank:
    """The rank with the state in which the end of its operation leaves its groups."""
    end, offloads = rank.state.supposed_end, rank.running == OFFLOAD
    if rank.running == "recover":
        number = 100 * rank.state.epoch if end is None else rank.generation
        return rank._replace(live=end is None, generation=number)
    if end is not None:
        return rank._replace(live=rank.live and end == "enter")
    if offloads or (rank.live and not rank.whole):
        return rank._replace(live=not offloads)
    return rank._replace(live=True, generation=rank.whole or rank.generation + 1)


def _has_joined(rank: Rank) -> bool:
    """Whether a recovering rank has entered the epoch of the recovery."""
    return rank.state.epoch > rank.epoch


def _stays(key: str, world: World) -> bool:
    """Whether a key may stay: it belongs to the job, or to one of its last two barriers."""
    owned = {name for rank in world.ranks for name in (*rank.state.owned, *rank.state.spent)}
    return (
        key in owned
        or "instance" in key
        or "progress" in key
        or "/process/" in key
        or key.endswith("/recovery")
    )


def _frozen(store: dict[str, str]) -> Store:
    return frozenset(store.items())


def _performed(store: dict[str, str], command: Command) -> tuple[Any, bool]:
    """Perform a command on the store; return the reply, and whether the store has changed."""
    match command:
        case Add(key, amount):
            store[key] = str(int(store.get(key, "0")) + amount)
            return int(store[key]), bool(amount)
        case Read(key):
            return store.get(key), False
        case ReadAll(stem, ranks):
            return tuple(store.get(f"{stem}/{rank}", "") for rank in ranks), False
        case Set(key, value):
            store[key] = value
            return None, True
        case Swap(key, expected, value):
            if store.get(key, "") == expected:
                store[key] = value
                return value, True
            return store.get(key, expected), False
        case Absent(stem, ranks):
            return tuple(rank for rank in ranks if f"{stem}/{rank}" not in store), False
        case Delete(key):
            store.pop(key, None)
            return None, True
    return None, False
