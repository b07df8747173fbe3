"""The agreement protocol as a state machine: states, events, transitions, commands to the store.

Pure: no I/O, no clock, no thread. :func:`step` takes the state of one rank and an event. It returns
the next state and the command that the rank sends to the store, or None if the rank waits for an
event from its caller. :class:`~.round.Rendezvous` performs the commands on a store;
``tests/helpers/explorer.py`` performs them on a dictionary, in every order.

A rank has at most one outstanding command, which ``State.at`` names. Each command has a number. A
reply to an earlier, abandoned command changes nothing.

=========  =====================================================================================
event      actions of the rank (with its commands, in order)
=========  =====================================================================================
Join       counts the jobs on the store; the highest count of any rank is the job's instance:
           COUNT_JOB, INSTANCE, (SEND)
Arrive     arrives at the next barrier and waits for its decision: (SEND, PUBLISH,) COUNT; the last
           rank decides: (NOTES,) DECIDE; the others wait: BLOCK, READ; a long wait polls:
           (SEND,) READ, PROGRESS, REQUESTED, (REQUEST or NEWER,) PAUSE; at the timeout: DECIDE.
           After the first barrier of an epoch: MEET. From then on, ranks of one host arrive
           together, see below: HAND, HEAR, or GATHER, COUNT, BLOCK, READ, SEND
Poll       reads the decision before it has arrived: READ, PROGRESS, REQUESTED, (REQUEST,) PAUSE
Decide     writes a decision other than ``ok``, because its own work reached the timeout or another
           rank's process has ended: DECIDE
Close      ends the operation after such a decision: responds (SEND, ANSWER), waits until all ranks
           have responded (ROLL, PAUSE), or finds out which have not (ABSENT, STUCK, DOING, PLANS)
           and writes the result (ROLLED), and leaves (LEAVE, PAUSE)
Fail       writes ``failed`` at the first undecided barrier: TELL; an interrupt of a step is also
           written where recoveries read it: SEND, TELL, PENDING
Cancel     writes that it was interrupted while it joined a recovery: SEND, PENDING
Next       moves to the operation that the other ranks have begun: NEXT, NEXT_PAUSE
Recover    requests a recovery, or joins the requested one: NUMBER, ENTERED, BUMP; writes a report
           (SEND), reads whether a rank was interrupted (CANCELLED), and begins a new epoch. If a
           recovery has ended without this rank, the rank joins it only if another rank failed in
           it, and fails as well. Otherwise it requests the next recovery
Lost       the store did not respond: the result of the last command is unknown
=========  =====================================================================================

Invariants:

* A decision is written once, by a compare-and-set. All ranks act on the value in the store.
* A rank passes a barrier only on the decision that all ranks have arrived.
* Key names are never reused: they contain the instance, epoch, operation and phase.
* The rank whose decision was accepted deletes the barrier's keys, and each rank the other keys that
  it has created, after the next barrier: by then all ranks have left this one.
* A recovery begins a new epoch. A request is written before the old epoch is read, and an interrupt
  is written before the number of recoveries is read, so at least one of them sees the other.

The ranks of one host arrive together. The lowest of them leads: the others hand it their summands
(HAND) and wait for its message (HEAR); it takes what it was handed (GATHER), adds that to the count
in one request (COUNT), and sends on each decision that it learns (SEND). So a barrier costs the
store three requests per host. This needs no agreement on who leads whom:

* Each arrival is added to the count exactly once. A rank counts itself exactly if it could not hand
  its arrival to the leader, and the leader takes each arrival once, before it adds it.
* Decisions exist on the store only. A message from the leader is a copy of one. A rank that gets no
  message polls the store, like every rank in a long wait, so it depends on the leader only for
  being counted.
* The leader may end, or be interrupted, between GATHER and COUNT. The barrier is then never
  complete, as without the other ranks of its host, and ends with ``failed`` or at the timeout. The
  ranks that are missing are those that do not respond to that decision, whoever was counted.
* A leader that waits for arrivals polls the store. It blocks there only once all ranks of its host
  have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any, NamedTuple

from .decision import Decision
from .plan import Plan, Proposal, differences

__all__ = [
    "REPLIES",
    "Absent",
    "Add",
    "Arrive",
    "At",
    "Await",
    "Cancel",
    "Close",
    "Command",
    "Decide",
    "Delete",
    "Event",
    "Fail",
    "Gather",
    "Hand",
    "Hear",
    "Join",
    "Lost",
    "Meet",
    "Next",
    "OnHost",
    "Pause",
    "Poll",
    "Publish",
    "Read",
    "ReadAll",
    "Recover",
    "Reply",
    "Set",
    "Spread",
    "State",
    "Swap",
    "base",
    "step",
]

UNDECIDED = Decision("")

ENTER = "enter"
"""The first barrier of every recovery."""

EXTENDS = 1 << 20
"""Added to the notes by a rank that requests the optional barriers; each proposer adds 1."""


# -- commands to the store ----------------------------------------------------------------------


class Add(NamedTuple):
    """Add to a counter; the reply is its value."""

    key: str
    amount: int


class Read(NamedTuple):
    """The value of a key as text; None if there is no such key."""

    key: str


class ReadAll(NamedTuple):
    """The values of ``stem/rank`` for some ranks, as a tuple."""

    stem: str
    ranks: tuple[int, ...]


class Set(NamedTuple):
    """Write a key. ``stays``: the key is kept until the job has ended."""

    key: str
    value: str
    stays: bool = False


class Swap(NamedTuple):
    """Write a key if it holds ``expected`` (empty: if it is absent); the reply is its value."""

    key: str
    expected: str
    value: str


class Await(NamedTuple):
    """Wait for a key, with a timeout. ``brief``: of half a second."""

    key: str
    brief: bool


class Absent(NamedTuple):
    """Those of the given ranks that have no key ``stem/rank``, as a tuple."""

    stem: str
    ranks: tuple[int, ...]


class Delete(NamedTuple):
    """Delete a key."""

    key: str


class Pause(NamedTuple):
    """Sleep, and reply whether time is left before the deadline. No request to the store.

    Attributes:
        restart: whether to restart the timeout first.
        sleeps: whether to sleep at all.
        listens: whether a message of a rank on this host ends the sleep.
    """

    restart: bool
    sleeps: bool = True
    listens: bool = False


class Publish(NamedTuple):
    """Append this process to the list of a host."""

    key: str


class Meet(NamedTuple):
    """Read the list of a host and connect to its leader; the reply is its ranks, in order."""

    key: str


class Hand(NamedTuple):
    """Hand an arrival to the leader; the reply is whether that was possible."""

    key: str
    amount: int


class Gather(NamedTuple):
    """Take the arrivals that were handed to this rank, and were not taken before.

    The reply is their sum, and whether all ranks of the host have arrived. ``waits``: for them,
    briefly.
    """

    key: str
    waits: bool


class Spread(NamedTuple):
    """Send a decision to the other ranks of this host."""

    key: str
    value: str


class Hear(NamedTuple):
    """The decision that the leader has sent, or None. ``waits``: for it, briefly."""

    key: str
    waits: bool


OnHost = Publish | Meet | Hand | Gather | Spread | Hear
"""The commands that concern the ranks of this host."""

Command = Add | Read | ReadAll | Set | Swap | Await | Absent | Delete | Pause | OnHost


# -- events -------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """The store's reply to the command of this number."""

    number: int
    value: Any


