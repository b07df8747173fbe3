"""The agreement protocol as a state machine: states, events, transitions, commands to the store.

Pure: no I/O, no clock, no thread. :func:`step` takes the state of one rank and an event. It returns
the next state and the command that the rank sends to the store, or None if the rank waits for an
event from its caller. :class:`~.round.Rendezvous` performs the commands on a store;
``tests/helpers/explorer.py`` performs them on a dictionary, in every order.

A rank has at most one outstanding command. ``State.at`` is the function that handles its reply, and
``State.command_number`` its number. A reply to an earlier, abandoned command changes nothing.

The name says what a function handles: ``_on_fail`` the event ``Fail``; a participle, such as
``_counted``, the reply to a command, such as that of ``_count``. After a read of a key it ends in
``_read``, after a search for ranks without a key in ``_found``. An imperative names other functions
that return a step, and a gerund those that only change the state.

The table has the functions that handle replies, in the order in which an event passes them; those
in brackets may be skipped. ``sent`` handles the replies to commands whose values do not matter.

=========  =====================================================================================
event      actions of the rank, and the replies that it handles
=========  =====================================================================================
Join       counts the jobs on the store; the highest count of any rank is the job's instance:
           job_counted, instance_read, (sent)
Arrive     arrives at the next barrier and waits for its decision: (sent, published,) counted; the
           last rank decides: (notes_read,) decided; the others wait: woken, decision_read; a long
           wait polls: (sent,) decision_read, progress_read, number_read, (request_read or
           newer_read,) paused; at the timeout: decided. After the first barrier of an epoch: met
Poll       reads the decision before it has arrived, as in a long wait
Decide     writes a decision other than ``ok``, because its own work reached the timeout, another
           rank's process has ended, or this process cannot take part: decided
Close      ends the operation after such a decision: responds (sent, answered), waits until all
           ranks have responded (roll_read, roll_paused), or finds out which have not (absent_found,
           stuck_found, doing_read, plans_read) and writes the result (roll_written), and leaves
           (sent, readers_found, leave_paused)
Fail       writes ``failed`` at the first undecided barrier: decided; an interrupt of a step is also
           written where recoveries read it: sent, decided, pending_read, (pending_request_read);
           one that joins a recovery, or has passed the last barrier, is only written there: sent,
           pending_read
Next       moves to the operation that the other ranks have begun: next_read, epoch_read,
           next_paused
Recover    reads whether a rank was interrupted in a step (note_read), and joins no recovery if that
           is news to this one (sent). Requests a recovery, or joins the requested one:
           recovery_read, requested_read, (end_read or) entered_read; writes a report (sent), reads
           again whether a rank was interrupted (cancelled_read), withdraws that if it was this one
           (sent), and begins a new epoch. If a recovery has ended without this rank, the rank joins
           it only if another rank failed in it, and fails as well. Otherwise it requests the next
           recovery. With ``aligns``, a rank that may have lost count of the operations requests an
           epoch for an operation, or joins the requested one
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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from .decision import Decision
from .plan import Plan, Proposal, differences, reconciled

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
    """Sleep, and reply whether time is left before the deadline. No request to the store."""

    restart: bool  # whether to restart the timeout first
    sleeps: bool = True  # whether to sleep at all


class Publish(NamedTuple):
    """Append this process to the list of a host."""

    key: str


class Meet(NamedTuple):
    """Read the list of a host and watch its processes; the reply is its ranks, in order."""

    key: str


OnHost = Publish | Meet
"""The commands that concern the processes of this host."""

Command = Add | Read | ReadAll | Set | Swap | Await | Absent | Delete | Pause | OnHost


# -- events -------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """The store's reply to the command of this number."""

    number: int
    value: Any


class Join(NamedTuple):
    """Begin a job."""


