"""The decision of a barrier, and the error that each rank raises for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import DisagreementError, PeerFailedError, ReloadpgError, RendezvousTimeoutError
from ..texts import named_ranks

TIMEOUT_SETTING = {
    "offload": "install(timeout=...)",
    "reload": "install(timeout=...)",
    "recover": "recover(timeout=...)",
    "init_distributed": "init_timeout",
}
"""The setting that holds the timeout of an operation, by its name; others take an argument."""


@dataclass(frozen=True)
class Decision:
    """The decision of a barrier. It is written to the store once, by the rank that decides first.

    Attributes:
        kind: ``ok``, ``failed``, ``timeout``, ``disagree``, or ``recover`` (a rank requests a
            recovery of all ranks).
        rank: the rank that failed, reached its timeout, or requests a recovery.
        text: the reason of the failure, the difference between the ranks, or, at the first barrier,
            the summary of what ranks have said.
        barrier: the barrier at which the operation ended early; -1 if it is unknown.
        missing: ranks that did not respond after a timeout.
        stuck: ranks that responded but had not finished their own work at the timeout.
        silent: ranks that did not respond after a failure.
        doing: the work of the first of ``stuck``.
        dead: ranks whose processes have ended, as detected by a rank on the same host.
        operation: name of the operation that ended early.
        generation: the generation with which the ranks rebuild all groups of a reload, since they
            disagree on the state alone; otherwise 0.
    """

    kind: str
    rank: int = -1
    text: str = ""
    barrier: int = -1
    missing: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    doing: str = ""
    dead: tuple[int, ...] = ()
    operation: str = ""
    generation: int = 0

    def to_json(self) -> str:
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps({name: value for name, value in asdict(self).items() if name in given})

    @classmethod
    def from_json(cls, text: str | bytes) -> Decision:
        values: dict[str, Any] = json.loads(text)
        given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    def error(
        self, operation: str, phase: str, *, seconds: float, rank: int, size: int
    ) -> ReloadpgError:
        """Build the error that ``rank`` raises for a decision that ends the operation."""
        if self.kind == "disagree":
            recovers = operation == "recover"
            without = "Every group is without a communicator."
            return DisagreementError(
                f"{operation}: the ranks do not agree: {self.text}. "
                f"{without if recovers else 'Nothing was changed on any rank.'} "
                f"When the ranks agree, {_next_step(operation)}."
            )
        if self.kind == "recover":
            unchanged = operation != "recover" and phase == "enter"
            state = "Nothing was changed by this call" if unchanged else "See reloadpg.status()"
            text = (
                f"rank {self.rank} has called recover(): {self.text.rstrip('.')}. {state}; "
                "call reloadpg.recovery.recover() on this rank too."
            )
            return PeerFailedError(f"{operation}: {text}", rank=self.rank, phase=phase)
        if self.kind == "failed":
            how = "died" if self.rank in self.dead else "failed"
            return PeerFailedError(
                f"{operation}: rank {self.rank} {how} before phase {phase!r}: {self.text}"
                f"{self.silence(rank)}\nSee reloadpg.status(); {self._remedy(operation)}.",
                rank=self.rank,
                phase=phase,
                missing=(*self.dead, *(other for other in self.silent if other != rank)),
            )
        return self._timeout(operation, phase, seconds, rank, size)

    def silence(self, rank: int) -> str:
        """Return the text that names dead and unresponsive ranks; empty if there are none."""
        text = ""
        if dead := [other for other in self.dead if other != self.rank]:
            text += f"\nThe process of {named_ranks(dead)} has ended."
        if others := [other for other in self.silent if other != rank]:
            text += (
                f"\nNo response since then from {named_ranks(others)}: ended, unreachable, or "
                "still in a callback or collective."
            )
        if rank in self.silent:
            text += "\nThis rank responded too late: it was still busy with its own work."
        return text

    def earlier_failure(self, rank: int) -> str:
        """Return the text that names a rank that failed before ``rank``; empty if none did."""
        if self.kind != "failed" or self.rank == rank:
            return ""
        return f"\nRank {self.rank} failed first: {self.text}"

    def _remedy(self, operation: str) -> str:
        if self.dead:
            return "restart the job"
        if self.silent:
            return (
                f"if {named_ranks(self.silent)} ended, restart the job; otherwise "
                f"{_next_step(operation)}"
            )
        return f"once the cause on rank {self.rank} is removed, {_next_step(operation)}"

    def _timeout(
        self, operation: str, phase: str, seconds: float, rank: int, size: int
    ) -> RendezvousTimeoutError:
        name = operation.split()[0]
        arrived = size - len(self.missing) - len(self.stuck)
        text = (
            f"{operation}: rank {self.rank} waited {seconds:g} s without progress in phase "
            f"{phase!r}; {arrived} of {size} ranks arrived"
        )
        if self.missing:
            text += f", missing: {named_ranks(self.missing)}"
        text += "."
        if self.stuck:
            whose = "its" if len(self.stuck) == 1 else "their"
            text += f" {named_ranks(self.stuck).capitalize()} did not finish {whose} own work"
            text += f"; rank {self.stuck[0]} was in: {self.doing}." if self.doing else "."
            if size > 1:
                text += (
                    " Possible causes: a peer that never joined, a buffer of another library that "
                    "still uses the communicator, or a CUDA graph that captured its collectives."
                )
        if rank in self.missing:
            text += " This rank arrived too late."
        elif self.missing and phase == "enter" and name in TIMEOUT_SETTING:
            text += (
                f" A missing rank has not called {name}(), has ended, or never called "
                "reloadpg.install()."
            )
        steps = f" Find out why they are delayed, then {_next_step(operation)}"
        if self.missing:
            steps += f"; if {named_ranks(self.missing)} ended, restart the job"
        if name in TIMEOUT_SETTING:
            steps += f"; if they only need longer, raise {TIMEOUT_SETTING[name]}"
        return RendezvousTimeoutError(
            f"{text}{steps}.",
            phase=phase,
            seconds=seconds,
            arrived=arrived,
            missing=self.missing,
        )


def store_silent(
    operation: str, phase: str, *, seconds: float, rank: int, size: int
) -> RendezvousTimeoutError:
    """Build the error for a store that did not respond."""
    unknown = tuple(other for other in range(size) if other != rank)
    return RendezvousTimeoutError(
        f"{operation}: rank {rank} waited {seconds:g} s in phase {phase!r}, and the rendezvous "
        f"store does not respond; it is unknown whether {named_ranks(unknown)} arrived. Its "
        "server, usually in rank 0's process or the launcher's agent, has ended or is unreachable. "
        "Restart the job.",
        phase=phase,
        seconds=seconds,
        arrived=1,
    )


def store_lost(operation: str, phase: str, cause: Exception) -> ReloadpgError:
    """Build the error for a store that has ended."""
    return ReloadpgError(
        f"{operation}, phase {phase!r}: the rendezvous store is lost: {cause}. Its server, usually "
        "in rank 0's process or the launcher's agent, has ended. Restart the job."
    )


def _next_step(operation: str) -> str:
    if operation == "exit":  # of a scope, which aborts this rank's groups when it raises
        return "restart the job: its process groups are aborted"
    return f"call {operation.split()[0]}() again on all ranks"