class Join(NamedTuple):
    """Begin a job. ``mark`` identifies this process; empty to leave no mark."""

    mark: str


class Arrive(NamedTuple):
    """Arrive at the next barrier.

    Attributes:
        plan: the plan on which all ranks must agree here, as JSON; empty if there is none.
        share: this rank's summand of the plans; the sum over all ranks is zero if they agree.
        proposals: this rank's proposals.
        extends: whether this rank requests the optional barriers.
    """

    plan: str = ""
    share: int = 0
    proposals: tuple[Proposal, ...] = ()
    extends: bool = False


class Poll(NamedTuple):
    """Read the decision before arrival. ``news`` is this rank's progress since the last poll."""

    news: int


class Decide(NamedTuple):
    """Write a decision: ``timeout`` of a working rank, or ``failed`` for an ended process."""

    decision: Decision


class Close(NamedTuple):
    """End the operation after a decision other than ``ok``.

    Attributes:
        doing: this rank's current work, if it has not arrived.
        waits: whether to wait for the responses of the other ranks.
        hosts: whether this process hosts the store. If so, it leaves last.
    """

    doing: str
    waits: bool
    hosts: bool


class Fail(NamedTuple):
    """This rank has failed. ``decision`` is of the kind ``failed`` or ``cancelled``."""

    decision: Decision


class Cancel(NamedTuple):
    """This rank was interrupted while it joined a recovery. ``decision`` is ``cancelled``."""

    decision: Decision


class Next(NamedTuple):
    """Move to the next operation, if the other ranks have begun it."""

    phases: tuple[str, ...]
    optional: tuple[str, ...] = ()


class Recover(NamedTuple):
    """Request a recovery, or join the requested one.

    Attributes:
        reason: the reason, for ranks that wait elsewhere.
        report: this rank's report to the others.
        phases: the barriers of the recovery.
        replaces: whether this process replaces one that may have been counted in the epoch.
    """

    reason: str
    report: str
    phases: tuple[str, ...]
    replaces: bool


