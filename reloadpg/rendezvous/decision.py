"""The decision of a barrier, and the error that each rank raises for it."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any

from ..c10d import stores
from ..errors import (
    DisagreementError,
    PeerFailedError,
    RebuildError,
    ReloadpgError,
    RendezvousTimeoutError,
)
from ..texts import named_ranks
from ..threads import Deadline

TIMEOUT_SETTING = {
    "offload": "install(timeout=...) or offload(timeout=...)",
    "reload": "install(timeout=...), reload(timeout=...), or offloaded(timeout=...) of a block",
    "recover": "recover(timeout=...)",
    "init_distributed": "init_timeout",
    "ensure_process_group": "init_timeout",
}
"""The setting that holds the timeout of an operation, by its name; others take an argument."""


@dataclass(frozen=True)
class Decision:
    """The decision of a barrier. It is written to the store once, by the rank that decides first.

    Attributes:
        kind: ``ok``, ``failed``, ``timeout``, ``disagree``, or ``recover`` (a rank requests a
            recovery of all ranks).
        rank: the rank that failed, reached its timeout, or requests a recovery.
        text: the reason of the failure, the difference between the ranks, what came before a
            timeout, or, at the first barrier, the summary of what ranks have said.
        barrier: the barrier at which the operation ended early; -1 if it is unknown.
        missing: ranks that did not respond.
        late: ranks that had not arrived when the timeout was decided, and have responded since.
        stuck: ranks that responded but had not finished their own work at the timeout.
        doing: the work of the first of ``stuck``, as text.
        dead: ranks whose processes have ended, as detected by a rank on the same host.
        operation: name of the operation that ended early.
        generation: the generation with which the ranks rebuild all groups of a reload, since they
            disagree on the state alone; otherwise 0.
        arrived: how many ranks had arrived at the barrier when a timeout was decided.
    """

    kind: str
    rank: int = -1
    text: str = ""
    barrier: int = -1
    missing: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    doing: str = ""
    dead: tuple[int, ...] = ()
    operation: str = ""
    generation: int = 0
    arrived: int = 0
    late: tuple[int, ...] = ()

    @property
    def is_failed_rebuild(self) -> bool:
        """Whether a rank could not rebuild a group, and all ranks have responded."""
        failed = self.kind == "failed" and self.text.startswith(f"{RebuildError.__name__}: ")
        return failed and not (self.dead or self.missing)

    def to_json(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        values: Any = (tuple(v) if isinstance(v, list) else v for v in json.loads(text))
        return cls(*values)

    def error(self, wait: Deadline, rank: int, size: int) -> ReloadpgError:
        """Build the error that ``rank`` raises for the end of the operation.

        Args:
            wait: the operation, the phase at which it has ended, and the timeout.
        """
        operation, phase = wait.operation, wait.phase
        if self.kind == "disagree":
            recovers = operation == "recover"
            without = "Every group is without a communicator."
            return DisagreementError(
                f"{operation}: the ranks do not agree: {self.text}. "
                f"{without if recovers else 'Nothing was changed on any rank.'} "
                f"When the ranks agree, call {operation}() again on all ranks."
            )
        if self.kind == "recover":
            text = (
                f"rank {self.rank} has called recover(): {self.text.rstrip('.')}. See "
                "reloadpg.status(); call reloadpg.recovery.recover() on this rank too."
            )
            return PeerFailedError(f"{operation}: {text}", rank=self.rank, phase=phase)
        if self.kind == "failed":
            how = "died" if self.rank in self.dead else "failed"
            return PeerFailedError(
                f"{operation}: rank {self.rank} {how} before phase {phase!r}: {self.text}"
                f"{self.silence(rank)}\nSee reloadpg.status(). {self._remedy(operation)}",
                rank=self.rank,
                phase=phase,
                missing=(*self.dead, *(other for other in self.missing if other != rank)),
            )
        return self._timeout(wait, rank, size)

    def silence(self, rank: int) -> str:
        """Return the text that names dead and unresponsive ranks; empty if there are none."""
        text = ""
        if dead := [other for other in self.dead if other != self.rank]:
            text += f"\nThe process of {named_ranks(dead)} has ended."
        if others := [other for other in self.missing if other != rank]:
            text += (
                f"\nNo response since then from {named_ranks(others)}: ended, unreachable, or "
                "still in a callback or collective."
            )
        if rank in (*self.missing, *self.late):
            text += "\nThis rank arrived too late."
        return text

    def _remedy(self, operation: str) -> str:
        if operation == "exit":  # of a scope
            return (
                "The groups of this block are aborted. If the default group is one of them, or a "
                "process has ended, restart the job; otherwise create them again on all ranks."
            )
        if self.dead:
            return "Restart the job."
        name, late = operation.split()[0], self.kind == "timeout"
        cause = "Find out why they are delayed" if late else f"Remove the cause on rank {self.rank}"
        text = f"{cause}, then call {name}() again on all ranks"
        if self.missing:
            text += f"; if {named_ranks(self.missing)} ended, restart the job"
        if late and name in TIMEOUT_SETTING:
            text += f"; if they only need longer, raise {TIMEOUT_SETTING[name]}"
        return f"{text}."

    def _timeout(self, wait: Deadline, rank: int, size: int) -> RendezvousTimeoutError:
        name = wait.operation.split()[0]
        missing = tuple(sorted((*self.missing, *self.late)))
        arrived = size - len(missing) - len(self.stuck)
        if self.arrived:  # not all missing ranks may be known here
            arrived = min(arrived, self.arrived)
        text = (
            f"{wait.operation}: rank {self.rank} waited {wait.seconds:g} s without progress in "
            f"phase {wait.phase!r}; {arrived} of {size} ranks arrived"
        )
        if missing:
            text += f", missing: {named_ranks(missing)}"
        text += "."
        if self.stuck:
            whose = "its" if len(self.stuck) == 1 else "their"
            text += (
                f" {named_ranks(self.stuck).capitalize()} did not finish {whose} own work; "
                f"{self.doing}. Possible causes: a peer that never joined, an operation that still "
                "waits on the device for a rank (reloadpg.recovery.recover() ends it), a buffer of "
                "another library that still uses the communicator, or a CUDA graph that captured "
                "its collectives."
            )
        if self.text:
            text += f" Before this call, {self.text}."
        if rank in missing:
            text += " This rank arrived too late."
        elif self.missing and wait.phase == "enter" and name in TIMEOUT_SETTING:
            text += (
                f" A missing rank has not called {name}(), has ended, or never called "
                "reloadpg.install()."
            )
        return RendezvousTimeoutError(
            f"{text} {self._remedy(wait.operation)}",
            phase=wait.phase,
            seconds=wait.seconds,
            arrived=arrived,
            missing=missing,
        )


def _server(wait: Deadline, host: str) -> str:
    """Say what may have happened to the server of a store, and what to do.

    Args:
        host: what the processes of this host show of rank 0's; see :meth:`Peers.state_of`.
    """
    server = "The process of rank 0, which usually has its server,"
    if host == "gone":
        return f"{server} has ended. Restart the job."
    states = {
        "stopped": "is stopped (SIGSTOP, a debugger, a scheduler). Continue it, then",
        "runs": "runs on this host; it may be busy, or end now. When it responds again,",
    }
    if host not in states:
        server = "Its server, usually in rank 0's process or the launcher's agent,"
        return f"{server} has ended or is unreachable. Restart the job."
    name = wait.operation.split()[0]
    name = "reload" if name in ("offload", "recover") else name
    return (
        f"{server} {states[host]} call {name}() on all ranks. If the store still does not respond: "
        "Restart the job."
    )


def store_silent(wait: Deadline, rank: int, host: str = "") -> RendezvousTimeoutError:
    """Build the error for a store that did not respond; ``host``: see :func:`_server`."""
    return RendezvousTimeoutError(
        f"{wait.operation}: rank {rank} waited {wait.seconds:g} s in phase {wait.phase!r}, and the "
        f"rendezvous store does not respond; it is unknown which other ranks arrived. "
        f"{_server(wait, host)}",
        phase=wait.phase,
        seconds=wait.seconds,
        arrived=1,
    )


def store_lost(wait: Deadline, cause: Exception, host: str = "") -> ReloadpgError:
    """Build the error for a store that cannot be reached; ``host``: see :func:`_server`."""
    where = f"{wait.operation}, phase {wait.phase!r}"
    if isinstance(cause, stores.JobEnded):
        return ReloadpgError(f"{where}: {cause}.")
    return ReloadpgError(f"{where}: the rendezvous store is lost: {cause}. {_server(wait, host)}")


def store_unreadable(key: str, value: object) -> ReloadpgError:
    """Build the error for a value that no rank of the job has written."""
    return ReloadpgError(
        f"the key {key!r} of the rendezvous store holds {str(value)[:80]!r}, which no rank has "
        "written, so the ranks can agree on nothing. Find the program that writes keys under "
        "'reloadpg/' to this store; then restart the job."
    )