class Arrive(NamedTuple):
    """Arrive at the next barrier."""

    plan: str = ""  # the plan on which all ranks must agree here, as JSON; empty if there is none
    share: int = 0  # this rank's summand of the plans; the sum over all ranks is zero if they agree
    proposals: tuple[Proposal, ...] = ()
    extends: bool = False  # whether this rank requests the optional barriers


class Poll(NamedTuple):
    """Read the decision before arrival. ``news`` is this rank's progress since the last poll."""

    news: int


class Decide(NamedTuple):
    """Write a decision: ``timeout`` of a working rank, ``failed`` for an ended process, or
    ``disagree`` with its text.
    """

    decision: Decision


class Close(NamedTuple):
    """End the operation after a decision other than ``ok``."""

    doing: str  # this rank's current work, if it has not arrived
    waits: bool  # whether to wait for the responses of the other ranks
    hosts: bool  # whether this process hosts the store, and leaves last


class Fail(NamedTuple):
    """This rank has failed, or was interrupted."""

    decision: Decision  # of the kind ``failed`` or ``cancelled``


class Next(NamedTuple):
    """Move to the next operation, if the other ranks have begun it."""

    phases: tuple[str, ...]
    optional: tuple[str, ...] = ()


class Recover(NamedTuple):
    """Request a recovery, or join the requested one."""

    reason: str  # the reason, for ranks that wait elsewhere
    report: str  # this rank's report to the others
    phases: tuple[str, ...]  # the barriers of the recovery
    replaces: bool  # whether this process replaces one that may have been counted in the epoch
    aligns: bool = False  # whether the epoch is that of an operation, and not of a recovery
    insists: bool = False  # whether it is not given up for a recovery in which ranks wait
    optional: tuple[str, ...] = ()  # the optional barriers of that operation


class Lost(NamedTuple):
    """The store did not respond, or has ended."""


Event = Reply | Join | Arrive | Poll | Decide | Close | Fail | Next | Recover | Lost


# -- states -------------------------------------------------------------------------------------


Then = Callable[["State"], "Step"]
Handler = Callable[["State", Any], "Step"]


class State(NamedTuple):
    """The state of one rank."""

    rank: int
    members: tuple[int, ...]
    instance: int = 0  # number of this job among those on the store; 0 before it has joined
    confirmed: bool = False  # whether all ranks have met in this instance
    epoch: int = 0  # number of the last recovery that this rank took part in
    sequence: int = 0  # number of the operation in its epoch
    phases: tuple[str, ...] = ()  # the remaining barriers
    optional: tuple[str, ...] = ()  # barriers omitted unless a rank requests them at the next one
    host: str = ""  # identifier of this rank's host; empty to watch no process
    published: bool = False  # whether this process is in the list of its host for this epoch
    watches: bool = False  # whether it watches the processes of that complete list
    at: Handler | None = None  # handles the reply to the outstanding command, if there is one
    command_number: int = 0  # the number of that command
    lost: bool = False  # whether the store has failed this operation
    strayed: bool = False  # whether it may count the operations differently from other ranks
    arrived: bool = False  # whether this rank may have been counted at the next barrier
    waits_long: bool = False  # whether it has marked its wait there as long
    answered: bool = False  # whether its response there may have been counted
    decision: Decision = UNDECIDED  # that of the next barrier, if it was read and is not ``ok``
    passed: Decision = UNDECIDED  # that of the last barrier that was passed in this epoch
    ended: bool = False  # whether the operation has ended early and is closed
    noted: Decision = UNDECIDED  # the last decision that ended an operation of this epoch
    arriving: Arrive = Arrive()  # the event with which it arrived
    event: Any = None  # of the kinds Close, Fail, Next and Recover: the last one of this operation
    text: str = ""  # the decision that it writes or acts on, as stored
    joins: bool = False  # whether it requests or joins a recovery, and has not begun its epoch
    joining: int = 0  # number of that recovery
    progress: int = 0  # the progress of all ranks that it has seen
    news: int = 0  # this rank's unreported progress
    restart: bool = False  # whether to restart the timeout
    mark: str = ""  # identifier of this process; empty to leave no mark
    missing: tuple[int, ...] = ()  # the ranks that have not responded, or not read the result
    todo: tuple[Command, ...] = ()  # commands to send before it continues
    then: Then | None = None  # continues after them
    spent: tuple[str, ...] = ()  # keys to delete after the next barrier
    owned: tuple[str, ...] = ()  # keys that it has created since the last barrier

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def host_key(self) -> str:
        """The key of the list of this host."""
        return self.key_of(self.epoch, 0, "host", self.host)

    @property
    def is_waiting(self) -> bool:
        """Whether this rank was counted, and its command waits for the decision."""
        return self.at in (_woken, _decision_read)

    @property
    def cancelled_key(self) -> str:
        """The key that says which rank was interrupted in this epoch."""
        return f"{base(self.instance)}/cancelled/{self.epoch}"

    def open(self, phases: tuple[str, ...], optional: tuple[str, ...] = ()) -> State:
        """Begin the next operation of this epoch."""
        sequence = self.sequence + 1
        return self._fresh(phases)._replace(sequence=sequence, optional=optional, event=None)

    def _fresh(self, phases: tuple[str, ...]) -> State:
        return self._replace(
            phases=phases,
            optional=(),
            at=None,
            lost=False,
            arrived=False,
            waits_long=False,
            answered=False,
            decision=UNDECIDED,
            ended=False,
            joins=False,
        )

    def owning(self, key: str) -> State:
        """Record a key that this rank creates outside the protocol, to be deleted like others."""
        return self._replace(owned=_union(self.owned, (key,)))

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
        if event.number != state.command_number or state.at is None:
            return state, None  # a late reply to an abandoned command
        return state.at(state, event.value)
    return EVENTS[type(event)](state, event)


