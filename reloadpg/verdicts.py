"""How a gate ended, as all ranks read it, and the error that each of them raises for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import (
    DisagreementError,
    PeerFailedError,
    ReloadpgError,
    RendezvousTimeoutError,
    format_ranks,
)

__all__ = ["Verdict"]


@dataclass(frozen=True)
class Verdict:
    """How a gate ended. Written to the store once, by whoever knows it first.

    Attributes:
        kind: ``ok``, ``failed``, ``timeout`` or ``disagree``.
        rank: who failed, or who gave up waiting.
        text: why it failed, or in what the ranks differ.
        missing: ranks that gave no sign before the bound.
        stuck: ranks that were here and did not finish their own part before the bound.
        silent: ranks that did not answer when a failure was made known.
        doing: what ``rank`` was at, when that was its own part.
        offered: whether a rank has made an offer in an agreement.
        at_group: whether it was a group's communicator that failed, not the rank.
    """

    kind: str
    rank: int = -1
    text: str = ""
    missing: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    doing: str = ""
    offered: bool = False
    at_group: bool = False

    @property
    def mendable(self) -> bool:
        """Whether all ranks are still here and can try another way. Alike on all ranks."""
        return self.kind == "failed" and self.at_group and not self.silent

    @property
    def ok(self) -> bool:
        """Whether the gate was passed."""
        return self.kind == "ok"

    def to_json(self) -> str:
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps({name: value for name, value in asdict(self).items() if name in given})

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        values: dict[str, Any] = json.loads(text)
        given: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    def error(
        self, operation: str, phase: str, *, seconds: float, rank: int, size: int
    ) -> ReloadpgError:
        """The error that ``rank`` raises; only for a gate that was not passed. Pure."""
        if self.kind == "disagree":
            return DisagreementError(
                f"{operation}: the ranks do not agree: {self.text}. Nothing was changed on any "
                "rank. Make the ranks call the same operation on the same groups, then call it "
                "again."
            )
        if self.kind == "failed":
            return PeerFailedError(
                f"{operation}: rank {self.rank} failed before phase {phase!r}: {self.text}"
                f"{self.silence()}\nSee reloadpg.status(); once rank {self.rank} is able to, "
                f"{_next_step(operation)}.",
                rank=self.rank,
                phase=phase,
                missing=self.silent,
            )
        arrived = size - len(self.missing) - len(self.stuck)
        text = (
            f"{operation}: rank {self.rank} waited {seconds:g} s in phase {phase!r}; {arrived} of "
            f"{size} ranks arrived"
        )
        if self.missing:
            text += f", missing: rank {format_ranks(self.missing)}"
        text += "."
        if self.stuck:
            text += f" Rank {format_ranks(self.stuck)} did not finish its own part"
            text += f"; rank {self.rank} was at: {self.doing}." if self.doing else "."
            if size > 1:
                text += (
                    " A peer that never joined, or a buffer of another library that still uses the "
                    "communicator, does this."
                )
        if rank in self.missing:
            text += " This rank came too late."
        return RendezvousTimeoutError(
            f"{text} Find out what holds them up, then {_next_step(operation)}.",
            phase=phase,
            seconds=seconds,
            arrived=arrived,
            missing=self.missing,
        )

    def silence(self) -> str:
        """Who gave no sign of life after the failure, in words; empty if all did."""
        if not self.silent:
            return ""
        return (
            f"\nNo sign of life since then from rank {format_ranks(self.silent)}: ended, cut off, "
            "or busy."
        )


def _next_step(operation: str) -> str:
    if operation == "exit":  # of a scope: this rank's groups are aborted when it has raised
        return "restart the job: its process groups are aborted"
    return f"call {operation.split()[0]}() again on all ranks"
