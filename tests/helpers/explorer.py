"""Exploration of the agreement protocol: the library's code, over a store that is a dictionary.

A world is the store, the ranks, and the commands that ranks have given up and that may still take
effect. From each world all ranks that can act do so, in every order, and a fault can happen at each
step. Time passes only when no rank can act: a timeout that expires is one of a rank that is dead,
stalled or cut off, so whoever answers is named by nobody. Worlds that were seen are not explored
again. After the method of FoundationDB's simulation and of explicit-state model checkers.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
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
    Gather,
    Hand,
    Hear,
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
    Spread,
    State,
    Swap,
)

RECOVERY = ("enter", "done")
COUNTERS = ("/count", "/answers")
RECOVERIES = 3
"""How often a rank recovers before it gives up."""

Store = frozenset[tuple[str, str]]


class Violation(AssertionError):
    """What must hold does not."""


class Rank(NamedTuple):
    """One process of a rank, and the program that it runs.

    Attributes:
        state: what the library knows there.
        command: what it has asked.
        program: the operations that are left: their barriers, or ``recover``.
        running: the operation that is going on; empty between operations.
        log: how operations ended.
        life: ``runs``, ``stalled``, ``dead``, ``over``, or ``unborn``.
        failing: whether it ends its operation since it was interrupted.
        polls: whether it looks at the decision once before it arrives.
        tries: recoveries that are left to it.
        replaces: whether it takes the place of a process that has ended.
        epoch: the one in which it has begun to recover.
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


