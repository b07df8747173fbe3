"""Faults that a test injects: where, when, and what happens.

::

    with inject(Fault("barrier", operation="reload.enter", rank=1)):
        reloadpg.reload()  # rank 1 raises before it arrives

These are the faults of all parts of ``reloadpg.testing``. Faults at barriers happen on all
backends. Those of groups happen on the groups of a test backend: of the simulated accelerator
(:mod:`reloadpg.testing.simulated`), or one that calls :func:`check`. Those of NCCL need the
stand-ins (:mod:`reloadpg.testing.standins`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

__all__ = [
    "Fault",
    "FaultMoment",
    "InjectedFault",
    "InjectedFaultError",
    "check",
    "clear_faults",
    "inject",
]

FaultPoint = Literal["create", "connect", "release", "collective", "barrier", "nccl"]
FaultAction = Literal["raise", "stall", "call", "async"]
FaultMoment = Literal["before", "waiting", "after"]
NcclCall = Literal[
    "init",
    "split",
    "collective",
    "send",
    "recv",
    "finalize",
    "destroy",
    "abort",
    "suspend",
    "resume",
    "copy",
    "monitor",
]


class InjectedFaultError(RuntimeError):
    """Raised by an injected fault."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject: the action, the place, and the time.

    Attributes:
        at: ``create`` (the creating function), ``connect`` (first use of a group), ``release``
            (``shutdown`` or ``abort``), ``collective`` (the start of an operation). On any
            backend: ``barrier`` (of an offload, a reload or a recovery). ``nccl``: a call of NCCL,
            in all processes of this process's job of the stand-ins.
        action: ``raise`` an ``InjectedFaultError``; ``stall`` the calling thread until the
            fault is cleared or ``seconds`` have passed, then continue; ``call`` a function.
            A call of NCCL that raises returns ``ncclRemoteError``. An abort of the communicator
            ends a stall. ``async``: the call succeeds, and the communicator has this asynchronous
            error; its operations then wait until it is aborted.
        group: only groups whose name or description matches this pattern (``fnmatch``: ``1@*``
            is every later generation of group ``1``). A group has no description at ``create``.
        operation: only this method of the group (``allreduce``, ``shutdown``, ``abort``), or
            this barrier (``offload.enter``, ``offload.released``, ``reload.done``). For ``nccl``
            it is required: the call. ``copy`` is the work of a suspend or resume, once all members
            have called it: an abort does not end it. ``monitor`` is not NCCL's: the thread with
            which torch monitors the watchdog of a group does not run for ``seconds``, before it
            waits.
        rank: only in the process of this global rank.
        nth: the first matching event that fails, counted from 1 since the injection, in each
            process.
        times: number of matching events that fail, from the ``nth`` on; None for all.
        moment: ``before`` the step, which is then not done, or ``after`` it. A group that fails
            after ``create`` is released. A collective and a call of NCCL have no ``after``. A rank
            is ``before`` a barrier until it arrives; ``waiting`` for other ranks when it has been
            counted; ``after`` it has read the decision.
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
        if self.at == "nccl":
            allowed["operation"] = NcclCall
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in get_args(values):
                raise ValueError(
                    f"Fault({name}={value!r}): use one of {', '.join(get_args(values))}"
                )
        if (self.action == "call") is not callable(self.call):
            raise ValueError("Fault: the action call and the function call go together")
        if self.nth < 1 or (self.times or 1) < 1 or (self.seconds or 0) < 0:
            raise ValueError(f"{self}: nth and times start at 1, seconds at 0")
        if self.at == "nccl":
            if (self.group, self.moment, self.message, self.call) != (None, "before", "", None):
                raise ValueError(f"{self}: no group, moment, message or function at nccl")
            if self.operation == "monitor" and (self.action != "stall" or self.seconds is None):
                raise ValueError(f"{self}: operation='monitor' needs action='stall' and seconds")
        elif self.action == "async":
            raise ValueError(f"{self}: only a call of NCCL has an asynchronous error")


class InjectedFault:
    """Handle of one injected fault; as a context manager it removes it at the end."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._fired = self._seen = 0
        self._has_fired, self._cleared = threading.Event(), threading.Event()

    @property
    def fired(self) -> int:
        """Number of failed events so far. A stall counts when it starts."""
        return self._fired

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
        self._fired += 1
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
    """Inject a fault into this process, or into calls of NCCL of this process's job. Local.

    Returns:
        A handle that counts and clears the fault; also a context manager.

    Raises:
        StandinsError: a fault of NCCL, and this process belongs to no job of the stand-ins.
    """
    if fault.at == "nccl":
        from reloadpg.testing.standins import FaultOfNccl

        handle: InjectedFault = FaultOfNccl(fault)
    else:
        handle = InjectedFault(fault)
    if fault.at == "barrier":
        from reloadpg.rendezvous.round import on_barrier

        on_barrier(_at_barrier)
    with _lock:
        _injected.append(handle)
    return handle


def clear_faults() -> None:
    """Remove all faults of this process, and those of NCCL of its job. Local, idempotent.

    Stalled threads continue.
    """
    from reloadpg.testing.standins import clear_faults_of_nccl

    for handle in list(_injected):
        handle.clear()
    clear_faults_of_nccl()


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
