"""Faults that tests put into the simulated accelerator of one process."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Literal, get_args

__all__ = ["Fault", "FaultTable", "InjectedFault", "InjectedFaultError"]

FaultPoint = Literal["create", "connect", "release", "suspend", "resume", "collective"]
FaultAction = Literal["raise", "stall", "exit", "kill"]


class InjectedFaultError(RuntimeError):
    """Raised where a test asked for a failure."""


@dataclass(frozen=True)
class Fault:
    """What shall go wrong, where, and when.

    Attributes:
        at: ``create`` (the creating function), ``connect`` (first use of a group), ``release``
            (``shutdown`` or ``abort``), ``suspend``, ``resume``, ``collective`` (the start of an
            operation).
        action: ``raise`` an :class:`InjectedFaultError`; ``stall`` the calling thread until the
            fault is cleared or ``seconds`` have passed, then go on; ``exit`` the process with
            ``exit_code`` and no clean-up; ``kill`` it with SIGKILL.
        group: only groups whose name or description matches this pattern (``fnmatch``: ``1@*``
            is every later generation of group ``1``). A group has no description at ``create``.
        operation: only this method of the group (``allreduce``, ``shutdown``, ``abort``).
        nth: the first matching event that goes wrong, counted from 1 since the injection.
        times: how many matching events go wrong, from the ``nth`` on; None for all.
        seconds: the longest that ``stall`` holds; None is until it is cleared.
        message: text of the error.
        exit_code: for ``exit``.
    """

    at: FaultPoint
    action: FaultAction = "raise"
    group: str | None = None
    operation: str | None = None
    nth: int = 1
    times: int | None = 1
    seconds: float | None = None
    message: str = ""
    exit_code: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("at", FaultPoint), ("action", FaultAction)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ValueError(
                    f"Fault({name}={value!r}): use one of {', '.join(get_args(allowed))}"
                )
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError(
                f"Fault(nth={self.nth}, times={self.times}): events are counted from 1, and at "
                "least one must go wrong"
            )

    def matches(self, at: FaultPoint, operation: str, names: tuple[str, ...]) -> bool:
        if at != self.at or self.operation not in (None, operation):
            return False
        return self.group is None or any(fnmatchcase(name, self.group) for name in names)


class InjectedFault:
    """Handle of one injected fault; as a context manager it removes it at the end.

    Attributes:
        fault: what was injected.
        seen: matching events so far.
        fired: events that went wrong so far.
    """

    def __init__(self, fault: Fault, table: FaultTable) -> None:
        self.fault = fault
        self.seen = 0
        self.fired = 0
        self._table = table
        self._has_fired = threading.Event()
        self._cleared = threading.Event()

    def clear(self) -> None:
        """Remove the fault; threads that it stalls go on. Idempotent."""
        self._table.remove(self)
        self._cleared.set()

    def wait_fired(self, timeout: float) -> bool:
        """Wait until the fault has struck (a stall: until it holds); whether it has."""
        return self._has_fired.wait(timeout)

    def __enter__(self) -> InjectedFault:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()

    def strikes(self) -> bool:
        """Count one matching event; whether it goes wrong. The table's lock is held."""
        self.seen += 1
        last = None if self.fault.times is None else self.fault.nth + self.fault.times - 1
        if self.seen < self.fault.nth or (last is not None and self.seen > last):
            return False
        self.fired += 1
        return True

    def act(self, where: str) -> None:
        fault = self.fault
        self._has_fired.set()
        if fault.action == "raise":
            raise InjectedFaultError(fault.message or f"injected fault at {where}")
        if fault.action == "stall":
            self._cleared.wait(fault.seconds)
        elif fault.action == "exit":
            os._exit(fault.exit_code)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class FaultTable:
    """The faults of this process. Thread-safe; the lock is not held while a fault acts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._injected: list[InjectedFault] = []

    def inject(self, fault: Fault) -> InjectedFault:
        handle = InjectedFault(fault, self)
        with self._lock:
            self._injected.append(handle)
        return handle

    def remove(self, handle: InjectedFault) -> None:
        with self._lock:
            self._injected = [other for other in self._injected if other is not handle]

    def clear(self) -> None:
        with self._lock:
            handles = list(self._injected)
        for handle in handles:
            handle.clear()

    def check(self, at: FaultPoint, operation: str, *names: str) -> None:
        """Let the faults that match this event act, in the order of their injection."""
        if not self._injected:
            return
        with self._lock:
            due = [
                handle
                for handle in self._injected
                if handle.fault.matches(at, operation, names) and handle.strikes()
            ]
        for handle in due:
            handle.act(f"{at} of group {names[0]!r} ({operation})")
