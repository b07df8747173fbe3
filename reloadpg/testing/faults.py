"""Faults that a test injects into this process: where, when, and what happens.

::

    with inject(Fault("barrier", operation="reload.enter", rank=1)):
        reloadpg.reload()  # rank 1 raises before it arrives

Faults at barriers happen on all backends. Those of groups happen on the groups of a test backend:
of the simulated accelerator (:mod:`reloadpg.testing.simulated`), or one that calls :func:`check`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from reloadpg.rendezvous.round import barrier_hooks

__all__ = [
    "Fault",
    "FaultMoment",
    "InjectedFault",
    "InjectedFaultError",
    "check",
    "clear_faults",
    "inject",
]

FaultPoint = Literal["create", "connect", "release", "collective", "barrier"]
FaultAction = Literal["raise", "stall", "call"]
FaultMoment = Literal["before", "waiting", "after"]


class InjectedFaultError(RuntimeError):
    """Raised by an injected fault."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject: the action, the place, and the time.

    Attributes:
        at: ``create`` (the creating function), ``connect`` (first use of a group), ``release``
            (``shutdown`` or ``abort``), ``collective`` (the start of an operation). On any
            backend: ``barrier`` (of an offload, a reload or a recovery).
        action: ``raise`` an ``InjectedFaultError``; ``stall`` the calling thread until the
            fault is cleared or ``seconds`` have passed, then continue; ``call`` a function.
        group: only groups whose name or description matches this pattern (``fnmatch``: ``1@*``
            is every later generation of group ``1``). A group has no description at ``create``.
        operation: only this method of the group (``allreduce``, ``shutdown``, ``abort``), or
            this barrier (``offload.enter``, ``offload.released``, ``reload.done``).
        rank: only in the process of this global rank.
        nth: the first matching event that fails, counted from 1 since the injection.
        times: number of matching events that fail, from the ``nth`` on; None for all.
        moment: ``before`` the step, which is then not done, or ``after`` it. A group that fails
            after ``create`` is released. A collective has no ``after``. A rank is ``before`` a
            barrier until it arrives; ``waiting`` for other ranks when it has been counted;
            ``after`` it has read the decision.
        seconds: maximum duration of ``stall``; None stalls until it is cleared.
        message: text of the error.
        call: for ``call``: called in the thread of the event, with what the backend knows of the
            group (``simulated.GroupInfo``), or the barrier's name. Its exceptions, including
            ``KeyboardInterrupt``, propagate from the step.
    """

    at: FaultPoint
    action: FaultAction = "raise"
    group: str | None = None
    operation: str | None = None
    rank: int | None = None
    nth: int = 1
    times: int | None = 1
    moment: FaultMoment = "before"
    seconds: float | None = None
    message: str = ""
    call: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        allowed = {"at": FaultPoint, "action": FaultAction, "moment": FaultMoment}
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in get_args(values):
                raise ValueError(
                    f"Fault({name}={value!r}): use one of {', '.join(get_args(values))}"
                )
        if (self.action == "call") is not callable(self.call):
            raise ValueError("Fault: the action call and the function call go together")


class InjectedFault:
    """Handle of one injected fault; as a context manager it removes it at the end.

    Attributes:
        fault: the injected fault.
        fired: number of failed events so far.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.fired = self._seen = 0
        self._has_fired, self._cleared = threading.Event(), threading.Event()

    def clear(self) -> None:
        """Remove the fault; stalled threads continue. Idempotent."""
        with _lock:
            _injected[:] = [other for other in _injected if other is not self]
        self._cleared.set()

    def wait_fired(self, timeout: float) -> bool:
        """Wait until the fault has fired (a stall: until it stalls); return whether it has."""
        return self._has_fired.wait(timeout)

    def __enter__(self) -> InjectedFault:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def strikes(self) -> bool:
        """Count one matching event; return whether it fails. The lock is held."""
        self._seen += 1
        last = None if self.fault.times is None else self.fault.nth + self.fault.times - 1
        if self._seen < self.fault.nth or (last is not None and self._seen > last):
            return False
        self.fired += 1
        return True

    def act(self, where: str, info: object) -> None:
        """Raise, stall or call, without the lock."""
        fault = self.fault
        self._has_fired.set()
        if fault.call is not None:
            fault.call(info)
        elif fault.action == "raise":
            raise InjectedFaultError(fault.message or f"injected fault {where}")
        else:
            self._cleared.wait(fault.seconds)


_injected: list[InjectedFault] = []
_lock = threading.RLock()


def inject(fault: Fault) -> InjectedFault:
    """Inject a fault into this process. Local.

    Returns:
        A handle that counts and clears the fault; also a context manager.
    """
    if fault.at == "barrier" and _at_barrier not in barrier_hooks:
        barrier_hooks.append(_at_barrier)
    handle = InjectedFault(fault)
    with _lock:
        _injected.append(handle)
    return handle


def clear_faults() -> None:
    """Remove all faults; stalled threads continue. Local, idempotent."""
    for handle in list(_injected):
        handle.clear()


def check(
    at: FaultPoint,
    operation: str,
    rank: int,
    info: object,
    moment: FaultMoment = "before",
    names: tuple[str, ...] = (),
) -> None:
    """Run the faults of an event, in the order of their injection. Local; backends call it.

    Args:
        rank: the global rank of this process.
        info: for the text of an error, and for a function that is called.
        names: name and description of the group.
    """
    if not _injected:
        return

    def concerns(fault: Fault) -> bool:
        return (
            (fault.at, fault.moment) == (at, moment)
            and fault.operation in (None, operation)
            and fault.rank in (None, rank)
            and (fault.group is None or any(fnmatchcase(name, fault.group) for name in names))
        )

    with _lock:
        due = [one for one in _injected if concerns(one.fault) and one.strikes()]
    for handle in due:
        handle.act(f"{moment} {at} {operation}" + (f" of {info}" if names else ""), info)


def _at_barrier(moment: Any, operation: str, phase: str, rank: int) -> None:
    name = f"{operation}.{phase}"
    check("barrier", name, rank, name, moment)
