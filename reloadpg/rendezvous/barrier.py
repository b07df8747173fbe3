"""One barrier of a round, as the store sees it: arrival, the outcome, and failure handling.

Every method runs as a question of :class:`~.store_client.StoreClient`: it may block as long as its
own bounds say, raises nothing but what the store raises, and changes nothing on this rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ..errors import format_ranks
from .outcome import Outcome
from .plan import Plan, Proposal, first_difference
from .store_client import GRACE_S
from .worker_thread import Wait

__all__ = ["Barrier", "Keys"]


class Keys:
    """The keys that this rank has to delete from the store, and when.

    When all ranks are at a barrier, all have read the outcome of the barrier before it.
    """

    def __init__(self) -> None:
        self._previous: list[str] = []
        self._current: list[str] = []

    def add(self, key: str) -> str:
        """Note a key that this rank is about to write, or deletes for all."""
        self._current.append(key)
        return key

    def retire(self, store: Store) -> None:
        """Delete the keys of the barriers before the one at which all ranks have arrived."""
        keys, self._previous, self._current = self._previous, self._current, []
        for key in keys:
            store.delete_key(key)


class Barrier:
    """One barrier of one round, for one rank.

    Args:
        name: unique among the barriers of the job, equal on all ranks.
        keys: where keys are noted for deletion; rank 0 deletes the shared ones.
        rank: this rank.
        size: number of ranks.
        is_host: whether the store's server is in this process.
        call: reads the outcome of all barriers that a recovery has ended; None if none has.
    """

    def __init__(
        self,
        name: str,
        keys: Keys,
        rank: int,
        size: int,
        is_host: Callable[[], bool],
        call: Callable[[Store], Outcome | None],
    ) -> None:
        self._name = name
        self._keys = keys
        self._rank = rank
        self._size = size
        self._is_host = is_host
        self._call = call
        self._answered = False
        self._failed = False  # this rank has failed here: a question that still waits may end
        self._progress = 0
        # In a large job all ranks together ask the store some thousand times a second at most.
        self.pause_s = max(0.1, size / 2000)
        self.grace_s = GRACE_S + 2 * self.pause_s
        self._delete("count", "sum", "proposals", "outcome", "progress")

    def arrive(
        self, store: Store, plan: Plan | None, proposals: Sequence[Proposal], wait: Wait
    ) -> Outcome | None:
        """Arrive, and wait for the outcome; None if there is none at the bound."""
        for proposal in proposals:
            key = self._keys.add(self._key("proposal", proposal.subject))
            if proposal.yields:
                store.compare_set(key, "", proposal.text)
            else:
                store.set(key, proposal.text)
        if proposals:
            store.add(self._key("proposals"), 1)
        if plan is not None:
            store.add(self._key("sum"), plan.contribution(self._rank, self._size))
        if store.add(self._key("count"), 1) == self._size:
            self._settle(store, self._all_here(store, plan))
        store.set(self._mine("here"), "1")
        outcome = self._await_outcome(store, wait)
        if outcome is not None and outcome.ok:
            self._keys.retire(store)
        return outcome

    def poll(self, store: Store, progress: int, wait: Wait) -> Outcome | None:
        """Read the outcome before this rank has arrived; report its progress, and note others'.

        Args:
            store: the store.
            progress: how many groups this rank has finished since the last call.
            wait: extended if any rank has made progress.
        """
        self._note_progress(store, progress, wait)
        if not store.check([self._key("outcome")]):
            called = self._call(store)
            return None if called is None else self._settle(store, called)
        return Outcome.from_json(store.get(self._key("outcome")))

    def judge(self, store: Store, *, working: bool = False, doing: str = "") -> Outcome:
        """Find an outcome at the bound, when there is none. One rank does it for all.

        Args:
            store: the store.
            working: whether this rank has not arrived, since its own part has not ended. Ranks
                that hang in the same group reach their bounds at about the same time; a rank that
                leaves no sign of life within the grace is the one that the others wait for.
            doing: what this rank is working at.
        """
        if working:
            store.set(self._mine("stuck"), doing)
            store.set(self._mine("here"), "1")
            outcome = self._await_outcome(store, Wait(self._name, GRACE_S))
            if outcome is not None:
                return outcome
        rank = str(self._rank)
        if store.compare_set(self._key("judge"), "", rank).decode() != rank:
            outcome = self._await_outcome(store, Wait(self._name, GRACE_S))
            if outcome is not None:
                return outcome
        # A rank whose own part hangs reaches its bound a moment later, and says so then.
        wait = Wait(self._name, GRACE_S / 2)
        while (missing := self._without(store, "here")) and wait.left:
            wait.pause(self.pause_s, time.sleep)
        present = sorted({*range(self._size)} - {*missing})
        stuck = [other for other in present if store.check([self._key("stuck", other)])]
        if stuck:
            doing = store.get(self._key("stuck", stuck[0])).decode()
        return self._settle(
            store,
            Outcome("timeout", self._rank, missing=tuple(missing), stuck=tuple(stuck), doing=doing),
        )

    def settle(self, store: Store, outcome: Outcome) -> Outcome:
        """Write an outcome unless there is one already; return the one that was written first."""
        if outcome.kind == "failed":
            self._failed = True  # a question of this rank that still waits for others may end
        return self._settle(store, outcome)

    def handle(self, store: Store, outcome: Outcome, plan: Plan | None, *, waits: bool) -> Outcome:
        """Do what all ranks do once they know that the round ended here, before they raise.

        Args:
            store: the store.
            outcome: the outcome, as all ranks read it.
            plan: what this rank had planned, where the ranks were to agree.
            waits: whether to find out which ranks do not answer.

        Returns:
            The outcome, with what was found out.
        """
        self._delete("judge", "readers")
        if outcome.kind == "recover":  # the rank that calls does not come here, nor end
            return outcome
        if outcome.kind == "failed":
            outcome = self.roll_call(store, outcome, waits=waits)
        if outcome.kind == "disagree" and plan is not None:
            outcome = self._explain(store, plan)
        self._leave(store, outcome)
        return outcome

    def lookup(self, store: Store, subjects: Sequence[str]) -> dict[str, str]:
        """Read what ranks have proposed on some subjects, once all have arrived."""
        keys = {subject: self._key("proposal", subject) for subject in subjects}
        return {s: store.get(key).decode() for s, key in keys.items() if store.check([key])}

    # -- keys -------------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(str(part) for part in (self._name, *parts))

    def _mine(self, name: str) -> str:
        return self._keys.add(self._key(name, self._rank))

    def _delete(self, *names: str) -> None:
        if self._rank == 0:
            for name in names:
                self._keys.add(self._key(name))

    # -- arrival ----------------------------------------------------------------------------

    def _all_here(self, store: Store, plan: Plan | None) -> Outcome:
        """The outcome, written by the last rank to arrive."""
        if plan is None:
            return Outcome("ok")
        if store.add(self._key("sum"), 0) != 0:
            return Outcome("disagree")
        return Outcome("ok", proposed=store.add(self._key("proposals"), 0) > 0)

    def _settle(self, store: Store, outcome: Outcome) -> Outcome:
        """Write the outcome unless there is one already; return the one that was written first."""
        return Outcome.from_json(store.compare_set(self._key("outcome"), "", outcome.to_json()))

    def _await_outcome(self, store: Store, wait: Wait) -> Outcome | None:
        def end_if_called() -> None:
            called = self._call(store)
            if called is not None:
                self._settle(store, called)

        text = self._await(store, "outcome", wait, end_if_called)
        return None if text is None else Outcome.from_json(text)

    def _await(
        self, store: Store, name: str, wait: Wait, meanwhile: Callable[[], object] = lambda: None
    ) -> str | None:
        """The value of a shared key once it is there; None if it is not there at the bound."""
        key = self._key(name)
        # Torch writes two warnings to stderr for each of its waits that ends without the key, so
        # one such wait is made, which wakes at once; a long one goes on by asking.
        first = min(wait.FIRST_LOG_S, wait.left / 2)
        try:
            wait.pause(first, lambda s: store.wait([key], timedelta(seconds=max(0.01, s))))
        except RuntimeError:
            while not store.check([key]):  # raises if the store itself is gone
                if wait.left == 0 or self._failed:
                    return None
                self._note_progress(store, 0, wait)
                meanwhile()
                wait.log(lambda: self._missing(store))
                wait.pause(self.pause_s, time.sleep)
        return store.get(key).decode()

    def _note_progress(self, store: Store, mine: int, wait: Wait) -> None:
        total = store.add(self._key("progress"), mine)
        if total != self._progress:
            self._progress = total
            wait.extend()

    # -- failure handling -------------------------------------------------------------------

    def _explain(self, store: Store, plan: Plan) -> Outcome:
        """Exchange the plans after a difference; the last rank to do so finds the first one."""
        self._delete("plans", "difference")
        store.set(self._mine("plan"), plan.to_json())
        if store.add(self._key("plans"), 1) == self._size:
            plans = {
                other: Plan.from_json(store.get(self._key("plan", other)).decode())
                for other in range(self._size)
            }
            store.set(self._key("difference"), first_difference(plans))
        text = self._await(store, "difference", Wait(self._name, self.grace_s))
        return Outcome("disagree", text=text or "a rank ended before it could say in what")

    def roll_call(self, store: Store, outcome: Outcome, *, waits: bool) -> Outcome:
        """Give a sign of life after a failure, and find out which ranks give none.

        Returns:
            The outcome, with the silent ranks, the same on all ranks that wait for them.
        """
        if not self._answered:
            self._answered = True
            self._delete("answers", "silent")
            store.set(self._mine("answer"), "1")
            if store.add(self._key("answers"), 1) == self._size:
                store.compare_set(self._key("silent"), "", "[]")
        if not waits:
            return outcome
        text = self._await(store, "silent", Wait(self._name, self.grace_s))
        if text is None:
            silent = json.dumps(self._without(store, "answer"))
            text = store.compare_set(self._key("silent"), "", silent).decode()
        return replace(outcome, silent=tuple(json.loads(text)))

    def _leave(self, store: Store, outcome: Outcome) -> None:
        """Say that this rank knows the outcome; the rank that hosts the store waits for the others.

        It is about to raise, and often ends then: ranks that have not read the outcome would only
        see a lost store.
        """
        expected = self._size - len({*outcome.missing, *outcome.silent})
        if store.add(self._key("readers"), 1) < expected and self._is_host():
            wait = Wait(self._name, self.grace_s)
            while wait.left and store.add(self._key("readers"), 0) < expected:
                wait.pause(0.02, time.sleep)

    def _missing(self, store: Store) -> str:
        return f"missing: rank {format_ranks(self._without(store, 'here'))}"

    def _without(self, store: Store, mark: str) -> list[int]:
        """The ranks that left no such mark, found with few questions when few are missing."""

        def without(ranks: Sequence[int]) -> list[int]:
            if not ranks or store.check([self._key(mark, rank) for rank in ranks]):
                return []
            if len(ranks) == 1:
                return list(ranks)
            half = len(ranks) // 2
            return without(ranks[:half]) + without(ranks[half:])

        return without(range(self._size))
