"""What ``doctor`` finds: one value each, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LEVELS", "Diagnosis", "Finding"]

LEVELS = ("ok", "note", "warning", "problem")
"""From good to bad. A problem makes ``doctor`` exit with code 1."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what was looked at: ``torch``, ``nccl``, ``foreign wrapper``, ``early alias``, ...
        level: one of :data:`LEVELS`.
        message: what was found.
        remedy: what to do; empty where nothing is to be done.
    """

    check: str
    level: str
    message: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of the checks."""

    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings do not count."""
        return not self.at("problem")

    def at(self, level: str) -> list[Finding]:
        """The findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "findings": [finding.to_dict() for finding in self.findings]}

    def __str__(self) -> str:
        return "\n".join(f"[{one.level}] {one.check}: {one.message}" for one in self.findings)