class World(NamedTuple):
    """Everything there is. The sets are what has happened, for the invariants."""

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
    """What is explored.

    Attributes:
        size: number of ranks.
        program: of each rank.
        others: of the ranks that are no victims, if it is another one.
        faults: each happens once at most, at any step; in this order.
        victims: the ranks to which they happen.
        meets: whether every rank that lives is to complete its program.
        waits: whether a timeout of an operation may expire.
        cancels: whether interrupts are those of a step.
        polls: whether ranks look at the decision before they arrive.
        stuck: whether rank 0 reaches its timeout at work, before the second barrier.
        late: whether what a rank has given up may take effect at any later time.
        watches: whether ranks that wait find out that another one has crashed.
        again: whether the program goes on after a timeout, a disagreement or a failure, and with a
            recovery after an interrupt of a step.
        joins: whether ranks count the job first; ``uneven`` ranks have counted one more.
        shares: the summands of the plans, by rank, in the first operations.
        proposals: of each rank, in each operation.
        optional: barriers that are left out, unless one of the ranks ``extends`` the operation.
        hosts: the ranks of each host; none if every rank arrives alone.
        met: whether the ranks of a host know each other from the start.
        lists: whether the store can keep the list of a host.
        partial: whether ranks of a host cannot reach their leader.
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
    met: bool = False
    lists: bool = True
    partial: tuple[int, ...] = ()


class Explorer:
    """Explores one scenario.

    Attributes:
        seen: the number of worlds.
        ends: the number of worlds in which nothing can happen any more.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.seen = 0
        self.ends = 0

    def start(self) -> World:
        case = self.scenario
        store = {"reloadpg/1/progress": "0"}
        ranks = []
        for rank in range(case.size):
            state = State(rank, tuple(range(case.size)), instance=1)
            for host in case.hosts:
                if rank in host:
                    state = state._replace(host=f"h{host[0]}")
                    if case.met:
                        state = state._replace(published=True, local=host, confirmed=True)
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

    def explore(self, most: int) -> bool:
        """Breadth first, so many worlds at most; whether these were all of them."""
        first = self.start()
        known: dict[World, World | None] = {first: None}
        queue = deque([first])
        before: dict[World, list[World]] = {}
        ends = []
        while queue and len(known) < most:
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
        self.seen, self.ends = len(known), len(ends)
        if not queue:
            self._check_all_can_end(known, before, ends)
        return not queue

    def _check_all_can_end(
        self,
        known: dict[World, World | None],
        before: dict[World, list[World]],
        ends: list[World],
    ) -> None:
        """Whatever has happened, there is a way to an end: no rank goes round for ever."""
        can_end = {*ends}
        while ends:
            for one in before.get(ends.pop(), ()):
                if one not in can_end:
                    can_end.add(one)
                    ends.append(one)
        for world in known:
            if world not in can_end:
                raise Violation(f"there is no end\n{_path(known, world)}")

    def walk(self, seed: int, steps: int) -> World:
        """One random path."""
        chance, world = random.Random(seed), self.start()
        for _ in range(steps):
            following = list(self.next(world))
            if not following:
                self.check_end(world)
                self.ends += 1
                break
            world = chance.choice(following)
            self.seen += 1
        return world

    # -- what can happen ------------------------------------------------------------------------

    def next(self, world: World) -> Iterator[World]:
        """The worlds that come after one."""
        for one in self._next(world):
            for n in range(len(one.ranks)):
                one = self._settle(one, n)
            yield one

    def _next(self, world: World) -> Iterator[World]:
        acts = [n for n, rank in enumerate(world.ranks) if self._can_act(world, n, rank)]
        for n in acts:
            yield self._act(world, n, True)
        for n, command in world.late:
            yield self._late(world, n, command)
        if world.faults:
            yield from self._fault(world)
        deaths = list(self._deaths(world)) if self.scenario.watches else []
        yield from deaths
        if not self.scenario.again and any(key.endswith("/roll") for key, _ in world.store):
            yield from self._wake(world)
        if not acts and not deaths:
            yield from self._time(world)

    def _settle(self, world: World, n: int) -> World:
        """What a rank does that no other one sees: no order of it matters."""
        over = world.ranks[n]
        if over.life == "over" and over.tries and self.scenario.meets and not over.program:
            number = int(dict(world.store).get(over.state.of_recovery(), "0"))
            if number > over.state.epoch and over.log[-1:] == ("passed",):
                called = over._replace(program=("recover",), life="runs", tries=over.tries - 1)
                world = self._with(world, n, called)
        while (rank := world.ranks[n]).life == "runs":
            command = rank.command
            alone = isinstance(command, Set | Delete) or (
                isinstance(command, Pause) and not command.sleeps
            )
            if not alone and (command is not None or not (rank.running or rank.program)):
                break
            world = self._act(world, n, True)
        return world

    def _can_act(self, world: World, n: int, rank: Rank) -> bool:
        if rank.life != "runs":
            return False
        command = rank.command
        if isinstance(command, Await):
            return command.key in dict(world.store)
        if isinstance(command, Gather | Hear) and command.waits:
            reply, _ = self._on_host(world, n, command)
            lone = isinstance(command, Hear) and not self._is_led(world, n)
            return lone or (reply[1] if isinstance(command, Gather) else reply is not None)
        if isinstance(command, Pause) and command.sleeps:
            return self._would_change(world, n)
        return command is not None or bool(rank.running or rank.program)

    def _would_change(self, world: World, n: int) -> bool:
        """Whether a rank that pauses would find something new."""
        state, store = world.ranks[n].state, dict(world.store)
        at, (state, command) = state.at, protocol.step(state, Reply(state.asked, True))
        while command is not None and not isinstance(command, Pause):
            if isinstance(command, OnHost):
                reply, after = self._on_host(world, n, command)
                changes = after is not None and after != world.store
            else:
                reply, changes = _performed(store, command)
            if changes:
                return True
            state, command = protocol.step(state, Reply(state.asked, reply))
        return state.at is not at or (isinstance(command, Pause) and command.restart)

    def _act(self, world: World, n: int, is_left: bool) -> World:
        rank = world.ranks[n]
        if rank.command is None:
            return self._call(world, n)
        if isinstance(rank.command, Pause):
            reply = Reply(rank.state.asked, is_left)
            if rank.command.sleeps and protocol.step(rank.state, reply)[0].at is None:
                raise Violation(f"rank {n} ends a wait before its time: {rank.state.at}")
            return self._step(world, n, reply)
        performed, reply = self._perform(world, n, rank.command, live=True)
        following = self._step(performed, n, Reply(rank.state.asked, reply))
        if following == world:
            raise Violation(f"rank {n} repeats without a pause: {rank.command}")
        return following

    def _perform(self, world: World, n: int, command: Command, *, live: bool) -> tuple[World, Any]:
        if isinstance(command, OnHost):
            reply, store_after = self._on_host(world, n, command)
            arrived = world.arrived
            if isinstance(command, Hand) and reply:
                arrived |= {(command.key.removesuffix("/"), n)}
            asks = isinstance(command, Meet | Publish) and live
            if asks and self._is_gone(world, command.key):
                raise Violation(f"rank {n} asks for a key that was deleted: {command}")
            return world._replace(store=store_after or world.store, arrived=arrived), reply
        store, deleted = dict(world.store), world.deleted
        keys = [command.key] if not isinstance(command, Absent | ReadAll | Pause) else []
        ends = world.ranks[n].replaces and isinstance(command, Swap)  # what another may have left
        ends |= (
            isinstance(command, Delete) and "/proposal/" in command.key
        )  # several ranks wrote it
        if live and not ends and any(self._is_gone(world, key) for key in keys):
            raise Violation(f"rank {n} asks for a key that was deleted: {command}")
        reply, _ = _performed(store, command)
        arrived = world.arrived
        if isinstance(command, Delete):
            if not self.scenario.faults:
                self._check_delete(world, n, command.key)
            deleted |= {command.key}
        elif isinstance(command, Add) and command.key.endswith(COUNTERS):
            size, bits = self.scenario.size, self.scenario.size.bit_length()
            if reply & ((1 << bits) - 1) > size:
                raise Violation(f"{command.key} counts {reply} of {size} ranks")
            once = (command.key.removesuffix("/count"), n)
            if command.amount and not command.key.endswith("/count") and once in arrived:
                raise Violation(f"rank {n} is counted twice: {command}")
            if command.amount:
                arrived |= {once}
        most = self.scenario.size * len(self.scenario.program)
        counts = isinstance(command, Add) and command.key.endswith("/progress")
        if counts and reply > most and not self.scenario.faults:  # a fault repeats recoveries
            raise Violation(f"more progress than there was: {reply}")
        return world._replace(store=_frozen(store), deleted=deleted, arrived=arrived), reply

    def _is_gone(self, world: World, key: str) -> bool:
        """Whether a key was deleted. Ranks that are late ask for keys of a job that others left."""
        newest = protocol.base(int(dict(world.store).get("reloadpg/instance", "1")))
        return key in world.deleted and key.startswith(f"{newest}/")

    def _is_led(self, world: World, n: int) -> bool:
        """Whether a message of a rank reaches its leader, which lives and is in the same epoch."""
        state = world.ranks[n].state
        leader = world.ranks[(state.local or (n,))[0]]
        same = bool(state.local) and leader.state.epoch == state.epoch
        return same and leader.life != "dead" and n not in self.scenario.partial

    def _on_host(self, world: World, n: int, command: OnHost) -> tuple[Any, Store | None]:
        """The reply of the other ranks of a host, and the store with their messages."""
        state, store = world.ranks[n].state, dict(world.store)
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
            case Hand(key, amount):
                if not self._is_led(world, n):
                    return False, None
                mine = f"message/{state.local[0]}/{key}{n}"
                assert mine not in store, "handed twice"
                store[mine] = str(amount)
                return True, _frozen(store)
            case Gather(key, _):
                found = [one for one in store if one.startswith(f"message/{n}/{key}")]
                others = [one for one in state.local[1:] if one not in self.scenario.partial]
                taken = sum(int(store[one]) for one in found)
                store.update(dict.fromkeys(found, "0"))
                return (taken, len(found) >= len(others)), _frozen(store)
            case Spread(key, text):
                for one in state.local[1:]:
                    store[f"message/{one}/{key}"] = text
                for one in [one for one in store if one.startswith(f"message/{n}/{key}")]:
                    del store[one]
                return None, _frozen(store)
            case Hear(key, _):
                text = store.pop(f"message/{n}/{key}", None)
                return text, _frozen(store)

    def _late(self, world: World, n: int, command: Command) -> World:
        """A command that was given up takes effect, and its reply comes."""
        world, reply = self._perform(world, n, command, live=False)
        world = world._replace(late=world.late - {(n, command)})
        return self._step(world, n, Reply(-1, reply))

    def _time(self, world: World) -> Iterator[World]:
        """The shortest time passes in which something happens."""
        waits: list[tuple[Any, Any]] = [(Await | Hear | Gather, None), (Pause, False)]
        running = [(n, rank) for n, rank in enumerate(world.ranks) if rank.life == "runs"]
        for kinds, reply in waits:
            found = [
                n
                for n, rank in running
                if isinstance(rank.command, kinds) and rank.state.at is not protocol._paused
            ]
            for n in found:
                rank = world.ranks[n]
                if isinstance(rank.command, Hear) and not self.scenario.faults:
                    raise Violation(f"rank {n} gets no message of {rank.command.key}")
                if isinstance(rank.command, Pause) and not self.scenario.waits:
                    raise Violation(f"rank {n} waits for a response until the end: {rank.state.at}")
                self._check_await(world, n, rank.command)
                if isinstance(rank.command, Gather | Hear):
                    yield self._act(world, n, True)
                else:
                    yield self._step(world, n, Reply(rank.state.asked, reply))
            if found:
                return
        yield from self._wake(world)
        for n, rank in running:
            if rank.state.at is protocol._paused:
                if not self.scenario.waits:
                    raise Violation(f"rank {n} waits for its whole timeout: {rank.state.key()}")
                reply_of = Reply(rank.state.asked, False)
                yield self._step(world._replace(timeouts=world.timeouts + 1), n, reply_of)

    def _wake(self, world: World) -> Iterator[World]:
        """A rank goes on that was stalled."""
        for n, rank in enumerate(world.ranks):
            if rank.life == "stalled":
                yield self._with(world, n, rank._replace(life="runs"))

    def _check_await(self, world: World, n: int, command: Command | None) -> None:
        """A wait at the store that comes to its end before the decision."""
        store, state = dict(world.store), world.ranks[n].state
        if not isinstance(command, Await):
            return
        first = not self.scenario.faults and state.phases[0] == protocol.ENTER
        if first and state.of_recovery(state.epoch + 1, "request") in store:
            raise Violation(f"rank {n} waits until it reads that a recovery was requested")
        if not command.brief and int(store.get("reloadpg/instance", "0")) > state.instance:
            raise Violation(f"rank {n} waits long in job {state.instance}, which was left")
        handed = [store[one] for one in store if one.startswith(f"message/{n}/{state.key()}")]
        if state.leads and any(amount != "0" for amount in handed):
            raise Violation(f"rank {n} waits at the store, and takes no arrivals")

    def _deaths(self, world: World) -> Iterator[World]:
        """A rank that waits for others finds that a process of its host has ended."""
        dead = tuple(n for n, rank in enumerate(world.ranks) if rank.life == "dead")
        for n, rank in enumerate(world.ranks):
            waits = isinstance(rank.command, Await | Hear | Gather)
            if dead and rank.life == "runs" and (waits or rank.state.at is protocol._paused):
                yield self._step(world, n, Decide(Decision("failed", dead[0], by=n, dead=dead)))

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
                for given_up in self._give_up(world, n):
                    yield self._with(given_up, n, rank._replace(life="dead"))
            elif kind == "stall":
                yield self._with(world, n, rank._replace(life="stalled"))
            elif kind == "brief":  # a short wait ends before the others have come
                if isinstance(rank.command, Gather | Hear) and rank.command.waits:
                    yield self._act(world, n, True)
            elif kind == "silent":
                for given_up in self._give_up(world, n):
                    yield self._cut_off(given_up, n)
            elif rank.running not in ("", "join") and kind in ("interrupt", "failure"):
                for given_up in self._give_up(world, n):
                    yield self._interrupt(given_up, n)

    def _give_up(self, world: World, n: int) -> Iterator[World]:
        """What a rank has asked was done and not answered, was not done, or is done later."""
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

    def _interrupt(self, world: World, n: int) -> World:
        rank = world.ranks[n]
        cancels = self.scenario.cancels and rank.running != "recover"
        failed = Decision("cancelled" if cancels else "failed", n, "interrupted")
        world = self._with(world, n, rank._replace(failing=True))
        if rank.running == "recover" and not _has_joined(rank):
            failed = Decision("cancelled", n, "interrupted")
            return self._step(world, n, Fail(failed, joins=True))
        return self._step(world, n, Fail(failed))

    def _replacement(self, world: World, rank: Rank) -> Rank:
        epoch = int(dict(world.store).get("reloadpg/1/recovery", "0"))
        state = State(rank.state.rank, rank.state.members, instance=1, confirmed=True, epoch=epoch)
        state = state._replace(host=rank.state.host)
        program = rank.program[rank.program.index("recover") :] if "recover" in rank.program else ()
        if rank.running == "recover":
            program = ("recover", *rank.program)
        return Rank(state, program, replaces=True)

    # -- the program of a rank ------------------------------------------------------------------

    def _call(self, world: World, n: int) -> World:
        """What the caller of the library does next, on a rank that waits for no reply."""
        rank, state = world.ranks[n], world.ranks[n].state
        if not rank.running:
            return self._begin(world, n)
        if rank.running == "recover" and not _has_joined(rank):
            if not rank.failing:
                raise Violation(f"rank {n} has requested a recovery, and takes part in none")
            return self._ended(world, n, "failed")
        if rank.running == "join":
            if not state.instance:
                raise Violation(f"rank {n} has joined no job")
            return self._ended(world, n, "joined")
        if state.decision.kind and not state.ended:
            return self._step(world, n, Close(f"work {n}", not rank.failing, hosts=n == 0))
        if state.ended:
            decision = state.decision
            behind = decision.kind == "timeout" and n in decision.missing and not rank.failing
            first = rank.running != "recover" and state.phases[0] == rank.running[0]
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
                raise Violation(f"rank {n} has come to an end without a barrier")
            return self._ended(world, n, "passed")
        if state.lost:
            raise Violation(f"rank {n} takes the store for lost: {state.key()}")
        if rank.failing:  # all ranks had passed the barrier: the next one is told
            raise Violation(f"rank {n} has failed and no decision says it")
        if state.arrived:
            raise Violation(f"rank {n} has arrived, and ends its wait without a decision")
        if rank.polls and not state.arrived and state.phases[0] != "enter":
            return self._step(self._with(world, n, rank._replace(polls=False)), n, Poll(1))
        if self.scenario.stuck and n == 0 and state.phases[0] == "released":
            return self._step(world, n, Decide(Decision("timeout", n)))
        return self._step(world, n, self._arrival(n, state, rank))

    def _arrival(self, n: int, state: State, rank: Rank) -> Arrive:
        case = self.scenario
        if state.phases[0] != rank.running[0]:
            return Arrive()
        share = case.shares[n] if case.shares and self._differs(state) else 0
        plan = ""
        if case.shares or case.proposals or case.optional or (case.polls and case.joins):
            plan = Plan("offload", {"generation": str(n * bool(share))}).to_json()
        proposals = case.proposals[n] if case.proposals else ()
        return Arrive(plan, share, proposals, n in case.extends)

    def _differs(self, state: State) -> bool:
        """Whether the plans of an operation have the summands: all but the last of several."""
        return state.sequence <= max(1, len(self.scenario.program) - 1)

    def _begin(self, world: World, n: int) -> World:
        rank = world.ranks[n]
        item, *left = rank.program
        rank = rank._replace(program=tuple(left), running=item, polls=self.scenario.polls)
        if item == "join":  # a new job on the same store
            state = State(n, rank.state.members, host=rank.state.host, mark="a process" * (n == 0))
            return self._step(self._with(world, n, rank._replace(state=state)), n, Join())
        if item == "recover":
            event = Recover("fault", "{}", RECOVERY, rank.replaces)
            rank = rank._replace(epoch=rank.state.epoch)
            return self._step(self._with(world, n, rank), n, event)
        return self._with(
            world, n, rank._replace(state=rank.state.open(item, self.scenario.optional))
        )

    def _ended(self, world: World, n: int, how: str) -> World:
        rank = world.ranks[n]
        program, tries = rank.program, rank.tries
        if how not in ("passed", "joined"):
            if rank.running == "recover":
                program, tries = ("recover", *program), tries - 1
            elif self.scenario.again and how in ("timeout", "disagree", "failed"):
                pass
            elif "recover" in program:
                program = program[program.index("recover") :]
            else:
                program = ()
            # A rank whose step was interrupted takes part in no recovery, and the others know it.
            interrupted = how in ("cancelled", "failed") or rank.failing
            gone = self.scenario.cancels and interrupted and not self.scenario.again
            if gone or not tries:
                program = ()
        replaces = rank.replaces and not (rank.running == "recover" and how == "passed")
        log = (*(one for one in rank.log if one != "behind"), how)
        rank = rank._replace(
            running="",
            command=None,
            failing=False,
            program=program,
            tries=tries,
            log=log[-2:],
            replaces=replaces,
            life=rank.life if program or rank.life == "dead" else "over",
        )
        return self._with(world, n, rank)

    # -- one step, and what must hold -------------------------------------------------------------

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
        # Numbers of commands are only ever compared for being equal.
        state = after._replace(asked=1)
        return self._with(world, n, world.ranks[n]._replace(state=state, command=command))

    def _check(
        self, world: World, n: int, before: State, after: State, command: Command | None
    ) -> World:
        if isinstance(command, Swap) and command.key.endswith("/roll"):
            self._check_names(world, before, Decision.from_json(command.value))
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
                    raise Violation(f"rank {n} goes on from {before.phases} to {after.phases}")
                if before.phases[0] == "enter" and before.epoch == 0:
                    self._check_agreement(world, n, before, after)
                rank = world.ranks[n]
                if not rank.failing and before.arriving != self._arrival(n, before, rank):
                    raise Violation(f"rank {n} passes {barrier} with {before.arriving}")
                if arrived != {*before.members}:
                    raise Violation(f"rank {n} passes {barrier}, where {arrived} have arrived")
        elif after.decision.kind and after.decision.kind != before.decision.kind:
            kind = after.decision.kind
        if not kind:
            return world
        for name, other in world.decided:
            if name == barrier and other != kind:
                raise Violation(f"{barrier} is {other}, and {kind} on rank {n}")
        return world._replace(decided=world.decided | {(barrier, kind)})

    def _check_agreement(self, world: World, n: int, before: State, after: State) -> None:
        """What the ranks have agreed on at a barrier that one of them passes."""
        case, barrier = self.scenario, before.key().removesuffix("/")
        if sum(case.shares) and self._differs(before):
            raise Violation(f"rank {n} passes {barrier}, where the plans differ")
        proposals = [one for ranks in case.proposals for one in ranks]
        for one in proposals:
            same = [other for other in proposals if other.subject == one.subject]
            texts = {other.text for other in same if not other.yields} or {o.text for o in same}
            found = dict(world.store).get(before.key("proposal", one.subject))
            if found not in texts:
                raise Violation(f"rank {n} finds the proposal {found}, and not of {texts}")
        if after.passed.proposed != bool(proposals):
            raise Violation(f"rank {n} looks for proposals: {after.passed}")

    def _check_command(
        self, world: World, n: int, before: State, after: State, command: Command | None
    ) -> None:
        """A rank asks nothing in vain, and a long wait is one that others can see."""
        store, replaces = dict(world.store), world.ranks[n].replaces
        if isinstance(command, Spread) and not before.leads:
            raise Violation(f"rank {n} sends a decision, and leads nobody")
        asks = before.at is protocol._paused and isinstance(command, Read) and before.follows
        if asks and f"message/{n}/{before.key()}" in store:
            raise Violation(f"rank {n} asks the store for what its leader has sent")
        if before.phases and after.phases == before.phases and isinstance(after.event, Close):
            self._check_end_of(world, n, before, after)
        self._check_need(world.ranks[n], n, after, command)
        if before.phases and not replaces:
            mark = before.key("here", n)
            if isinstance(command, Set) and command.key == mark in store:
                raise Violation(f"rank {n} marks its wait twice: {mark}")
            if after.at is protocol._paused and after.arrived and mark not in store:
                raise Violation(f"rank {n} waits, and no mark says it: {mark}")

    def _check_need(self, rank: Rank, n: int, after: State, command: Command | None) -> None:
        """A rank sends no request that it does not need, and omits none that it needs."""
        before, last = rank.state, rank.command
        if isinstance(command, Await) and command.brief == before.confirmed:
            raise Violation(f"rank {n} waits for the wrong time: {command}")
        if isinstance(command, Await) and after.leads and not after.complete:
            raise Violation(f"rank {n} blocks, and leads ranks that have not arrived: {command}")
        if isinstance(command, Read) and command.key == "reloadpg/instance" and before.confirmed:
            raise Violation(f"rank {n} looks for another job than the confirmed one")
        if isinstance(command, Swap) and "/0.0/" in command.key and not rank.replaces:
            raise Violation(f"rank {n} writes the decision of no barrier: {command}")
        says = isinstance(command, Swap) and command.key.endswith("/decision")
        told = Decision.from_json(command.value) if says else protocol.UNDECIDED
        noted = rank.running == "recover" and rank.log[-1:] == ("cancelled",) and not rank.failing
        if noted and told.kind == "cancelled" and told.rank == before.noted.rank:
            raise Violation(f"rank {n} ends a recovery for an interrupt that all have noted")
        if told.kind == "cancelled" and told.rank == n and not rank.failing:
            raise Violation(f"rank {n} takes part in a recovery, and ends it: {command}")
        if isinstance(command, Add) and "/instance/" in command.key and not command.amount:
            raise Violation(f"rank {n} counts no job: {command}")
        if isinstance(command, Set) and "/here/" in command.key and not before.arrived:
            raise Violation(f"rank {n} waits for no decision: {command}")
        watches = self.scenario.watches or rank.failing
        if told.kind == "failed" and not watches:
            raise Violation(f"rank {n} has not failed, and says so: {command}")
        if told.kind == "failed" and f"/{before.epoch}." not in command.key:
            raise Violation(f"rank {n} fails a recovery that it has not joined: {command}")
        if len({*after.owned}) < len(after.owned):
            raise Violation(f"rank {n} deletes a key twice: {after.owned}")
        if isinstance(command, Meet) and command.connects != after.confirmed:
            raise Violation(f"rank {n} connects to a leader, and not all ranks have met: {command}")
        if isinstance(command, Pause) and after.at is protocol._paused:
            if command.restart != after.restart:
                raise Violation(f"rank {n} has seen progress, and keeps its deadline: {command}")
            joins = after.host and not after.confirmed and not after.epoch
            if bool(joins) != isinstance(last, Meet):
                raise Violation(f"rank {n} does not watch those that have joined: {last}")
            if command.sleeps and command.listens != (after.leads or after.follows):
                raise Violation(f"rank {n} sleeps, and would not read a message: {command}")
        if after.at is protocol._roll_read and not after.event.waits:
            raise Violation(f"rank {n} waits for responses, and was not to wait")
        if isinstance(command, Pause) and after.at is protocol._leave_paused:
            if not after.event.hosts:
                raise Violation(f"rank {n} does not host the store, and waits for the others")
            if isinstance(last, Absent) and before.restart and not command.restart:
                raise Violation(f"rank {n} hosts the store, and leaves the others no time")

    def _check_end_of(self, world: World, n: int, before: State, after: State) -> None:
        """How a rank leaves a barrier that was not passed."""
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
            raise Violation(f"rank {n} leaves with {decision}, and the result is {result}")
        gone = {*decision.missing, *decision.silent, *decision.dead}
        gone |= {decision.rank} if decision.kind == "cancelled" else set()
        read = {rank for rank in before.members if before.key("reader", rank) in store}
        waits_for = {*before.members} - gone - read
        asked = before.at is protocol._readers_found
        if asked and after.at is protocol._leave_paused and not waits_for:
            raise Violation(f"rank {n} hosts the store, and waits for nobody")
        if asked and ends and waits_for:
            raise Violation(f"rank {n} hosts the store, and leaves before {waits_for}")

    def _check_result(self, world: World, state: State, decision: Decision) -> None:
        """What is written of how an operation ended: who has not responded, and why."""
        store = dict(world.store)
        lacks = {
            name: {m for m in state.members if state.key(name, m) not in store} - {*decision.dead}
            for name in ("answer", "arrived")
        }
        if decision.kind == "disagree":
            if decision.text == "" or (not lacks["answer"] and "generation" not in decision.text):
                raise Violation(f"it does not say what differs: {decision}")
            return
        named = decision.missing if decision.kind == "timeout" else decision.silent
        if {*named} & {*decision.dead}:
            raise Violation(f"a rank that has ended is named twice: {decision}")
        if not lacks["answer"] <= {*named}:
            raise Violation(f"{lacks['answer']} have not responded: {decision}")
        states = {m: world.ranks[m].state for m in state.members}
        at = state.epoch, state.sequence, state.phases
        here = {m for m, one in states.items() if (one.epoch, one.sequence, one.phases) == at}
        arrived = {m for m in here if states[m].arrived}
        if decision.kind == "timeout" and here - arrived - {*named} != here & {*decision.stuck}:
            raise Violation(f"{arrived} have arrived: {decision}")
        if decision.stuck and decision.doing != f"work {decision.stuck[0]}":
            raise Violation(f"it does not say what a rank does: {decision}")

    def _check_delete(self, world: World, n: int, key: str) -> None:
        if key in world.deleted and "/proposal/" not in key:
            raise Violation(f"rank {n} deletes what was deleted: {key}")
        passed = (key.rpartition("/")[0], "passed ok") in world.decided
        if (
            (passed or key.endswith(("/answers", "/roll")))
            and key not in world.deleted
            and key not in dict(world.store)
        ):
            raise Violation(f"rank {n} deletes what there never was: {key}")

    def _check_names(self, world: World, state: State, decision: Decision) -> None:
        for named in (*decision.missing, *decision.silent):
            rank = world.ranks[named]
            # What a process that was replaced has done is not what its successor has.
            counted = (state.key().removesuffix("/"), named) in world.arrived
            here = counted and rank.state.arrived
            same = (rank.state.epoch, rank.state.sequence) == (state.epoch, state.sequence)
            if rank.life == "runs" and here and same and rank.running and not rank.failing:
                raise Violation(f"rank {named} is named, and could answer: {decision}")

    def check_end(self, world: World) -> None:
        for n, rank in enumerate(world.ranks):
            if rank.life in ("runs", "stalled"):
                raise Violation(f"rank {n} waits for ever at {rank.state.at}: {rank.state}")
            if self.scenario.meets and rank.life != "dead" and rank.log[-1:] != ("passed",):
                raise Violation(f"rank {n} has not met the others again: {rank.log}")
        case = self.scenario
        if case.faults:
            return
        store, jobs = dict(world.store), {rank.state.instance for rank in world.ranks}
        if len(jobs) > 1:
            raise Violation(f"the ranks are in the jobs {jobs}")
        marks = [n for n in range(case.size) if f"reloadpg/{max(jobs)}/process/{n}" in store]
        if case.joins and marks != [0]:
            raise Violation(f"not rank 0, but {marks} have left marks in job {jobs}")
        if (
            case.polls
            and not case.joins
            and int(store["reloadpg/1/progress"]) != case.size * len(case.program)
        ):
            raise Violation(f"not all progress was counted: {store}")
        if "join" not in case.program:
            left = [key for key, _ in world.store if not _stays(key, world)]
            if left:
                raise Violation(f"left in the store: {left}")

    def _with(self, world: World, n: int, rank: Rank) -> World:
        return world._replace(ranks=(*world.ranks[:n], rank, *world.ranks[n + 1 :]))


def _path(known: dict[World, World | None], world: World) -> str:
    """What each rank was at in the worlds that led to one."""
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


def _has_joined(rank: Rank) -> bool:
    """Whether a rank that recovers has begun the epoch of the recovery."""
    return rank.state.epoch > rank.epoch


def _stays(key: str, world: World) -> bool:
    """Whether a key belongs to the job, or to its last two barriers."""
    owned = {name for rank in world.ranks for name in (*rank.state.owned, *rank.state.spent)}
    return (
        key in owned
        or "instance" in key
        or "progress" in key
        or "/process/" in key
        or key.endswith("/recovery")
        or key.startswith("message/")
    )


def _frozen(store: dict[str, str]) -> Store:
    return frozenset(store.items())


def _performed(store: dict[str, str], command: Command) -> tuple[Any, bool]:
    """The reply of the store, which is changed, and whether it is."""
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
