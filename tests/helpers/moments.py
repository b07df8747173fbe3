"""Moments inside an operation that no public name reaches: the one place that replaces functions.

A callback runs between two barriers, and a backend only while a group is created, released or used.
A rank that fails just before it arrives at a barrier, or when it was counted there and does not
know it, or while it tells the others of a failure, is at none of these. Tests of such a rank wrap
a function of the library here; a fault in a group belongs into ``faulty_gloo`` or ``simulated``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from reloadpg.lifecycle import failure
from reloadpg.rendezvous.round import Round
from reloadpg.rendezvous.worker_thread import Wait

MOMENTS: dict[str, tuple[Any, str]] = {
    "arriving": (Round, "_reach"),  # before this rank arrives at a barrier
    "counted": (Round, "_pass"),  # it has read the outcome of a barrier, and done nothing with it
    "telling": (Round, "fail"),  # before it tells the others that it has failed
    "abandoning": (failure, "abort"),  # before it leaves its groups failed
}

_replaced = ExitStack()


def at(moment: str, action: Callable[[], object], *, barrier: str = "") -> None:
    """Do something when this process comes to a moment for the first time. Local.

    Args:
        moment: one of ``MOMENTS``.
        action: called in the thread that is there, which raises what it raises.
        barrier: which one, for the first two: ``operation.phase``.
    """
    owner, name = MOMENTS[moment]
    original, left = getattr(owner, name), [action]

    def reached(*args: Any, **kwargs: Any) -> Any:
        if left and (not barrier or barrier == f"{args[0].operation}.{args[1]}"):
            left.pop()()
        return original(*args, **kwargs)

    _replaced.enter_context(mock.patch.object(owner, name, reached))


def log_soon() -> None:
    """Let a rank that waits say so after 0.2 s already, and not after 10 s. Local."""
    _replaced.enter_context(mock.patch.object(Wait, "FIRST_LOG_S", 0.2))


def restore() -> None:
    """Put everything back. Local, idempotent."""
    _replaced.close()
