"""Waits of a rank in an operation: for the others at a barrier, and for its own work.

The timeout limits waiting, not work. A rank that has released or rebuilt a group increments a
counter on the store. Every rank restarts its timeout when it sees a change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ReloadpgError
from ..threads import Deadline, Interrupt, Task
from .decision import Decision
from .protocol import GaveUp
from .rendezvous import Rendezvous


class Waiting:
    """The waits of one operation. Each ends early if this rank gives up; see :meth:`check`.

    Args:
        rendezvous: the rank on its store.
        interrupt: how the caller tells the operation to end.
    """

    def __init__(self, rendezvous: Rendezvous, interrupt: Interrupt) -> None:
        self._rendezvous, self._interrupt = rendezvous, interrupt
        self._advanced = 0
        self._polls = ""  # the key that counts this rank as polling

    def check(self) -> None:
        """Raise if this rank gives up: it is interrupted, or a process on its host has ended."""
        self._interrupt.check()
        if dead := self._rendezvous.peers.dead():
            text = f"its process on the host of rank {self._rendezvous.rank} has ended"
            raise GaveUp(Decision("failed", dead[0], text, dead=dead))

    def advance(self) -> None:
        """Count progress of this rank. Local, from any thread."""
        self._advanced += 1

    # -- for the others ---------------------------------------------------------------------

    def at_barrier(self, key: str, again: bool, deadline: Deadline) -> None:
        """Wait at a barrier for a while; see :meth:`Rendezvous.drive`."""
        rendezvous = self._rendezvous
        self.check()
        if not again:
            rendezvous.await_key(key, deadline, self.check)
            return
        if rendezvous.rank and not self._polls:  # rank 0 keeps the store until it has read the end
            self._polls = polls = rendezvous.polls
            rendezvous.ask(lambda store: store.add(polls, 1), deadline)
        with deadline.pause(rendezvous.pause_s) as seconds:
            self._interrupt.pause(seconds)
        self.check()
        if not rendezvous.extend(deadline) and not rendezvous.state.confirmed:
            rendezvous.watch(deadline)  # the processes that have joined so far
        deadline.log()

    def end(self, deadline: Deadline) -> None:
        """Say that this rank polls no more: it has read how the barrier has ended."""
        polls, self._polls = self._polls, ""
        if polls:
            with suppress(ReloadpgError):
                self._rendezvous.ask(lambda store: store.add(polls, -1), deadline)

    # -- for its own work -------------------------------------------------------------------

    def for_tasks(
        self, tasks: Sequence[Task[Any]], deadline: Deadline, doing: Callable[[], str]
    ) -> None:
        """Return when all tasks have ended; raise if one of them or another rank fails."""
        rendezvous = self._rendezvous
        # Most work ends immediately, without a request to the store.
        pause, told = min(0.2, deadline.seconds), self._advanced
        while True:
            # The process may have been stopped in this pause: that time does not count.
            with deadline.pause(pause) as seconds:
                if self._have_ended(tasks, seconds):
                    return
            pause, seen = rendezvous.pause_s, self._advanced
            self.check()  # the work may wait for a process that has ended
            rendezvous.drive(rendezvous.state.look(), deadline)
            rendezvous.extend(deadline, seen - told)
            told = seen
            deadline.log(doing)
            # Progress since the last look restarts the timeout in the next pass.
            if deadline.left == 0 and self._advanced == told:
                raise GaveUp(Decision("timeout", rendezvous.rank))

    def _have_ended(self, tasks: Sequence[Task[Any]], seconds: float) -> bool:
        """Wait for at most this many seconds, and return whether all have; raise their errors."""
        end = time.monotonic() + seconds
        while True:
            running = [task for task in tasks if not task.ended]
            for task in tasks:
                if task.ended:
                    task.result()
            if not running:
                return True
            left = end - time.monotonic()
            if left <= 0 or self._interrupt.error is not None:
                return False
            # Any of several threads may fail first, and its error must not wait for the others.
            running[0].wait(min(left, 0.5) if len(tasks) == 1 else min(left, 0.01))
