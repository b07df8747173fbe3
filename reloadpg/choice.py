"""Which strategy releases a group: what the user wants, and what can be done. Pure.

Suspending is collective over a communicator's members, so all members must choose alike. Each
rank proposes for its own groups; the proposals that are not a plain ``suspend`` are offered to the
other members when the ranks agree on the operation, and all of them draw the same conclusion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real

from .errors import InvalidOptionError
from .plans import Offer

__all__ = [
    "STRATEGY_NAMES",
    "Choice",
    "Facts",
    "StrategyPolicy",
    "conclude",
    "propose",
]

STRATEGY_NAMES = ("auto", "recreate", "suspend")


@dataclass(frozen=True)
class StrategyPolicy:
    """How ``install`` is told to release communicators, where a name alone does not say enough.

    ``recreate`` destroys communicators and builds them again: it gives back all they hold, and
    works everywhere. ``suspend`` keeps them and asks the backend to give back their memory
    (NCCL 2.29.7 and later): part of it stays. ``auto`` suspends a group where that is possible
    and gives back enough, and recreates it otherwise.

    Attributes:
        name: ``recreate``, ``suspend`` or ``auto``.
        min_share: for ``auto``: the least share of a communicator's memory that a suspend must
            give back, from 0 to 1.
        fallback: whether a group that cannot be suspended or resumed is recreated, on all ranks
            alike. If not, the operation raises on all ranks. After a fall back ``auto`` does not
            try again in this job, ``suspend`` does.
        groups: other strategies for single groups: a pattern (``fnmatch``) of their description
            or name, and a strategy. The first that matches counts. Equal on all ranks.
    """

    name: str = "recreate"
    min_share: float = 0.8
    fallback: bool = True
    groups: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping) or not all(
            isinstance(pattern, str) for pattern in self.groups
        ):
            raise InvalidOptionError(
                f"StrategyPolicy(groups={self.groups!r}): must map patterns to strategies; nothing "
                "was installed."
            )
        object.__setattr__(self, "groups", dict(self.groups))  # the caller's may change
        for name in (self.name, *self.groups.values()):
            if not isinstance(name, str) or name not in STRATEGY_NAMES:
                raise InvalidOptionError(
                    f"strategy {name!r} is unknown; nothing was installed. Use one of: "
                    f"{', '.join(STRATEGY_NAMES)}."
                )
        if not _is_number(self.min_share) or not 0 <= self.min_share <= 1:
            raise InvalidOptionError(
                f"StrategyPolicy(min_share={self.min_share!r}): must be a share from 0 to 1; "
                "nothing was installed."
            )
        if not isinstance(self.fallback, bool):
            raise InvalidOptionError(
                f"StrategyPolicy(fallback={self.fallback!r}): must be True or False; nothing was "
                "installed."
            )

    @classmethod
    def of(cls, strategy: str | StrategyPolicy) -> StrategyPolicy:
        """The policy that ``install(strategy=...)`` names.

        Raises:
            InvalidOptionError: there is no such strategy.
        """
        return strategy if isinstance(strategy, StrategyPolicy) else cls(strategy)

    @property
    def may_suspend(self) -> bool:
        """Whether any group could be suspended: equal on all ranks with equal options."""
        return any(name != "recreate" for name in (self.name, *self.groups.values()))

    def wanted(self, name: str, desc: str) -> str:
        """The strategy that the user wants for a group."""
        for pattern, strategy in self.groups.items():
            if fnmatchcase(desc, pattern) or fnmatchcase(name, pattern):
                return strategy
        return self.name

    def __str__(self) -> str:
        if self == StrategyPolicy(self.name):
            return self.name
        return (
            f"{self.name} (min_share {self.min_share:g}, fallback {self.fallback}, "
            f"groups {dict(self.groups)})"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Facts:
    """What this rank knows of a group's communicator.

    Attributes:
        obstacle: why it cannot be suspended, in words; empty if it can.
        used: whether it was ever used: one that was not has nothing to give back.
        total: bytes that it holds by its own account, or None if it gives none.
        suspendable: bytes of them that a suspend gives back.
    """

    obstacle: str = ""
    used: bool = True
    total: int | None = None
    suspendable: int = 0


@dataclass(frozen=True)
class Choice:
    """A strategy for one group, and why."""

    strategy: str
    reason: str = ""

    def to_offer(self, group: str) -> Offer:
        """For the other members; one that must recreate decides for those that would skip."""
        text = json.dumps([self.strategy, self.reason])
        return Offer(group, text, yields=self.strategy != "recreate")

    @classmethod
    def from_offer(cls, text: str) -> Choice:
        return cls(*json.loads(text))


def propose(policy: StrategyPolicy, wanted: str, facts: Facts) -> Choice:
    """What one member proposes for a group: ``recreate``, ``suspend`` or ``skip``. Pure."""
    if wanted == "recreate":
        return Choice("recreate")
    if facts.obstacle:
        return Choice("recreate", facts.obstacle)
    if not facts.used:
        if wanted == "suspend":
            return Choice("skip", "its communicator was never used: nothing to suspend")
        return Choice("recreate", "its communicator was never used: nothing to suspend")
    if wanted == "suspend":
        return Choice("suspend")
    if not facts.total:
        return Choice("recreate", "the backend does not say what a suspend would give back")
    share = facts.suspendable / facts.total
    gives = f"a suspend gives back {share:.0%} of what its communicator holds"
    if share < policy.min_share:
        return Choice("recreate", f"{gives}, less than {policy.min_share:.0%}")
    return Choice("suspend", gives)


_WEIGHT = {"suspend": 0, "skip": 1, "recreate": 2}


def conclude(mine: Choice, heard: Choice | None) -> Choice:
    """What all members do with a group, given what one proposes and what is offered. Pure.

    One that must recreate decides for all; one that has nothing to suspend makes all skip.
    """
    if heard is None:
        return mine
    return max(mine, heard, key=lambda choice: _WEIGHT[choice.strategy])
