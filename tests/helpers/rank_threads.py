"""Runs the ranks of a job as threads, each with its own ``Rendezvous``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from reloadpg.rendezvous.plan import Entry, Plan
from reloadpg.rendezvous.rendezvous import Rendezvous
from reloadpg.rendezvous.round import Round
from reloadpg.threads import CancelToken, Task

FAR = 600.0
"""A timeout that no rank reaches, in seconds."""
SOON = 100.0
"""Seconds within which every rank ends that does not wait for FAR."""
PLAN = Plan("offload", (Entry("", (), {"generation": "0"}),))


class Job:
    """Ranks that run a function concurrently."""

    def __init__(self, ranks: Sequence[Rendezvous]) -> None:
        self.ranks = ranks

    def run(
        self, body: Callable[[Rendezvous], Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Return the result or the error of each rank; all of them must end within SOON."""
        chosen = range(len(self.ranks)) if ranks is None else ranks
        results: dict[int, Any] = {}

        def call(rank: int) -> None:
            try:
                results[rank] = body(self.ranks[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        return [results[rank] for rank in chosen]


def work(round_: Round, function: Callable[[], object]) -> None:
    """Call a function in a thread before the next barrier."""
    task: Task[object] = Task(function, "work")
    round_.watch([task], CancelToken(), lambda: "a group")


def two_barriers(rdv: Rendezvous) -> str:
    """One operation: agreement, work, and a second barrier."""
    round_ = Round.open(rdv, "offload", ("enter", "released"), FAR)
    round_.barrier("enter", PLAN)
    work(round_, lambda: None)
    round_.barrier("released")
    return "passed"
