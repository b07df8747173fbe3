"""One gate of a round as the store sees it: arrival, the verdict, and what follows a bad one.

Everything here runs in the thread of a :class:`~reloadpg.connection.Connection` question: it may
block as long as its own bounds say, raises nothing but what the store raises, and changes nothing
on this rank.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from .errors import format_ranks
from .plans import Offer, Plan, first_difference
from .verdicts import Verdict

__all__ = ["GRACE_S", "Gate", "Keys", "LongWait"]

logger = logging.getLogger("reloadpg")

GRACE_S = 1.5
"""How long past the bound a rank, or the store, may take to answer before it is taken for dead."""

FIRST_LOG_S = 10.0
"""First message of a long wait; the next ones after twice, four times, ... that."""


class Keys:
    """The keys that this rank has to delete from the store, and when.

    When all ranks are at a gate, all have read the gate before it.
    """

    def __init__(self) -> None:
        self._left: list[str] = []
        self._current: list[str] = []

    def add(self, key: str) -> str:
        """Note a key that this rank is about to write, or answers for."""
        self._current.append(key)
        return key

    def retire(self, store: Store) -> None:
        """All ranks are at a gate: delete the keys of the gates before it."""
        keys, self._left, self._current = self._left, self._current, []
        for key in keys:
            store.delete_key(key)


class Gate:
    """One gate of one round, for one rank.

    Args:
        name: unique among the gates of the job, equal on all ranks.
        keys: where keys are noted for deletion; rank 0 answers for the shared ones.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, name: str, keys: Keys, rank: int, size: int) -> None:
        self._name = name
        self._keys = keys
        self._rank = rank
        self._size = size
        self._heard = False
        self._left = False  # this rank has failed here: a question that still waits may end
        self._answer_for("count", "sum", "offering", "verdict")

    def meet(
        self, store: Store, plan: Plan | None, offers: Sequence[Offer], log: LongWait
    ) -> Verdict:
        """Arrive, and wait for the verdict until ``log.end``."""
        for offer in offers:
            key = self._keys.add(self._key("offer", offer.subject))
            if offer.yields:
                store.compare_set(key, "", offer.text)
            else:
                store.set(key, offer.text)
        if offers:
            store.add(self._key("offering"), 1)
        if plan is not None:
            store.add(self._key("sum"), plan.contribution(self._rank, self._size))
        if store.add(self._key("count"), 1) == self._size:
            self._settle(store, self._all_here(store, plan))
        store.set(self._mine("here"), "1")
        text = self._await(store, "verdict", log.end, log)
        verdict = Verdict.from_json(text) if text else self._judge(store)
        return self._aftermath(store, verdict, plan)

    def hear(self, store: Store, subjects: Sequence[str]) -> dict[str, str]:
        """What ranks have offered on some subjects, once this gate is passed."""
        keys = {subject: self._key("offer", subject) for subject in subjects}
        return {s: store.get(key).decode() for s, key in keys.items() if store.check([key])}

    def look(self, store: Store) -> Verdict | None:
        """The verdict before this rank has arrived: a bad one, or none."""
        if not store.check([self._key("verdict")]):
            return None
        return self._aftermath(store, Verdict.from_json(store.get(self._key("verdict"))))

    def stuck(self, store: Store, doing: str) -> Verdict:
        """This rank's own part did not end in time: find out who is gone.

        Ranks that hang in the same group reach their bounds at about the same time. Each leaves
        a sign of life; who leaves none within the grace is the one that the others wait for.
        """
        store.set(self._mine("stuck"), "1")
        store.set(self._mine("here"), "1")
        text = self._await(store, "verdict", time.monotonic() + GRACE_S)
        return self._aftermath(
            store, Verdict.from_json(text) if text else self._judge(store, doing)
        )

    def fail(self, store: Store, failed: Verdict, *, waits: bool) -> Verdict:
        """Write a failure, unless there is a verdict; the one that stands.

        Args:
            store: the store.
            failed: the failure.
            waits: whether to find out who does not answer.
        """
        self._left = True
        stands = self._settle(store, failed)
        if stands.ok:
            return stands
        self._answer_for("judge")
        return self._roll_call(store, stands, waits=waits)

    # -- keys -------------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(str(part) for part in (self._name, *parts))

    def _mine(self, name: str) -> str:
        return self._keys.add(self._key(name, self._rank))

    def _answer_for(self, *names: str) -> None:
        if self._rank == 0:
            for name in names:
                self._keys.add(self._key(name))

    # -- arrival ----------------------------------------------------------------------------

    def _all_here(self, store: Store, plan: Plan | None) -> Verdict:
        """The verdict by the last rank to arrive."""
        if plan is None:
            return Verdict("ok")
        if store.add(self._key("sum"), 0) != 0:
            return Verdict("disagree")
        return Verdict("ok", offered=store.add(self._key("offering"), 0) > 0)

    def _settle(self, store: Store, verdict: Verdict) -> Verdict:
        """Write the verdict unless there is one; the one that stands."""
        return Verdict.from_json(store.compare_set(self._key("verdict"), "", verdict.to_json()))

    def _await(
        self, store: Store, name: str, end: float, log: LongWait | None = None
    ) -> str | None:
        """The value of a shared key once it is there; None if it is not there at the end.

        Waits in as few pieces as possible: torch writes two warnings to stderr for each that ends
        without the key.
        """
        key = self._key(name)
        while True:
            left = end - time.monotonic()
            piece = min(left, log.due_in()) if log is not None else left
            try:
                store.wait([key], timedelta(seconds=max(0.01, piece)))
            except RuntimeError:
                if not store.check([key]):  # raises if the store itself is gone
                    if time.monotonic() >= end:
                        return None
                    if log is not None:
                        log.maybe(lambda: self._missing(store))
                    continue
            return store.get(key).decode()

    # -- after a bad verdict, or none -------------------------------------------------------

    def _aftermath(self, store: Store, verdict: Verdict, plan: Plan | None = None) -> Verdict:
        """What all ranks do once they know a verdict, before they act on it."""
        if verdict.ok:
            self._keys.retire(store)
            return verdict
        self._answer_for("judge")
        if verdict.kind == "failed" and not self._left:
            return self._roll_call(store, verdict, waits=True)
        if verdict.kind == "disagree" and plan is not None:
            return self._explain(store, plan)
        return verdict

    def _judge(self, store: Store, doing: str = "") -> Verdict:
        """The bound is over and there is no verdict: find one. One rank does it for all."""
        rank = str(self._rank)
        if store.compare_set(self._key("judge"), "", rank).decode() != rank:
            text = self._await(store, "verdict", time.monotonic() + GRACE_S)
            if text is not None:
                return Verdict.from_json(text)
        missing = self._without(store, "here")
        present = sorted({*range(self._size)} - {*missing})
        stuck = [other for other in present if store.check([self._key("stuck", other)])]
        verdict = Verdict(
            "timeout", self._rank, missing=tuple(missing), stuck=tuple(stuck), doing=doing
        )
        return self._settle(store, verdict)

    def _explain(self, store: Store, plan: Plan) -> Verdict:
        """After a difference: exchange the plans; the last rank to hand in finds the first one."""
        self._answer_for("plans", "difference")
        store.set(self._mine("plan"), plan.to_json())
        if store.add(self._key("plans"), 1) == self._size:
            plans = {
                other: Plan.from_json(store.get(self._key("plan", other)).decode())
                for other in range(self._size)
            }
            store.set(self._key("difference"), first_difference(plans))
        text = self._await(store, "difference", time.monotonic() + GRACE_S)
        return Verdict("disagree", text=text or "a rank ended before it could say in what")

    def _roll_call(self, store: Store, verdict: Verdict, *, waits: bool) -> Verdict:
        """After a failure: give a sign of life, and find out who gives none."""
        if not self._heard:
            self._heard = True
            self._answer_for("heard-count", "silent")
            store.set(self._mine("heard"), "1")
            if store.add(self._key("heard-count"), 1) == self._size:
                store.compare_set(self._key("silent"), "", "[]")
        if not waits:
            return verdict
        text = self._await(store, "silent", time.monotonic() + GRACE_S)
        if text is None:
            silent = json.dumps(self._without(store, "heard"))
            text = store.compare_set(self._key("silent"), "", silent).decode()
        return replace(verdict, silent=tuple(json.loads(text)))

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


class LongWait:
    """Says at 10, 20, 40, ... seconds what is being waited for.

    Attributes:
        end: ``time.monotonic()`` at which the wait is over.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._started = time.monotonic()
        self.end = self._started + seconds
        self._next = FIRST_LOG_S

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def due_in(self) -> float:
        """Seconds until the next message."""
        return self._next - self.waited

    def maybe(self, detail: Callable[[], str]) -> None:
        """The message, if it is due."""
        if self.due_in() <= 0:
            self._next *= 2
            logger.warning("%s: waiting for %.0f s; %s", self._what, self.waited, detail())

    def over(self) -> None:
        """Say how long it took, if it was long."""
        if self.waited >= FIRST_LOG_S:
            logger.info("%s: waited %.1f s", self._what, self.waited)