class Lost(NamedTuple):
    """The store did not respond, or has ended."""


Event = Reply | Join | Arrive | Poll | Decide | Close | Fail | Cancel | Next | Recover | Lost


# -- states -------------------------------------------------------------------------------------


class At(Enum):
    """The outstanding command. Events of the caller are allowed only when idle."""

    IDLE = auto()
    UNKNOWN = auto()
    SEND = auto()
    COUNT_JOB = auto()
    INSTANCE = auto()
    PUBLISH = auto()
    MEET = auto()
    HAND = auto()
    GATHER = auto()
    HEAR = auto()
    COUNT = auto()
    NOTES = auto()
    DECIDE = auto()
    BLOCK = auto()
    READ = auto()
    PROGRESS = auto()
    REQUESTED = auto()
    REQUEST = auto()
    NEWER = auto()
    PAUSE = auto()
    ANSWER = auto()
    ROLL = auto()
    ROLL_PAUSE = auto()
    ABSENT = auto()
    STUCK = auto()
    DOING = auto()
    PLANS = auto()
    ROLLED = auto()
    LEAVE = auto()
    LEAVE_PAUSE = auto()
    TELL = auto()
    PENDING = auto()
    NEXT = auto()
    NEXT_PAUSE = auto()
    NUMBER = auto()
    ENTERED = auto()
    BUMP = auto()
    CANCELLED = auto()


Then = Callable[["State"], "Step"]


class State(NamedTuple):
    """The state of one rank.

    Attributes:
        rank: this rank.
        members: all ranks.
        instance: number of this job among those on the store; 0 before it has joined.
        confirmed: whether all ranks have met in this instance.
        epoch: number of the last recovery that this rank took part in.
        sequence: number of the operation in its epoch.
        phases: the remaining barriers.
        optional: barriers that are omitted unless a rank requests them at the next one.
        host: identifier of this rank's host; empty to arrive alone at every barrier.
        published: whether this process is in the list of its host for this epoch.
        local: the ranks of the host, once known in this epoch.
        at: the outstanding command.
        asked: its number.
        arrived: whether this rank may have been counted at the next barrier.
        counted: whether it has begun to add to the count there.
        complete: whether all ranks of its host have arrived there, of which it is the leader.
        waits_long: whether it has marked its wait there as long.
        answered: whether its response there may have been counted.
        left: whether its departure from there may have been counted.
        decision: the decision of the next barrier, if it was read and is not ``ok``.
        passed: the decision of the last barrier that was passed.
        ended: whether the operation has ended early and is closed.
        noted: the last decision that ended an operation, as it was written.
        arriving: the event with which it arrived.
        closing: the event with which it closes the operation.
        failing: the event with which it failed.
        recovering: the event with which it recovers.
        following: the operation that it moves to.
        wanted: the text of the decision that it writes.
        known: the text of the decision that it acts on.
        progress: the progress of all ranks that it has seen.
        news: this rank's unreported progress.
        restart: whether to restart the timeout.
        mark: identifier of this process; empty to leave no mark.
        missing: the ranks that have not responded.
        todo: commands to send before it continues.
        then: the continuation.
        spent: keys to delete after the next barrier.
        owned: keys that it has created since the last barrier.
    """

    rank: int
    members: tuple[int, ...]
    instance: int = 0
    confirmed: bool = False
    epoch: int = 0
    sequence: int = 0
    phases: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    host: str = ""
    published: bool = False
    local: tuple[int, ...] = ()
    at: At = At.IDLE
    asked: int = 0
    arrived: bool = False
    counted: bool = False
    complete: bool = False
    waits_long: bool = False
    answered: bool = False
    left: bool = False
    decision: Decision = UNDECIDED
    passed: Decision = UNDECIDED
    ended: bool = False
    noted: str = ""
    arriving: Arrive = Arrive()
    closing: Close = Close("", waits=False, hosts=False)
    failing: Decision = UNDECIDED
    recovering: Recover = Recover("", "", (), replaces=False)
    following: Next = Next(())
    wanted: str = ""
    known: str = ""
    progress: int = 0
    news: int = 0
    restart: bool = False
    mark: str = ""
    missing: tuple[int, ...] = ()
    todo: tuple[Command, ...] = ()
    then: Then | None = None
    spent: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def leads(self) -> bool:
        """Whether other ranks of this host may hand this one their arrivals.

        They may know the list of the host before this rank does, so an unknown list counts.
        """
        return self.published and self.local != (self.rank,) and not self.follows

    @property
    def follows(self) -> bool:
        """Whether this rank hands its arrivals to another one."""
        return self.rank in self.local[1:]

    @property
    def host_key(self) -> str:
        """The key of the list of this host."""
        return self.key_of(self.epoch, 0, "host", self.host)

    def open(self, phases: tuple[str, ...], optional: tuple[str, ...] = ()) -> State:
        """Begin the next operation of this epoch."""
        return self._fresh(phases)._replace(sequence=self.sequence + 1, optional=optional)

    def _fresh(self, phases: tuple[str, ...]) -> State:
        return self._replace(
            phases=phases,
            optional=(),
            at=At.IDLE,
            asked=self.asked + 1,
            arrived=False,
            counted=False,
            complete=False,
            waits_long=False,
            answered=False,
            left=False,
            decision=UNDECIDED,
            passed=UNDECIDED,
            ended=False,
            failing=UNDECIDED,
            todo=(),
        )

    def owning(self, key: str) -> State:
        """Record a key that this rank creates outside the protocol, to be deleted like others."""
        return self._replace(owned=_merged(self.owned, (key,)))

    def key(self, *parts: object) -> str:
        """A key of the next barrier."""
        return self.key_of(self.epoch, self.sequence, self.phases[0], *parts)

    def key_of(self, epoch: int, sequence: int, *parts: object) -> str:
        """A key of any barrier of this instance."""
        names = "/".join(str(part) for part in parts)
        return f"{base(self.instance)}/{epoch}.{sequence}/{names}"

    def of_recovery(self, *parts: object) -> str:
        """A key of recoveries."""
        return "/".join(map(str, (base(self.instance), "recovery", *parts)))

    @property
    def supposed_end(self) -> str | None:
        """The phase at which the operation ends for a rank that has lost the store.

        The rank cannot know the decision of a barrier at which it was counted. It assumes that the
        others have passed it.
        """
        counted = self.arrived and not self.decision.kind
        left = _left_after(self, Decision("ok")) if counted else self.phases
        return (left or self.phases or (None,))[0]