def _ask(state: State, at: Handler, command: Command) -> Step:
    return state._replace(at=at, command_number=state.command_number + 1), command


def _idle(state: State) -> Step:
    return state._replace(at=None), None


def _send(state: State, commands: tuple[Command, ...], then: Then) -> Step:
    """Send commands, then continue. This rank owns the keys that they write."""
    if not commands:
        return then(state)
    written = tuple(c.key for c in commands if isinstance(c, Set) and not c.stays)
    state = state._replace(owned=_union(state.owned, written), todo=commands, then=then)
    return _ask(state, _sent, commands[0])


def _sent(state: State, value: Any) -> Step:
    command, *left = state.todo
    state = state._replace(todo=tuple(left))
    if isinstance(command, Swap) and value == command.value:
        state = _owning(state, command.key, value)
    return _ask(state, _sent, left[0]) if left else (state.then or _idle)(state)


def _owning(state: State, key: str, text: str) -> State:
    """Record a key that this rank has created, and the keys that belong to it."""
    keys = [key]
    stem, _, name = key.rpartition("/")
    if name == "decision":
        decision = Decision.from_json(text)
        keys.append(f"{stem}/count")
        if not decision.ok or decision.proposed or decision.extended:
            keys.append(f"{stem}/notes")
        if decision.kind not in ("ok", "recover"):
            keys += [f"{stem}/{more}" for more in ("answers", "roll")]
    new = tuple(own for own in keys if own not in state.spent)
    return state._replace(owned=_union(state.owned, new))


