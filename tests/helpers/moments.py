"""Moments inside an operation that no public name reaches: the one place that replaces functions.

A callback runs between two barriers, and a backend only while a group is created, released or used.
A rank that fails just before it arrives at a barrier, or when it was counted there and does not
know it, or while it tells the others of a failure, is at none of these. Tests of such a rank wrap
a function of the library here. A fault in a group belongs into ``faulty_gloo`` or ``simulated``,
except where groups are split: torch splits gloo's groups into gloo's, and no other backend's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from reloadpg.groups.proxy import ReloadableProcessGroup
from reloadpg.lifecycle import failure
from reloadpg.lifecycle.recreate import Rebuilds, Releases
from reloadpg.rendezvous import round as one_round
from reloadpg.rendezvous.protocol import Await, Hear
from reloadpg.rendezvous.round import Round
from reloadpg.rendezvous.worker_thread import Wait

MOMENTS: dict[str, tuple[Any, str]] = {
    "releasing": (Releases, "release"),  # a group, which may be part of a split
    "rebuilding": (Rebuilds, "rebuild"),  # likewise
    "arriving": (Round, "_reach"),  # before this rank arrives at a barrier
    "waiting": (one_round, "perform"),  # it is counted, and about to wait for others
    "counted": (Round, "_conclude"),  # it has read the decision of a barrier, no more
    "telling": (Round, "fail"),  # before it tells the others that it has failed
    "detaching": (ReloadableProcessGroup, "detach"),  # a group lets go of its communicator
    "abandoning": (failure, "abort"),  # before it leaves its groups failed
}

_replaced = ExitStack()


def at(
    moment: str,
    action: Callable[[], object],
    *,
    barrier: str = "",
    nth: int = 1,
    after: bool = False,
) -> None:
    """Do something when this process comes to a moment, once. Local.

    Args:
        moment: one of ``MOMENTS``.
        action: called in the thread that is there, which raises what it raises.
        barrier: which one, for the two at a barrier: ``operation.phase``.
        nth: the first time counts as 1.
        after: do it when the function has returned.
    """
    owner, name = MOMENTS[moment]
    original, seen = getattr(owner, name), itertools.count(1)

    def reached(*args: Any, **kwargs: Any) -> Any:
        if moment == "waiting" and not isinstance(args[1], Await | Hear):
            return original(*args, **kwargs)
        here = not barrier or barrier == f"{args[0].operation}.{args[1]}"
        due = here and next(seen) == nth
        if due and not after:
            action()
        result = original(*args, **kwargs)
        if due and after:
            action()
        return result

    _replaced.enter_context(mock.patch.object(owner, name, reached))


def log_soon() -> None:
    """Let a rank that waits say so after 0.2 s already, and not after 10 s. Local."""
    _replaced.enter_context(mock.patch.object(Wait, "FIRST_LOG_S", 0.2))


def wait_for_answers() -> None:
    """Let a rank wait a minute for what the others say after a failure or a bound. Local.

    It ends as soon as all have said it: for jobs in which no rank dies or is cut off.
    """
    _replaced.enter_context(mock.patch.object(one_round, "GRACE_S", 60.0))


def restore() -> None:
    """Put everything back. Local, idempotent."""
    _replaced.close()
