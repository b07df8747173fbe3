"""Selection of the groups that are reloadable, and of how the user wants each to be released."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real
from typing import NamedTuple

from .. import c10d
from ..errors import InvalidOptionError, did_you_mean

__all__ = ["BYPASS", "STRATEGY_NAMES", "Bypass", "Selection", "StrategyPolicy"]

BYPASS = frozenset({"gloo", "mpi", "fake", "undefined"})
"""Backends that hold no device memory worth releasing: never reloadable unless named."""

STRATEGY_NAMES = ("auto", "recreate", "suspend")


class Bypass(NamedTuple):
    """Why a group is left alone.

    Attributes:
        reason: in words.
        remedy: the argument of ``install`` with which the group would be reloadable.
    """

    reason: str
    remedy: str


@dataclass(frozen=True)
class Selection:
    """Rule for the groups that are made reloadable, and for those of their backends to release.

    Attributes:
        backends: backend names to make reloadable; None means every backend that serves an
            accelerator.
        min_size: smallest number of members; smaller groups are returned as torch made them.
        world: whether the default group is made reloadable too.
        exclude: patterns (``fnmatch``) of the description or name of groups to leave alone.
    """

    backends: frozenset[str] | None = None
    min_size: int = 2
    world: bool = True
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        backends: Iterable[str] | str | None,
        min_size: int,
        world: bool,
        exclude: Iterable[str] | str = (),
        *,
        registered_later: bool = False,
    ) -> Selection:
        """Validate the options of ``install``.

        Args:
            backends: see ``install``, as for the others.
            min_size: likewise.
            world: likewise.
            exclude: likewise.
            registered_later: whether ``backends`` may have names that torch does not know yet.

        Raises:
            InvalidOptionError: an unknown backend, an empty set, ``min_size`` below 1, a
                ``world`` that is neither True nor False, or an ``exclude`` that is no pattern.
        """
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
            raise InvalidOptionError(
                f"install(min_size={min_size!r}): the smallest group is one rank; nothing was "
                "installed. Pass an integer of 1 or more."
            )
        if not isinstance(world, bool):
            raise InvalidOptionError(
                f"install(world={world!r}): must be True or False; nothing was installed. Pass "
                "False to leave the default group as torch makes it."
            )
        patterns = tuple([exclude] if isinstance(exclude, str) else exclude)
        if not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise InvalidOptionError(
                f"install(exclude={exclude!r}): not a pattern, nor several; nothing was installed. "
                'Pass for example exclude="*_SERVICE", which is matched against the description '
                "and the name of each group."
            )
        if backends is None:
            return cls(None, min_size, world, patterns)
        names = frozenset([backends] if isinstance(backends, str) else backends)
        if not names:
            raise InvalidOptionError(
                "install(backends=()) would make no group reloadable; nothing was installed. "
                "Pass None for every accelerator backend, or name at least one."
            )
        selection = cls(frozenset(str(name) for name in names), min_size, world, patterns)
        unknown = selection.unknown_backends()
        if unknown and not registered_later:
            known = ", ".join(sorted(c10d.known_backends()))
            raise InvalidOptionError(
                f"install(backends=...): unknown backend {', '.join(unknown)}; nothing was "
                f"installed. Torch knows {known} here; register another with "
                "torch.distributed.Backend.register_backend first."
            )
        return selection

    def unknown_backends(self) -> list[str]:
        """List the names that torch does not know now, each with the known one that is nearest."""
        known = c10d.known_backends()
        unknown = sorted((self.backends or frozenset()) - known)
        return [f"{name}{did_you_mean(name, known - {'undefined'})}" for name in unknown]

    def __str__(self) -> str:
        backends = "None" if self.backends is None else sorted(self.backends)
        exclude = f", exclude={list(self.exclude)}" if self.exclude else ""
        return f"backends={backends}, min_size={self.min_size}, world={self.world}{exclude}"

    def selected(self, devices: Mapping[str, str], size: int) -> tuple[str, ...]:
        """Return the device types whose backend is released; empty for a group to leave alone.

        Args:
            devices: backend by device type.
            size: number of members.
        """
        if size < self.min_size:
            return ()
        names = self.backends
        if names is None:
            names = frozenset(
                [
                    backend
                    for device, backend in devices.items()
                    if device != "cpu" and backend not in BYPASS
                ]
            )
        return tuple([device for device, backend in devices.items() if backend in names])

    def excluded_by(self, name: str, desc: str) -> str:
        """Return the pattern that leaves a group of that name or description alone, or empty."""
        for pattern in self.exclude:
            if fnmatchcase(desc, pattern) or fnmatchcase(name, pattern):
                return pattern
        return ""

    def bypass(
        self,
        devices: Mapping[str, str],
        size: int,
        *,
        name: str = "",
        desc: str = "",
        is_world: bool = False,
    ) -> Bypass | None:
        """Say why a group is left alone; None if it is selected.

        Args:
            devices: backend by device type.
            size: number of members.
            name: the group's name.
            desc: its description.
            is_world: whether it is the default group.
        """
        if is_world and not self.world:
            return Bypass("install(world=False)", "world=True")
        pattern = self.excluded_by(name, desc)
        if pattern:
            return Bypass(f"matches exclude {pattern!r}", f"exclude without {pattern!r}")
        if size < self.min_size:
            few = f"{size} rank{'s' * (size != 1)}, fewer than min_size={self.min_size}"
            return Bypass(few, f"min_size={size}")
        if self.selected(devices, size):
            return None
        names = list(dict.fromkeys(devices.values()))
        backends = ", ".join(names) or "none"
        remedy = f"backends={{{', '.join(map(repr, sorted(names)))}}}"
        if self.backends is None:
            return Bypass(f"backend {backends} serves no accelerator", remedy)
        return Bypass(f"backend {backends} is not in backends={sorted(self.backends)}", remedy)


@dataclass(frozen=True)
class StrategyPolicy:
    """The strategy for releasing communicators, where its name alone does not say enough.

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
        """Return the policy that ``install(strategy=...)`` names.

        Raises:
            InvalidOptionError: there is no such strategy.
        """
        return strategy if isinstance(strategy, StrategyPolicy) else cls(strategy)

    @property
    def may_suspend(self) -> bool:
        """Whether any group could be suspended: equal on all ranks with equal options."""
        return any(name != "recreate" for name in (self.name, *self.groups.values()))

    def wanted(self, name: str, desc: str) -> str:
        """Return the strategy that the user wants for a group."""
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
