"""A rank on the store of its job, and one operation there: barriers, and work between them.

A :class:`Rendezvous` lives as long as the job: it is the connection to the store, and performs the
commands of the generators of :mod:`.protocol` (:meth:`Rendezvous.drive`), each by a request. A
:class:`Round` lives as long as one operation, with its remaining barriers in order. It knows its
rendezvous, and not the other way round: how an operation waits is a function that it passes.

The timeout limits waiting, not work. A rank that has released or rebuilt a group increments a
counter on the store. Every rank restarts its timeout when it sees a change.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch.distributed import PrefixStore, Store

from ..c10d.stores import delete_keys
from ..errors import ReloadpgError
from ..processes import Peers
from ..settings import GRACE
from ..threads import CancelToken, Deadline, Interrupt, Interrupted, Task, wait_seconds
from . import protocol
from .decision import Decision
from .plan import Plan
from .protocol import OK, Ended, GaveUp, Rank, Steps
from .store_client import Root, StoreClient, append, read

T = TypeVar("T")

Wait: TypeAlias = Callable[[str, bool, Deadline], object]
"""Waits for a key, for a while; see :meth:`Rendezvous.drive`."""

PREFIX = "reloadpg"
"""Prefix of the keys of a job."""

_REQUESTS_S = 5.0
"""Seconds for the requests that count a job; minimum for notifications of a failure."""

_BRIEF_S = 0.5
"""Seconds to read whether a recovery was requested, and of the first wait for a key before all
ranks have met."""

_SILENT_S = 10.0
"""Seconds until an unresponsive store is asked again whether a recovery was requested."""

_READ_S = 0.2
"""Seconds within which a rank waiting at a barrier reads how it has ended, unless it polls."""

barrier_hooks: list[Callable[[str, str, str, int], object]] = []
"""For ``reloadpg.testing``: called at each barrier with a moment, the operation, the phase and this
rank. What a hook raises is raised there. The moments are ``before`` this rank arrives; ``waiting``,
counted there and about to wait for others; and ``after`` it has read the decision."""


class Rendezvous:
    """The rendezvous of the ranks of a job, or of a group, on a store.

    Args:
        root: returns the store; None for a rank without peers.
        rank: this rank.
        size: number of ranks.
        watches: whether to watch the processes on this host.
        client: the connection to the store; None for a separate one.
        prefix: prefix of its keys.

    Attributes:
        alone: whether this rank has no peers.
        client: the connection to the whole store.
        recovered: number of the last completed recovery; 0 before the first.
        peers: the ranks of this host.
        pause_s: seconds between two polls; it limits the requests of all ranks of a large job to
            some thousand per second.
    """

    def __init__(
        self,
        root: Root | None,
        rank: int,
        size: int,
        *,
        watches: bool = False,
        client: StoreClient | None = None,
        prefix: str = PREFIX,
    ) -> None:
        self.rank, self.size = rank, size
        self.alone = root is None
        self.recovered = 0
        self.peers = Peers(rank)
        host = self.peers.host if watches else ""
        self.pause_s = max(0.1, size / 2000)
        self.client = client or StoreClient(root, rank, self.peers)
        self._prefix = prefix
        self.state = Rank(rank, 1 if root is None else size, host, self.peers.entry)
        self._requested = 0  # number of the last recovery that was requested
        self._ask_again = 0.0
        self._progress = 0
        self._polls = ""  # the key that counts this rank as polling
        self._driven = 0.0
        if rank == 0 and not self.alone:
            _hosts.add(self)

    @property
    def grace_s(self) -> float:
        """Seconds within which ranks must respond after a failure."""
        return wait_seconds(GRACE) + 2 * self.pause_s

    # -- the job ----------------------------------------------------------------------------

    def count_job(self, seconds: float = _REQUESTS_S) -> None:
        """Count this job on its store. Blocking, for at most ``seconds``; idempotent.

        All ranks call this when the job begins: the first operation may be called by some ranks
        only, and later another job may use the store's port. It also starts the thread that sends
        the requests: if the process can start no other one later, it can still notify the other
        ranks. If it fails, the first operation does it.
        """
        if not self.state.job:
            with suppress(ReloadpgError):
                self.drive(self.state.count(), Deadline("count", seconds))

    def end(self, deadline: Deadline) -> None:
        """End the thread of the requests, and wait for it. Local, with a timeout."""
        self.linger()
        thread = self.client.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline.left)

    def linger(self) -> None:
        """Let the other ranks read how the last operation has ended, before the store ends.

        For rank 0, which usually hosts it. Local; waits until no rank polls, for a limited time.
        A rank that does not poll reads the end at once.
        """
        _hosts.discard(self)
        since = time.monotonic() - self._driven
        if self.rank or not self._driven or since > self.grace_s:
            return
        deadline, key = Deadline("the end of the job", self.grace_s), f"{self.state.job}/polls"
        with suppress(ReloadpgError):
            time.sleep(max(0.0, _READ_S - since))
            while int(self.ask(lambda store: read(store, key), deadline, repeats=True) or 0) > 0:
                if not deadline.left:
                    break
                time.sleep(_READ_S / 4)

    def begin_polling(self, deadline: Deadline) -> None:
        """Say that this rank polls at a barrier; rank 0 keeps the store until it has read the end.

        Idempotent.
        """
        if self.rank and not self._polls:
            self._polls = key = f"{self.state.job}/polls"
            self.ask(lambda store: store.add(key, 1), deadline)

    def stop_polling(self, deadline: Deadline) -> None:
        """Say that this rank polls no more: it has read how the barrier has ended."""
        key, self._polls = self._polls, ""
        if key:
            with suppress(ReloadpgError):
                self.ask(lambda store: store.add(key, -1), deadline)

    # -- operations -------------------------------------------------------------------------

    def round(
        self,
        operation: str,
        phases: Sequence[str],
        seconds: float,
        interrupt: Interrupt | None = None,
    ) -> Round:
        """The next operation, which this rank has not entered. Local.

        Args:
            operation: its name.
            phases: the barriers.
            seconds: the timeout: seconds without progress.
            interrupt: how its caller tells it to end.
        """
        return Round(self, operation, phases, seconds, interrupt or Interrupt())

    def open(self, operation: str, phases: Sequence[str], seconds: float) -> Round:
        """Enter the next operation; see :meth:`Round.enter`, and :meth:`round`."""
        with self.round(operation, phases, seconds) as round_:
            round_.enter()
        return round_

    def note_recovery(self, number: int) -> None:
        """Record a recovery that all ranks have completed. Local."""
        self.recovered = number

    def recovery_requested(self) -> bool:
        """Whether a recovery was requested that this rank has not joined. Local, with a timeout.

        Polls at most once per ``pause_s``, or per 10 s while the store does not respond; otherwise
        returns the cached answer.
        """
        if not self.alone and time.monotonic() >= self._ask_again:
            pause = _SILENT_S
            with suppress(ReloadpgError):
                now = self.drive(self.state.read(), Deadline("flag", _BRIEF_S))
                self._requested, pause = now.recovery, self.pause_s
            self._ask_again = time.monotonic() + pause
        return self.state.is_requested(self._requested)

    # -- the store --------------------------------------------------------------------------

    def ask(
        self,
        question: Callable[[Store], T],
        deadline: Deadline,
        stopped: Callable[[], object] = lambda: None,
        *,
        repeats: bool = False,
    ) -> T:
        """Send requests to this part of the store; see :meth:`StoreClient.ask`."""

        def within(root: Store) -> T:
            return question(PrefixStore(self._prefix, root))

        return self.client.ask(within, deadline, stopped, repeats=repeats)

    def drive(self, steps: Steps, deadline: Deadline, wait: Wait | None = None) -> Any:
        """Perform the commands of a generator, and return its result. Blocking, with a timeout.

        A late reply to an abandoned request reaches no generator.

        Args:
            steps: the generator.
            deadline: when to give up.
            wait: how an operation waits for a key, for a while; and whether it is another wait for
                the same key.

        Raises:
            ReloadpgError: the store is lost.
            RendezvousTimeoutError: the store does not respond.
            Ended, GaveUp, Interrupted: see :mod:`.protocol`.
        """
        awaited, of_operation = "", wait is not None
        wait = wait or self._wait
        try:
            command = next(steps)
            while True:
                try:
                    if isinstance(command, protocol.Await):
                        again, awaited, reply = command.key == awaited, command.key, None
                        if deadline.left == 0:
                            raise GaveUp(Decision("timeout", self.rank))
                        wait(command.key, again, deadline)
                    else:
                        repeats = not isinstance(command, protocol.Add)
                        reply = self.ask(partial(perform, command), deadline, repeats=repeats)
                except (GaveUp, Interrupted) as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(reply)
        except StopIteration as stop:
            return stop.value
        finally:
            if of_operation:
                self._driven = time.monotonic()
            steps.close()

    def _wait(self, key: str, again: bool, deadline: Deadline) -> None:
        """Wait for a key, for a while."""
        if not again:
            self.await_key(key, deadline)
        else:
            with deadline.pause(self.pause_s) as seconds:
                time.sleep(seconds)

    def await_key(
        self, key: str, deadline: Deadline, stopped: Callable[[], object] = lambda: None
    ) -> None:
        """Wait for a key: the first wait for it, by a request that returns when it exists.

        Torch writes two warnings to stderr for each such wait that times out, so there is only one
        for each key; a long wait continues by polling.
        """
        first = deadline.first_log_s if self.state.confirmed else _BRIEF_S
        first = min(first, deadline.left / 2)

        def wait(store: Store) -> None:
            # It can return without the key if several clients time out at once (torch 2.13), so
            # its result is ignored. The next request finds out if the store is lost.
            with suppress(RuntimeError), deadline.pause(first) as left:
                store.wait([key], timedelta(seconds=max(0.01, left)))

        self.ask(wait, deadline, stopped)

    def extend(self, deadline: Deadline, news: int = 0) -> bool:
        """Report the progress of this rank, and restart the timeout if any rank has progressed."""
        key = f"{self.state.job}/progress"
        total = self.ask(lambda store: store.add(key, news), deadline, repeats=True)
        moved, self._progress = total != self._progress, total
        if moved:
            deadline.extend()
        return moved

    def watch(self, deadline: Deadline) -> None:
        """Watch the processes of this host that have joined the job."""
        if self.state.host:
            listed = self.ask(lambda store: read(store, self.state.listed), deadline, repeats=True)
            self.peers.meet(listed or "")


_hosts: weakref.WeakSet[Rendezvous] = weakref.WeakSet()
"""Those of the ranks that usually host the store, until they have ended."""


@atexit.register
def _linger() -> None:
    for rendezvous in list(_hosts):
        rendezvous.linger()


os.register_at_fork(after_in_child=_hosts.clear)


def perform(command: protocol.Command, store: Store) -> Any:
    """Perform a command on the store, and return the reply."""
    match command:
        case protocol.Read(key):
            return read(store, key)
        case protocol.Swap(key, expected, value):
            return store.compare_set(key, expected, value).decode()
        case protocol.Add(key, amount):
            return store.add(key, amount)
        case protocol.Set(key, value):
            store.set(key, value)
        case protocol.Append(key, text):
            append(store, key, text)
        case protocol.Delete(keys):
            delete_keys(store, keys)
    return None


class Round:
    """One operation on this rank: its remaining barriers, in order.

    As a context manager it notifies the other ranks if its block raises.

    Attributes:
        operation: its name, for messages.
        seconds: the timeout of each wait.
        decision: the decision that ended the operation early; None before that.
        since: Unix time at which this rank arrived at the next barrier, or began its work before
            it.
        waiting: whether this rank waits at the next barrier for others.
        notified: set when the other ranks were notified of this rank's failure, or cannot be.
        interrupt: how the caller tells the operation to end.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        operation: str,
        phases: Sequence[str],
        seconds: float,
        interrupt: Interrupt,
    ) -> None:
        self._rendezvous = rendezvous
        self._phases, self._passed = tuple(phases), 0
        self._entered = False
        self._ended = False  # it reaches no further barrier, and the other ranks know, or cannot
        self._advanced = 0
        self.operation = operation
        self.seconds = seconds
        self.decision: Decision | None = None
        self.since = time.time()
        self.waiting = False
        self.notified = threading.Event()
        self.interrupt = interrupt

    @property
    def _rank(self) -> Rank:
        return self._rendezvous.state

    @property
    def number(self) -> int:
        """Number of the operation, equal on all ranks; 0 if this rank has not entered it."""
        return self._rank.number if self._entered else 0

    @property
    def label(self) -> str:
        """A label that is unique among the rounds on this store, over all jobs."""
        return f"{self._rank.job}.{self.number}"

    @property
    def phase(self) -> str:
        """The next barrier, or the one at which the operation has ended; empty after the last."""
        return self._phases[self._passed] if self._passed < len(self._phases) else ""

    def __enter__(self) -> Round:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    def run_hooks(self, moment: str) -> None:
        for hook in barrier_hooks:
            hook(moment, self.operation, self.phase, self._rendezvous.rank)

    def enter(self, reason: str = "") -> None:
        """Enter the operation. Blocking, with a timeout; all ranks make the same calls.

        ``recover`` requests a recovery of all ranks, or joins the requested one.

        Args:
            reason: of a recovery, for ranks that wait elsewhere.

        Raises:
            PeerFailedError: operations have failed without this rank, or another rank has requested
                a recovery, and this operation does not repair that. Or DisagreementError or
                RendezvousTimeoutError, as on the other ranks.
            ReloadpgError: the store is lost.
        """
        before = self._rank.number
        try:
            self.interrupt.check()
            self._drive(self._rank.enter(self.operation, reason), self._deadline())
        except Ended as ended:
            self._ended, self.decision = True, ended.decision
            raise self._error() from None
        finally:  # also if a signal handler raises
            self._entered = self._rank.number != before

    # -- barriers ---------------------------------------------------------------------------

    def barrier(
        self,
        phase: str,
        plan: Plan | None = None,
        said: str = "",
        summary: Callable[[Sequence[str]], str] = "\n".join,
        seconds: float | None = None,
    ) -> str:
        """Wait until all ranks arrive. Collective, blocking, with a timeout.

        Args:
            phase: the next barrier.
            plan: this rank's plan, at the first barrier; it must be equal on all ranks.
            said: what this rank says to all ranks there.
            summary: makes one text of what ranks have said, in their order, on one of them. Pure.
            seconds: the timeout of this wait; None for the operation's.

        Returns:
            The summary, equal on all ranks; empty if no rank has said anything.

        Raises:
            DisagreementError: the plans differ, on all ranks; nothing was changed.
            RendezvousTimeoutError: a rank is missing, and no rank made progress for the timeout.
            PeerFailedError: a rank failed before it arrived.
        """
        if not self._entered or self._ended or self.phase != phase:
            raise ReloadpgError(f"barrier {phase!r} is not the next of {self._phases}")
        rendezvous, deadline, share = self._rendezvous, self._deadline(seconds), 0
        if plan is not None and not rendezvous.alone:
            share = plan.contribution(rendezvous.rank, rendezvous.size)
        self.since, confirmed = time.time(), self._rank.confirmed
        self.run_hooks("before")
        self.waiting = True
        steps = self._rank.barrier(share, said, summary, ends=phase == self._phases[-1])
        try:
            self.check()
            decision: Decision = self._drive(steps, deadline)
            rendezvous.stop_polling(deadline)
        except Ended as error:
            rendezvous.stop_polling(deadline)
            decision = self._leave(error, plan=plan)
            if decision.kind != "ok":
                self.run_hooks("after")
                raise self._error(seconds) from None
        except ReloadpgError:  # it may never know the decision, and assumes that all have passed
            self._passed += 1
            raise
        finally:
            self.waiting, self.since = False, time.time()
        self.run_hooks("after")
        if not confirmed:
            rendezvous.watch(deadline)  # all are in the list of this host
        self._passed += 1
        deadline.log_end()
        return decision.text

    def refuse(self, decision: Decision) -> None:
        """End the operation, in which this process cannot be counted. Local; waits a limited time.

        The other ranks raise the decision, unless they have passed the barrier.
        """
        self._leave(GaveUp(decision))

    def watch(
        self, tasks: Sequence[Task[Any]], wanted: CancelToken, doing: Callable[[], str]
    ) -> None:
        """Wait for this rank's work before the next barrier, and poll for failures of other ranks.

        Args:
            tasks: the work, which calls :meth:`advance` after progress.
            wanted: the token of its results, cancelled at the end: before the other ranks are
                notified of an error.
            doing: returns the current step of the work, for messages.

        Raises:
            PeerFailedError: another rank failed during the work.
            RendezvousTimeoutError: neither the work nor any other rank made progress for the
                timeout.
        """
        try:
            self._poll(tasks, doing)
        except Ended as error:
            wanted.cancel()
            self._leave(error, doing())
            raise self._error() from None
        finally:
            wanted.cancel()

    def _poll(self, tasks: Sequence[Task[Any]], doing: Callable[[], str]) -> None:
        """Return when all tasks have ended; raise if one of them or another rank fails."""
        rendezvous, deadline = self._rendezvous, self._deadline()
        # Most work ends immediately, without a request to the store.
        pause, told = min(0.2, self.seconds), self._advanced
        while True:
            # The process may have been stopped in this pause: that time does not count.
            with deadline.pause(pause) as seconds:
                if _all_ended(tasks, seconds, self.interrupt):
                    return
            pause, seen = rendezvous.pause_s, self._advanced
            self.check()  # the work may wait for a process that has ended
            self._drive(self._rank.look(), deadline)
            rendezvous.extend(deadline, seen - told)
            told = seen
            deadline.log(doing)
            # Progress since the last look restarts the timeout in the next pass.
            if deadline.left == 0 and self._advanced == told:
                raise GaveUp(Decision("timeout", rendezvous.rank))

    def _drive(self, steps: Steps, deadline: Deadline) -> Any:
        """Perform the steps of this operation, in which its ranks wait for each other."""
        return self._rendezvous.drive(steps, deadline, self._wait)

    def _wait(self, key: str, again: bool, deadline: Deadline) -> None:
        """Wait for the others at a barrier, for a while."""
        rendezvous = self._rendezvous
        self.check()
        if not again:
            self.run_hooks("waiting")
            rendezvous.await_key(key, deadline, self.check)
            return
        rendezvous.begin_polling(deadline)
        with deadline.pause(rendezvous.pause_s) as seconds:
            self.interrupt.pause(seconds)
        self.check()
        if not rendezvous.extend(deadline) and not rendezvous.state.confirmed:
            rendezvous.watch(deadline)  # the processes that have joined so far
        deadline.log()

    def advance(self) -> None:
        """Count progress of this rank. Local, from any thread."""
        self._advanced += 1

    def _deadline(self, seconds: float | None = None) -> Deadline:
        """The deadline of the next barrier, by default with the timeout of the operation."""
        return Deadline(self.operation, seconds or self.seconds, self.phase)

    # -- the end ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if this rank gives up: it is interrupted, or a process on its host has ended."""
        self.interrupt.check()
        if dead := self._rendezvous.peers.dead():
            text = f"its process on the host of rank {self._rendezvous.rank} has ended"
            raise GaveUp(Decision("failed", dead[0], text, dead=dead))

    def fail(self, error: BaseException) -> str | None:
        """Notify the other ranks that this one has failed. Local; waits a limited time.

        It waits until they have read it, except after an interrupt. The ranks that did not respond
        are appended to a :class:`ReloadpgError`.

        Args:
            error: the cause.

        Returns:
            The phase at which the operation ended on all ranks. It may be later than the phase of
            this rank, if all ranks had just arrived at its barrier. None if all ranks have passed
            the last barrier: the operation is then complete in spite of the error. The first phase
            if this rank cannot enter the operation.
        """
        try:
            if self.phase and not self._ended:
                self._notify(error)
            return self.phase or None
        finally:
            self._ended = True
            self.notified.set()

    def _notify(self, error: BaseException) -> None:
        rank = self._rendezvous.rank
        dead = self._rendezvous.peers.dead()
        told = f"{type(error).__name__}: {error}".removesuffix(": ")[:4000]
        failed = Decision("failed", rank, told, dead=dead)
        try:
            # The groups are aborted next, and a rank that still connects to them would raise that
            # instead of this error. An interrupt does not wait.
            decision = self._leave(GaveUp(failed), waits=isinstance(error, Exception))
        except ReloadpgError as lost:
            same = str(lost) in str(error)
            text = "" if same else f"\nThe other ranks could not be notified: {lost}"
        else:
            if decision.kind == "ok":
                self._passed = len(self._phases)
            text = decision.silence(rank)
            if decision.kind == "failed" and decision.rank != rank:
                text = f"\nRank {decision.rank} failed first: {decision.text}{text}"
        if text and isinstance(error, ReloadpgError):
            error.args = (f"{error}{text}", *error.args[1:])

    def _leave(
        self,
        error: Ended,
        doing: str = "",
        *,
        plan: Plan | None = None,
        waits: bool = True,
    ) -> Decision:
        """End the operation for all ranks, and exchange the names of ranks.

        Args:
            error: why it ends.
            doing: this rank's work; empty if it waited.
            plan: this rank's plan, for a disagreement.
            waits: whether to wait for the answers of the other ranks.

        Returns:
            How it ended: ``ok`` if all ranks have completed it.
        """
        # A separate deadline: the work's may have passed. The first decision written counts.
        seconds = max(_REQUESTS_S, self._rendezvous.grace_s)
        deadline = Deadline(self.operation, seconds, self.phase)
        rendezvous, decision = self._rendezvous, error.decision
        if isinstance(error, GaveUp) and self.number:
            decision = rendezvous.drive(self._rank.end(decision), deadline)
        elif isinstance(error, GaveUp):
            decision = rendezvous.drive(self._rank.refuse(self.operation, decision), deadline)
            self._entered = True
        if decision.kind == "ok":
            return decision
        self._ended, self.decision = True, decision
        if decision.barrier >= 0:
            self._passed = decision.barrier
        if decision.kind == "recover":
            return decision
        # Few ranks look for missing ones at first; the others find what those have written.
        seconds = rendezvous.grace_s + rendezvous.rank.bit_length() * rendezvous.pause_s / 5
        said = plan.to_json() if plan and decision.kind == "disagree" else doing
        steps = self._rank.close(decision, said, waits=waits)
        with suppress(ReloadpgError):  # the decision is known, without the names
            self.decision = rendezvous.drive(steps, Deadline(self.operation, seconds, self.phase))
        return self.decision

    def _error(self, seconds: float | None = None) -> ReloadpgError:
        decision, rendezvous = self.decision or OK, self._rendezvous
        self.notified.set()
        return decision.error(self._deadline(seconds), rendezvous.rank, rendezvous.size)


def _all_ended(tasks: Sequence[Task[Any]], seconds: float, interrupt: Interrupt) -> bool:
    """Wait for at most this many seconds; return whether all have ended. Raises their errors."""
    end = time.monotonic() + seconds
    while True:
        running = [task for task in tasks if not task.ended]
        for task in tasks:
            if task.ended:
                task.result()
        if not running:
            return True
        left = end - time.monotonic()
        if left <= 0 or interrupt.error is not None:
            return False
        # Any of several threads may fail first, and its error must not wait for the others.
        running[0].wait(min(left, 0.5) if len(tasks) == 1 else min(left, 0.01))