Step = tuple[State, Command | None]


def base(instance: int) -> str:
    """The prefix of the keys of a job."""
    return f"reloadpg/{instance}"


def step(state: State, event: Event) -> Step:
    """Return the next state, and the command to send, if any. Pure."""
    if isinstance(event, Reply):
        if event.number != state.asked or state.at not in REPLIES:
            return state, None  # a late reply to an abandoned command
        return REPLIES[state.at](state, event.value)
    return EVENTS[type(event)](state, event)


def _ask(state: State, at: At, command: Command) -> Step:
    return state._replace(at=at, asked=state.asked + 1), command


def _idle(state: State) -> Step:
    return state._replace(at=At.IDLE, asked=state.asked + 1, todo=()), None


def _send(state: State, commands: tuple[Command, ...], then: Then) -> Step:
    """Send commands, then continue. This rank owns the keys that they write."""
    if not commands:
        return then(state)
    made = tuple(one.key for one in commands if isinstance(one, Set) and not one.stays)
    state = state._replace(owned=_merged(state.owned, made), todo=commands, then=then)
    return _ask(state, At.SEND, commands[0])


def _sent(state: State, value: Any) -> Step:
    command, *left = state.todo
    if isinstance(command, Swap) and not command.expected and value == command.value:
        state = _own(state, command.key, value)
    if left:
        return _ask(state._replace(todo=tuple(left)), At.SEND, left[0])
    return (state.then or _idle)(state._replace(todo=()))


def _own(state: State, key: str, text: str) -> State:
    """Record a key that this rank has created, and the keys that belong to it."""
    keys = [key]
    stem, _, name = key.rpartition("/")
    if name == "decision":
        decision = Decision.from_json(text)
        keys.append(f"{stem}/count")
        if not decision.ok or decision.proposed or decision.extended:
            keys.append(f"{stem}/notes")
        if decision.kind not in ("ok", "recover"):
            keys += [f"{stem}/{more}" for more in ("answers", "roll", "readers")]
    return state._replace(owned=_merged(state.owned, tuple(keys)))