def _union(keys: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return keys + tuple(key for key in more if key not in keys)


# -- the job ------------------------------------------------------------------------------------


def _on_join(state: State, _: Join) -> Step:
    return _ask(state, _job_counted, Add(f"reloadpg/instance/{state.rank}", 1))


def _job_counted(state: State, count: int) -> Step:
    return _ask(state._replace(instance=count), _instance_read, Read("reloadpg/instance"))


def _instance_read(state: State, text: str | None) -> Step:
    highest, mine = int(text or 0), state.instance
    if highest < mine:
        return _ask(state, _instance_read, Swap("reloadpg/instance", text or "", str(mine)))
    state, todo = _moving(state, highest)
    return _send(state, todo, _idle)


def _moving(state: State, instance: int) -> tuple[State, tuple[Command, ...]]:
    """Move to a job that another rank has counted, and leave this rank's mark there."""
    behind = instance - state.instance
    todo: tuple[Command, ...] = ()
    if behind:  # the counter of this rank's jobs, from which its next job continues
        todo += (Add(f"reloadpg/instance/{state.rank}", behind),)
    if state.mark:
        todo += (Set(f"{base(instance)}/process/{state.rank}", state.mark, stays=True),)
    state = state._replace(instance=instance, published=bool(state.host), waits_long=False)
    if state.host:
        todo += (Publish(state.host_key),)
    return state, todo


# -- arrival ------------------------------------------------------------------------------------


def _on_arrive(state: State, event: Arrive) -> Step:
    commands: list[Command] = []
    for subject, text, yields in event.proposals:
        key = state.key("proposal", subject)
        commands.append(Swap(key, "", text) if yields else Set(key, text))
    notes = bool(event.proposals) + event.extends * EXTENDS
    if notes:
        commands.append(Add(state.key("notes"), notes))
    return _send(state._replace(arriving=event), tuple(commands), _count)


def _count(state: State) -> Step:
    if state.host and not state.published:
        return _ask(state, _published, Publish(state.host_key))
    state = state._replace(arrived=True)
    amount = 1 + (state.arriving.share << state.size.bit_length())
    return _ask(state, _counted, Add(state.key("count"), amount))


def _published(state: State, _: None) -> Step:
    return _count(state._replace(published=True))


def _counted(state: State, total: int) -> Step:
    bits = state.size.bit_length()
    if total & ((1 << bits) - 1) != state.size:
        return _ask(state, _woken, Await(state.key("decision"), not state.confirmed))
    if not state.arriving.plan:
        return _decide(state, Decision("ok"))
    # Above the count is the sum of all shares, which is zero exactly if all plans agree.
    if total >> bits != 0:
        return _decide(state, Decision("disagree"))
    return _ask(state, _notes_read, Read(state.key("notes")))


def _notes_read(state: State, text: str | None) -> Step:
    notes = int(text or 0)
    return _decide(state, Decision("ok", proposed=notes % EXTENDS > 0, extended=notes >= EXTENDS))


def _decide(state: State, decision: Decision) -> Step:
    return _swap(state._replace(text=decision.to_json()))


def _swap(state: State) -> Step:
    return _ask(state, _decided, Swap(state.key("decision"), "", state.text))


def _decided(state: State, text: str) -> Step:
    if text == state.text:
        state = _owning(state, state.key("decision"), text)
    return _act(state, text)


def _act(state: State, text: str) -> Step:
    """Act on the stored decision."""
    state, decision = state._replace(text=text), Decision.from_json(text)
    if decision.ok:
        deletes = tuple(Delete(key) for key in state.spent)
        return _send(_passing(state, decision), deletes, _meet)
    ended = decision.kind == "recover"  # the rank that requests it answers nothing here
    state = state._replace(decision=decision, noted=replace(decision, by=-1), ended=ended)
    return _see_pending(state) if isinstance(state.event, Fail) else _idle(state)


def _meet(state: State) -> Step:
    """Watch the ranks of this host, from the first barrier of an epoch on: all are in its list."""
    if state.watches or not state.host:
        return _continue(state)
    return _ask(state, _met, Meet(state.host_key))


def _met(state: State, local: tuple[int, ...]) -> Step:
    if state.rank in local[:1]:  # one of them deletes the list
        state = state.owning(state.host_key)
    return _continue(state._replace(watches=True))


def _continue(state: State) -> Step:
    """Continue after a barrier that all ranks have passed."""
    if not isinstance(state.event, Fail):
        return _idle(state)
    # All ranks have passed the barrier at which this one failed.
    return _decide(state, state.event.decision) if state.phases else _see_pending(state)


def _passing(state: State, decision: Decision) -> State:
    spent = state.owned
    state = state._fresh(_left_after(state, decision))
    return state._replace(passed=decision, confirmed=True, spent=spent, owned=(), strayed=False)


def _left_after(state: State, decision: Decision) -> tuple[str, ...]:
    left = state.phases[1:]
    return left if decision.extended else tuple(p for p in left if p not in state.optional)


def _woken(state: State, _: None) -> Step:
    return _read(state)


def _read(state: State) -> Step:
    return _ask(state, _decision_read, Read(state.key("decision")))


def _on_poll(state: State, event: Poll) -> Step:
    return _read(state._replace(news=event.news))


def _decision_read(state: State, text: str | None) -> Step:
    if text is not None:
        return _act(state, text)
    if state.arrived and not state.waits_long:
        mark = Set(state.key("here", state.rank), "1")
        return _send(state._replace(waits_long=True), (mark,), _read_progress)
    return _read_progress(state)


def _read_progress(state: State) -> Step:
    command = Add(f"{base(state.instance)}/progress", state.news)
    return _ask(state._replace(news=0), _progress_read, command)


def _progress_read(state: State, total: int) -> Step:
    state = state._replace(restart=total != state.progress, progress=total)
    return _ask(state, _number_read, Read(state.of_recovery()))


def _number_read(state: State, text: str | None) -> Step:
    number = int(text or 0)
    if number > state.epoch:
        return _ask(state, _request_read, Read(state.of_recovery(number, "request")))
    if not state.confirmed and state.arrived:
        return _ask(state, _newer_read, Read("reloadpg/instance"))
    return _pause(state)


def _request_read(state: State, text: str | None) -> Step:
    if text is None:
        return _pause(state)
    return _decide(state, replace(Decision.from_json(text), by=state.rank))


def _newer_read(state: State, text: str | None) -> Step:
    """Arrive in the job that other ranks have begun, unless this instance is confirmed."""
    instance = int(text or 0)
    if instance <= state.instance:
        return _pause(state)
    left = (state.key("count"), state.key("notes"), state.host_key)
    state, todo = _moving(state, instance)
    return _send(state, (*todo, *(Delete(key) for key in left)), _arrive_again)


def _arrive_again(state: State) -> Step:
    return _on_arrive(state, state.arriving)


def _pause(state: State) -> Step:
    """Pause, and before the first barrier of a job watch the ranks that have joined it.

    A rank that has ended since then is dead. Later ones are watched once all have met, and in a
    recovery a process that has ended may be replaced.
    """
    joining = state.host and not state.confirmed and not state.epoch
    return _send(state, (Meet(state.host_key),) if joining else (), _sleep)


def _sleep(state: State) -> Step:
    return _ask(state, _paused, Pause(state.restart, sleeps=state.arrived))


def _paused(state: State, is_left: bool) -> Step:
    if not state.arrived:
        return _idle(state)
    if not is_left:
        return _decide(state, Decision("timeout", state.rank))
    return _read(state)


def _on_decide(state: State, event: Decide) -> Step:
    if not state.phases:  # all ranks had arrived at the last barrier, whose decision was read
        return _idle(state)
    return _decide(state, event.decision)


# -- the end of an operation --------------------------------------------------------------------


def _on_close(state: State, event: Close) -> Step:
    decision = state.decision
    text = state.arriving.plan if decision.kind == "disagree" else event.doing
    answer: tuple[Command, ...] = (Set(state.key("answer", state.rank), text),)
    if state.arrived:
        answer = (Set(state.key("arrived", state.rank), "1"), *answer)
    state = state._replace(event=event, restart=True)
    if decision.kind == "cancelled" or (decision.kind == "disagree" and decision.text):
        return _leave(state)  # the rank is known; it will not respond, or is not one of the job's
    return _send(state, answer, _count_answer)


def _count_answer(state: State) -> Step:
    amount = int(not state.answered)  # an interrupted rank may come here a second time
    return _ask(state._replace(answered=True), _answered, Add(state.key("answers"), amount))


def _answered(state: State, count: int) -> Step:
    if count >= state.size - len(state.decision.dead):  # the last that can respond
        return _collect(state)
    return _read_roll(state) if state.event.waits else _leave(state)


def _read_roll(state: State) -> Step:
    return _ask(state, _roll_read, Read(state.key("roll")))


def _roll_read(state: State, text: str | None) -> Step:
    if text is not None:
        return _roll_written(state, text)
    return _ask(state, _roll_paused, Pause(restart=False))


def _roll_paused(state: State, is_left: bool) -> Step:
    return _read_roll(state) if is_left else _collect(state)


def _collect(state: State) -> Step:
    return _ask(state, _absent_found, Absent(state.key("answer"), state.members))


def _absent_found(state: State, missing: tuple[int, ...]) -> Step:
    missing = tuple(rank for rank in missing if rank not in state.decision.dead)
    state = state._replace(missing=missing)
    present = tuple(rank for rank in state.members if rank not in missing)
    if state.decision.kind == "timeout":
        return _ask(state, _stuck_found, Absent(state.key("arrived"), present))
    if state.decision.kind == "disagree":
        return _ask(state, _plans_read, ReadAll(state.key("answer"), present))
    return _write_roll(state, replace(state.decision, silent=missing))


def _stuck_found(state: State, stuck: tuple[int, ...]) -> Step:
    decision = replace(state.decision, missing=state.missing, stuck=stuck)
    if not stuck:
        return _write_roll(state, decision)
    return _ask(state._replace(decision=decision), _doing_read, Read(state.key("answer", stuck[0])))


def _doing_read(state: State, text: str | None) -> Step:
    return _write_roll(state, replace(state.decision, doing=text or ""))


def _plans_read(state: State, plans: tuple[str, ...]) -> Step:
    present = [rank for rank in state.members if rank not in state.missing]
    by_rank = {rank: Plan.from_json(text) for rank, text in zip(present, plans, strict=True)}
    text, generation = "a rank ended before it could report the difference", 0
    if not state.missing:
        text, generation = differences(by_rank), reconciled(by_rank)
    return _write_roll(state, replace(state.decision, text=text, generation=generation))


def _write_roll(state: State, decision: Decision) -> Step:
    return _ask(state, _roll_written, Swap(state.key("roll"), "", decision.to_json()))


def _roll_written(state: State, text: str) -> Step:
    """Act on the result of the roll call, as stored."""
    return _leave(state._replace(decision=Decision.from_json(text)))


def _leave(state: State) -> Step:
    """Write that this rank has read the result, and leave. The host of the store leaves last."""
    read = Set(state.key("reader", state.rank), "1")
    gone = _gone(state.decision)
    state = state._replace(missing=tuple(rank for rank in state.members if rank not in gone))
    return _send(state, (read,), _find_readers if state.event.hosts else _end)


def _gone(decision: Decision) -> set[int]:
    """The ranks for which no rank waits before it leaves."""
    cancelled = {decision.rank} if decision.kind == "cancelled" else set()
    return {*decision.missing, *decision.silent, *decision.dead} | cancelled


def _find_readers(state: State) -> Step:
    return _ask(state, _readers_found, Absent(state.key("reader"), state.missing))


def _readers_found(state: State, missing: tuple[int, ...]) -> Step:
    if not missing:
        return _end(state)
    # This process often ends after raising. The store must not end before all have read it.
    restart = state.restart
    return _ask(state._replace(missing=missing, restart=False), _leave_paused, Pause(restart))


def _leave_paused(state: State, is_left: bool) -> Step:
    return _find_readers(state) if is_left else _end(state)


def _end(state: State) -> Step:
    return _idle(state._replace(ended=True))


# -- failures of this rank ----------------------------------------------------------------------


def _on_fail(state: State, event: Fail) -> Step:
    state = state._replace(event=event, text=event.decision.to_json())
    notes: tuple[Command, ...] = ()
    if event.decision.kind == "cancelled":
        # The other ranks may have left for a recovery and never reach this barrier.
        notes = (Swap(state.cancelled_key, "", state.text),)
    return _send(state, notes, _swap if state.phases and not state.joins else _see_pending)


def _see_pending(state: State) -> Step:
    if state.event.decision.kind != "cancelled":
        return _idle(state)
    return _ask(state, _pending_read, Read(state.of_recovery()))


def _pending_read(state: State, text: str | None) -> Step:
    number = int(text or 0)
    if number <= state.epoch:
        return _idle(state)
    state = state._replace(joining=number)
    if state.decision.kind == "cancelled" and state.decision.rank == state.rank and not state.joins:
        return _ask(state, _pending_request_read, Read(state.of_recovery(number, "request")))
    return _cancel(state)


def _pending_request_read(state: State, text: str | None) -> Step:
    """Cancel the pending recovery, unless the ranks in it know of the interrupt.

    They do if one that had read it at the barrier made the request: the others read it after that.
    Without a request none has looked for an interrupt yet.
    """
    knows = text is None or Decision.from_json(text).interrupted == state.rank
    return _idle(state) if knows else _cancel(state)


def _cancel(state: State) -> Step:
    text = state.event.decision.to_json()
    return _send(state, (_cancellation(state, state.joining, text),), _idle)


def _cancellation(state: State, number: int, text: str) -> Command:
    return Swap(state.key_of(number, 0, ENTER, "decision"), "", text)


def _on_next(state: State, event: Next) -> Step:
    key = state.key_of(state.epoch, state.sequence + 1, event.phases[0], "count")
    return _ask(state._replace(event=event), _next_read, Read(key))


def _next_read(state: State, text: str | None) -> Step:
    if text is None:
        return _ask(state, _epoch_read, Read(state.of_recovery()))
    return _idle(state.open(*state.event))


def _epoch_read(state: State, text: str | None) -> Step:
    if int(text or 0) > state.epoch:  # the other ranks have begun it in another epoch
        return _idle(state._replace(strayed=True))
    return _ask(state, _next_paused, Pause(restart=False))


def _next_paused(state: State, is_left: bool) -> Step:
    return _on_next(state, state.event) if is_left else _idle(state)


# -- recovery -----------------------------------------------------------------------------------


def _on_recover(state: State, event: Recover) -> Step:
    state = state._replace(event=event, joins=True, strayed=True)
    if event.aligns:
        return _ask(state, _recovery_read, Read(state.of_recovery()))
    return _ask(state, _note_read, Read(state.cancelled_key))


def _note_read(state: State, text: str | None) -> Step:
    """Look for news of an interrupt before this rank makes its request, and again after it."""
    if (news := _news(state, text)) is not None:
        return _join_none(state, news)
    return _ask(state, _recovery_read, Read(state.of_recovery()))


def _news(state: State, text: str | None) -> Decision | None:
    """The interrupt of another rank in a step, if this rank has not known."""
    if text is None:
        return None
    noted = Decision.from_json(text)
    decision = replace(noted, kind="cancelled")
    known = decision.rank == state.rank or decision == state.noted
    # A new process was in no step: it need not know if the interrupted rank takes part.
    return None if known or (noted.kind == "withdrawn" and state.event.replaces) else decision


def _join_none(state: State, news: Decision) -> Step:
    """Join no recovery because of an interrupt that is news to this rank.

    The other ranks that recover after it have left the loop in which this rank may still be. The
    host of the store may wait for this rank at the operation that the interrupt has ended.
    """
    state = state._replace(joins=False, noted=news)
    read = Set(state.key_of(state.epoch, state.sequence + 1, ENTER, "reader", state.rank), "1")
    return _send(state, (read,), _idle)


def _recovery_read(state: State, text: str | None) -> Step:
    number = int(text or 0)
    if number <= state.epoch:
        return _bump(state, text or "")
    request = Read(state.of_recovery(number, "request"))
    return _ask(state._replace(joining=number), _requested_read, request)


def _requested_read(state: State, text: str | None) -> Step:
    """Join the epoch if it is of the same kind, otherwise request another one.

    A recovery in which ranks wait comes before an operation, except on a rank that has lost count:
    it may have requested the recovery itself, and the ranks that wait in it request it again.
    """
    key = state.key_of(state.joining, 0, ENTER, "decision")
    if text is None or Decision.from_json(text).aligns == state.event.aligns:
        return _ask(state, _entered_read, Read(key))
    if state.event.aligns and not state.event.insists:
        return _ask(state, _end_read, Read(key))
    return _bump(state, str(state.joining))


def _end_read(state: State, text: str | None) -> Step:
    if text is not None:
        return _bump(state, str(state.joining))
    return _idle(state._replace(joins=False, strayed=False))


def _entered_read(state: State, text: str | None) -> Step:
    if text is not None:  # that recovery has begun or ended without this rank
        # The rank that failed there may not join another one, so this rank joins its end.
        decision = replace(Decision.from_json(text), by=-1)
        failed = decision.kind in ("failed", "cancelled") and decision != state.noted
        if not failed or state.event.replaces or state.event.aligns:
            return _bump(state, str(state.joining))
    number, event = state.joining, state.event
    interrupted = state.noted.rank if state.noted.kind == "cancelled" else -1
    request = Decision(
        "recover", state.rank, event.reason, aligns=event.aligns, interrupted=interrupted
    ).to_json()
    # The other ranks wait at the first barrier of the operation that this rank would begin next.
    ends = [state.key_of(state.epoch, state.sequence + 1, ENTER, "decision")]
    if event.aligns:
        ends = [state.key("decision")]
    elif event.replaces:  # its predecessor was counted in a recovery that can no longer complete
        ends = [state.key_of(state.epoch, 0, phase, "decision") for phase in event.phases]
    todo: tuple[Command, ...] = (
        Set(state.of_recovery(number, state.rank), event.report),
        Swap(state.of_recovery(number, "request"), "", request),
        *(Swap(key, "", request) for key in ends),
    )
    return _send(state, todo, _begin_epoch if event.aligns else _read_cancelled)


def _read_cancelled(state: State) -> Step:
    return _ask(state, _cancelled_read, Read(state.cancelled_key))


def _bump(state: State, last: str) -> Step:
    """Request the recovery after the last one, as stored, unless another rank does so first."""
    number = int(last or 0) + 1
    return _ask(state, _recovery_read, Swap(state.of_recovery(), last, str(number)))


def _cancelled_read(state: State, text: str | None) -> Step:
    if (news := _news(state, text)) is not None:
        return _join_none(state, news)
    noted = UNDECIDED if text is None else Decision.from_json(text)
    if noted.kind == "cancelled" and noted.rank == state.rank:  # it takes part after all
        withdrawn = replace(noted, kind="withdrawn").to_json()
        return _send(state, (Swap(state.cancelled_key, text or "", withdrawn),), _begin_epoch)
    return _begin_epoch(state)


def _begin_epoch(state: State) -> Step:
    event = state.event
    state = state._fresh(event.phases)._replace(optional=event.optional)
    state = state._replace(epoch=state.joining, sequence=0, published=False, watches=False)
    return _idle(state._replace(passed=UNDECIDED, noted=UNDECIDED))


def _on_lost(state: State, _: Lost) -> Step:
    return _idle(state._replace(lost=True, strayed=state.strayed or bool(state.phases)))


EVENTS: dict[type[Any], Callable[[State, Any], Step]] = {
    Join: _on_join,
    Arrive: _on_arrive,
    Poll: _on_poll,
    Decide: _on_decide,
    Close: _on_close,
    Fail: _on_fail,
    Next: _on_next,
    Recover: _on_recover,
    Lost: _on_lost,
}