def _merged(keys: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return keys + tuple(key for key in more if key not in keys)


# -- the job ------------------------------------------------------------------------------------


def _join(state: State, event: Join) -> Step:
    state = state._replace(mark=event.mark)
    return _ask(state, At.COUNT_JOB, Add(f"reloadpg/instance/{state.rank}", 1))


def _job_counted(state: State, count: int) -> Step:
    return _ask(state._replace(instance=count), At.INSTANCE, Read("reloadpg/instance"))


def _instance_read(state: State, text: str | None) -> Step:
    highest, mine = int(text or 0), state.instance
    if highest < mine:
        return _ask(state, At.INSTANCE, Swap("reloadpg/instance", text or "", str(mine)))
    state, todo = _moved(state, highest)
    return _send(state, todo, _idle)


def _moved(state: State, instance: int) -> tuple[State, tuple[Command, ...]]:
    """Move to a job that another rank has counted, and leave this rank's mark there."""
    behind = instance - state.instance
    todo: tuple[Command, ...] = ()
    if behind:
        todo += (Add(f"reloadpg/instance/{state.rank}", behind),)
    if state.mark:
        todo += (Set(f"{base(instance)}/process/{state.rank}", state.mark, stays=True),)
    return state._replace(instance=instance, published=False), todo


# -- arrival ------------------------------------------------------------------------------------


def _arrive(state: State, event: Arrive) -> Step:
    commands: list[Command] = []
    for one in event.proposals:
        key = state.key("proposal", one.subject)
        commands.append(Swap(key, "", one.text) if one.yields else Set(key, one.text))
    notes = bool(event.proposals) + event.extends * EXTENDS
    if notes:
        commands.append(Add(state.key("notes"), notes))
    return _send(state._replace(arriving=event, waits_long=False), tuple(commands), _count)


def _count(state: State) -> Step:
    if state.host and not state.published:
        return _ask(state, At.PUBLISH, Publish(state.host_key))
    state = state._replace(arrived=True)
    if state.leads:
        return _ask(state, At.GATHER, Gather(state.key(), waits=bool(state.local)))
    if state.follows:
        return _ask(state, At.HAND, Hand(state.key(), _summand(state)))
    return _add(state, _summand(state))


def _published(state: State, _: None) -> Step:
    return _count(state._replace(published=True))


def _summand(state: State) -> int:
    return 1 + (state.arriving.share << state.size.bit_length())


def _add(state: State, amount: int) -> Step:
    return _ask(state._replace(counted=True), At.COUNT, Add(state.key("count"), amount))


def _handed(state: State, is_handed: bool) -> Step:
    if not is_handed:
        return _add(state, _summand(state))
    return _ask(state, At.HEAR, Hear(state.key(), waits=True))


def _heard(state: State, text: str | None) -> Step:
    return _read(state) if text is None else _known(state, text)


def _gathered(state: State, found: tuple[int, bool]) -> Step:
    amount, complete = found
    if not state.counted:
        amount += _summand(state)
    state = state._replace(complete=complete)
    return _add(state, amount) if amount else _read(state)


def _counted(state: State, total: int) -> Step:
    bits = state.size.bit_length()
    if total & ((1 << bits) - 1) != state.size:
        if state.leads and not state.complete:
            return _read(state)
        return _ask(state, At.BLOCK, Await(state.key("decision"), not state.confirmed))
    if not state.arriving.plan:
        return _decide(state, Decision("ok"))
    if total >> bits != 0:
        return _decide(state, Decision("disagree"))
    return _ask(state, At.NOTES, Read(state.key("notes")))


def _notes_read(state: State, text: str | None) -> Step:
    notes = int(text or 0)
    return _decide(state, Decision("ok", proposed=notes % EXTENDS > 0, extended=notes >= EXTENDS))


def _decide(state: State, decision: Decision) -> Step:
    text = decision.to_json()
    return _ask(state._replace(wanted=text), At.DECIDE, Swap(state.key("decision"), "", text))


def _decided(state: State, text: str) -> Step:
    if text == state.wanted:
        state = _own(state, state.key("decision"), text)
    return _known(state, text)


def _known(state: State, text: str) -> Step:
    """Act on the stored decision of the next barrier."""
    return _relay(state, text, _act)


def _relay(state: State, text: str, then: Then) -> Step:
    """Send the decision of the next barrier to the ranks that this one leads, then continue."""
    spread = (Spread(state.key(), text),) if state.leads else ()
    return _send(state._replace(known=text), spread, then)


def _act(state: State) -> Step:
    text, state = state.known, state._replace(known="")
    decision = Decision.from_json(text)
    if decision.ok:
        return _pass(state, decision)
    ended = decision.kind == "recover"  # the rank that requests it answers nothing here
    return _idle(state._replace(decision=decision, noted=text, ended=ended))


def _pass(state: State, decision: Decision) -> Step:
    deletes = tuple(Delete(key) for key in state.spent)
    return _send(_passed(state, decision), deletes, _meet)


def _meet(state: State) -> Step:
    """Find the ranks of this host, once per epoch: each was published before it was counted."""
    if state.local or not state.host:
        return _idle(state)
    return _ask(state, At.MEET, Meet(state.host_key))


def _met(state: State, local: tuple[int, ...]) -> Step:
    if state.rank == min(local, default=-1):
        state = state.owning(state.host_key)
    return _idle(state._replace(local=local if state.rank in local else (state.rank,)))


def _passed(state: State, decision: Decision) -> State:
    return state._replace(
        phases=_left_after(state, decision),
        optional=(),
        arrived=False,
        counted=False,
        complete=False,
        waits_long=False,
        answered=False,
        left=False,
        decision=UNDECIDED,
        passed=decision,
        confirmed=True,
        spent=state.owned,
        owned=(),
    )


def _left_after(state: State, decision: Decision) -> tuple[str, ...]:
    left = state.phases[1:]
    return left if decision.extended else tuple(p for p in left if p not in state.optional)


def _woken(state: State, _: None) -> Step:
    return _read(state)


def _read(state: State) -> Step:
    return _ask(state, At.READ, Read(state.key("decision")))


def _poll(state: State, event: Poll) -> Step:
    return _read(state._replace(news=event.news))


def _decision_read(state: State, text: str | None) -> Step:
    if text is not None:
        return _known(state, text)
    if state.arrived and not state.waits_long:
        mark = Set(state.key("here", state.rank), "1")
        return _send(state._replace(waits_long=True), (mark,), _read_progress)
    return _read_progress(state)


def _read_progress(state: State) -> Step:
    command = Add(f"{base(state.instance)}/progress", state.news)
    return _ask(state._replace(news=0), At.PROGRESS, command)


def _progress_read(state: State, total: int) -> Step:
    state = state._replace(restart=total != state.progress, progress=total)
    return _ask(state, At.REQUESTED, Read(state.of_recovery()))


def _number_read(state: State, text: str | None) -> Step:
    number = int(text or 0)
    if number > state.epoch:
        return _ask(state, At.REQUEST, Read(state.of_recovery(number, "request")))
    if not state.confirmed and state.arrived:
        return _ask(state, At.NEWER, Read("reloadpg/instance"))
    return _pause(state)


def _request_read(state: State, text: str | None) -> Step:
    if text is None:
        return _pause(state)
    return _decide(state, replace(Decision.from_json(text), by=state.rank))


def _newer_read(state: State, text: str | None) -> Step:
    """Move to the job that other ranks have begun, unless this instance is confirmed."""
    instance = int(text or 0)
    if instance <= state.instance:
        return _pause(state)
    deletes = [Delete(state.key("count"))]
    if state.host:
        deletes.append(Delete(state.host_key))
    state, todo = _moved(state, instance)
    return _send(state, (*todo, *deletes), _count)


def _pause(state: State) -> Step:
    listens = state.arrived and (state.leads or state.follows)
    return _ask(state, At.PAUSE, Pause(state.restart, sleeps=state.arrived, listens=listens))


def _paused(state: State, is_left: bool) -> Step:
    if not state.arrived:
        return _idle(state)
    if not is_left:
        return _decide(state, Decision("timeout", state.rank))
    if state.leads:
        return _ask(state, At.GATHER, Gather(state.key(), waits=False))
    if state.follows:
        return _ask(state, At.HEAR, Hear(state.key(), waits=False))
    return _read(state)


def _write(state: State, event: Decide) -> Step:
    return _decide(state, event.decision)


# -- the end of an operation --------------------------------------------------------------------


def _close(state: State, event: Close) -> Step:
    decision = state.decision
    if not decision.kind or state.ended:
        return _idle(state)
    text = state.arriving.plan if decision.kind == "disagree" else event.doing
    answer: tuple[Command, ...] = (Set(state.key("answer", state.rank), text),)
    if state.arrived:
        answer = (Set(state.key("arrived", state.rank), "1"), *answer)
    state = state._replace(closing=event, restart=True)
    if decision.kind == "cancelled":  # the rank is known and will not respond
        return _leave(state)
    return _send(state, answer, _count_answer)


def _count_answer(state: State) -> Step:
    amount = int(not state.answered)
    return _ask(state._replace(answered=True), At.ANSWER, Add(state.key("answers"), amount))


def _answered(state: State, count: int) -> Step:
    if count >= state.size - len(state.decision.dead):
        return _collect(state)
    return _read_roll(state) if state.closing.waits else _leave(state)


def _read_roll(state: State) -> Step:
    return _ask(state, At.ROLL, Read(state.key("roll")))


def _roll_read(state: State, text: str | None) -> Step:
    if text is not None:
        return _called(state, text)
    return _ask(state, At.ROLL_PAUSE, Pause(restart=False))


def _roll_paused(state: State, is_left: bool) -> Step:
    return _read_roll(state) if is_left else _collect(state)


def _collect(state: State) -> Step:
    return _ask(state, At.ABSENT, Absent(state.key("answer"), state.members))


def _absent_read(state: State, missing: tuple[int, ...]) -> Step:
    missing = tuple(rank for rank in missing if rank not in state.decision.dead)
    state = state._replace(missing=missing)
    present = tuple(rank for rank in state.members if rank not in missing)
    if state.decision.kind == "timeout":
        return _ask(state, At.STUCK, Absent(state.key("arrived"), present))
    if state.decision.kind == "disagree":
        return _ask(state, At.PLANS, ReadAll(state.key("answer"), present))
    return _write_roll(state, replace(state.decision, silent=missing))


def _stuck_read(state: State, stuck: tuple[int, ...]) -> Step:
    decision = replace(state.decision, missing=state.missing, stuck=stuck)
    if not stuck:
        return _write_roll(state, decision)
    return _ask(state._replace(decision=decision), At.DOING, Read(state.key("answer", stuck[0])))


def _doing_read(state: State, text: str | None) -> Step:
    return _write_roll(state, replace(state.decision, doing=text or ""))


def _plans_read(state: State, plans: tuple[str, ...]) -> Step:
    present = [rank for rank in state.members if rank not in state.missing]
    found = {rank: Plan.from_json(text) for rank, text in zip(present, plans, strict=True) if text}
    text = "a rank ended before it could report the difference"
    if not state.missing:
        text = differences(found)
    return _write_roll(state, replace(state.decision, text=text))


def _write_roll(state: State, decision: Decision) -> Step:
    return _ask(state, At.ROLLED, Swap(state.key("roll"), "", decision.to_json()))


def _called(state: State, text: str) -> Step:
    """Act on the result of the roll call, as stored."""
    return _leave(state._replace(decision=Decision.from_json(text)))


def _leave(state: State) -> Step:
    amount = int(not state.left)
    return _ask(state._replace(left=True), At.LEAVE, Add(state.key("readers"), amount))


def _left(state: State, count: int) -> Step:
    decision, closing = state.decision, state.closing
    gone = {*decision.missing, *decision.silent, *decision.dead}
    if decision.kind == "cancelled":
        gone.add(decision.rank)
    if count < state.size - len(gone) and closing.hosts:
        # This process often ends after raising. The store must not end before all have read it.
        restart = state.restart
        return _ask(state._replace(restart=False), At.LEAVE_PAUSE, Pause(restart))
    return _idle(state._replace(ended=True))


def _leave_paused(state: State, is_left: bool) -> Step:
    if is_left:
        return _ask(state, At.LEAVE, Add(state.key("readers"), 0))
    return _idle(state._replace(ended=True))


# -- failures of this rank ----------------------------------------------------------------------


def _fail(state: State, event: Fail) -> Step:
    state = state._replace(failing=event.decision, wanted=event.decision.to_json())
    if state.ended or state.decision.kind or not state.phases:
        return _idle(state)
    if event.decision.kind != "cancelled":
        return _tell(state)
    # The other ranks may have left for a recovery and never reach this barrier.
    return _send(state, (_note_cancelled(state),), _tell)


def _cancel_recovery(state: State, event: Cancel) -> Step:
    state = state._replace(failing=event.decision, wanted=event.decision.to_json())
    return _send(state, (_note_cancelled(state),), _see_pending)


def _note_cancelled(state: State) -> Command:
    return Swap(f"{base(state.instance)}/cancelled/{state.epoch}", "", state.wanted)


def _tell(state: State) -> Step:
    return _ask(state, At.TELL, Swap(state.key("decision"), "", state.wanted))


def _told(state: State, text: str) -> Step:
    if text == state.wanted:
        state = _own(state, state.key("decision"), text)
    return _relay(state, text, _see_told)


def _see_told(state: State) -> Step:
    text, state = state.known, state._replace(known="")
    decision = Decision.from_json(text)
    if not decision.ok:
        ended = decision.kind == "recover"
        return _see_pending(state._replace(decision=decision, noted=text, ended=ended))
    # All ranks have passed this barrier; this rank did not know.
    spent, owned = state.spent, state.owned
    state = _passed(state, decision)._replace(spent=spent, owned=owned)
    return _tell(state) if state.phases else _see_pending(state)


def _see_pending(state: State) -> Step:
    if state.failing.kind != "cancelled":
        return _idle(state)
    return _ask(state, At.PENDING, Read(state.of_recovery()))


def _pending_read(state: State, text: str | None) -> Step:
    number = int(text or 0)
    if number <= state.epoch:
        return _idle(state)
    return _send(state, (_cancel(state, number),), _idle)


def _cancel(state: State, number: int) -> Command:
    key = state.key_of(number, 0, ENTER, "decision")
    return Swap(key, "", state.wanted)


def _next(state: State, event: Next) -> Step:
    key = state.key_of(state.epoch, state.sequence + 1, event.phases[0], "count")
    return _ask(state._replace(following=event, wanted=key), At.NEXT, Read(key))


def _next_read(state: State, text: str | None) -> Step:
    if text is None:
        return _ask(state, At.NEXT_PAUSE, Pause(restart=False))
    return _idle(state.open(*state.following))


def _next_paused(state: State, is_left: bool) -> Step:
    return _ask(state, At.NEXT, Read(state.wanted)) if is_left else _idle(state)


# -- recovery -----------------------------------------------------------------------------------


def _recover(state: State, event: Recover) -> Step:
    state = state._replace(recovering=event)
    return _ask(state, At.NUMBER, Read(state.of_recovery()))


def _recovery_read(state: State, text: str | None) -> Step:
    number = int(text or 0)
    if number <= state.epoch:
        return _bump(state, text)
    key = state.key_of(number, 0, ENTER, "decision")
    return _ask(state._replace(wanted=str(number)), At.ENTERED, Read(key))


def _entered_read(state: State, text: str | None) -> Step:
    if text is not None:  # that recovery has begun or ended without this rank
        # The rank that failed there may not join another one, so this rank joins its end.
        failed = Decision.from_json(text).kind in ("failed", "cancelled")
        if not failed or state.recovering.replaces:
            return _bump(state, state.wanted)
    number, event = int(state.wanted), state.recovering
    request = Decision("recover", state.rank, event.reason, by=state.rank).to_json()
    # The other ranks wait at the first barrier of the operation that this rank would begin next.
    ends = [state.key_of(state.epoch, state.sequence + 1, ENTER, "decision")]
    if event.replaces:  # its predecessor was counted in a recovery that can no longer complete
        ends = [state.key_of(state.epoch, 0, phase, "decision") for phase in event.phases]
    todo: tuple[Command, ...] = (
        Set(state.of_recovery(number, state.rank), event.report),
        Swap(state.of_recovery(number, "request"), "", request),
        *(Swap(key, "", request) for key in ends),
    )
    return _send(state, todo, _read_cancelled)


def _read_cancelled(state: State) -> Step:
    key = f"{base(state.instance)}/cancelled/{state.epoch}"
    return _ask(state, At.CANCELLED, Read(key))


def _bump(state: State, text: str | None) -> Step:
    number = str(int(text or 0) + 1)
    return _ask(state, At.BUMP, Swap(state.of_recovery(), text or "", number))


def _cancelled_read(state: State, text: str | None) -> Step:
    if text is None or text == state.noted or Decision.from_json(text).rank == state.rank:
        return _begin_epoch(state)
    # A rank was interrupted in the epoch that ends, and will not take part.
    cancel = _cancel(state._replace(wanted=text), int(state.wanted))
    return _send(state, (cancel,), _begin_epoch)


def _begin_epoch(state: State) -> Step:
    state, number = state._fresh(state.recovering.phases), int(state.wanted)
    return _idle(state._replace(epoch=number, sequence=0, wanted="", published=False, local=()))


def _lost(state: State, _: Lost) -> Step:
    return state._replace(at=At.UNKNOWN, asked=state.asked + 1, todo=()), None


EVENTS: dict[type[Any], Callable[[State, Any], Step]] = {
    Join: _join,
    Arrive: _arrive,
    Poll: _poll,
    Decide: _write,
    Close: _close,
    Fail: _fail,
    Cancel: _cancel_recovery,
    Next: _next,
    Recover: _recover,
    Lost: _lost,
}

REPLIES: dict[At, Callable[[State, Any], Step]] = {
    At.SEND: _sent,
    At.COUNT_JOB: _job_counted,
    At.INSTANCE: _instance_read,
    At.PUBLISH: _published,
    At.MEET: _met,
    At.HAND: _handed,
    At.GATHER: _gathered,
    At.HEAR: _heard,
    At.COUNT: _counted,
    At.NOTES: _notes_read,
    At.DECIDE: _decided,
    At.BLOCK: _woken,
    At.READ: _decision_read,
    At.PROGRESS: _progress_read,
    At.REQUESTED: _number_read,
    At.REQUEST: _request_read,
    At.NEWER: _newer_read,
    At.PAUSE: _paused,
    At.ANSWER: _answered,
    At.ROLL: _roll_read,
    At.ROLL_PAUSE: _roll_paused,
    At.ABSENT: _absent_read,
    At.STUCK: _stuck_read,
    At.DOING: _doing_read,
    At.PLANS: _plans_read,
    At.ROLLED: _called,
    At.LEAVE: _left,
    At.LEAVE_PAUSE: _leave_paused,
    At.TELL: _told,
    At.PENDING: _pending_read,
    At.NEXT: _next_read,
    At.NEXT_PAUSE: _next_paused,
    At.NUMBER: _recovery_read,
    At.ENTERED: _entered_read,
    At.BUMP: _recovery_read,
    At.CANCELLED: _cancelled_read,
}
