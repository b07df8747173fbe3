"""Selection of the reloadable groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from ..c10d import tables
from ..errors import InvalidOptionError
from ..settings import as_flag, as_integer, as_names
from ..texts import did_you_mean
from .sets import TRAINER, creators, open_regions

BYPASS = frozenset({"gloo", "mpi", "fake", "undefined"})
"""Backends that hold no device memory: reloadable only if named."""


class Bypass(NamedTuple):
    """Why a group is bypassed, and the argument of ``install`` that would make it reloadable."""

    reason: str
    remedy: str


IN_NO_SET = Bypass(
    "its creator is in no set, by a rule of install(sets=...) or region(None)",
    "sets without that rule",
)


class Selected(NamedTuple):
    """The device types of a group whose backend is released, and the group's set."""

    devices: tuple[str, ...]
    set_name: str


@dataclass(frozen=True)
class Selection:
    """Rule that selects the reloadable groups, and the backends of each: arguments of ``install``.

    None for ``backends`` means every backend that serves an accelerator; None as a set makes the
    groups bypass.
    """

    backends: frozenset[str] | None = None
    min_size: int = 2
    world: bool = True
    exclude: tuple[str, ...] = ()
    sets: tuple[tuple[str | None, tuple[str, ...]], ...] = ()

    @classmethod
    def of(
        cls,
        backends: Iterable[str] | str | None,
        min_size: int,
        world: bool,
        exclude: Iterable[str] | str = (),
        sets: Mapping[str | None, Iterable[str] | str] | Iterable[str] | str | None = None,
        *,
        registered_later: bool = False,
    ) -> Selection:
        """Validate the arguments; ``registered_later`` allows backends unknown to torch."""
        smallest = as_integer(min_size)
        if smallest is None or smallest < 1:
            raise InvalidOptionError(
                f"install(min_size={min_size!r}): the smallest group is one rank; nothing was "
                "installed. Pass an integer of 1 or more."
            )
        world = as_flag(world, "world", "nothing was installed")
        patterns = as_names(exclude)
        if patterns is None or "" in patterns:
            raise InvalidOptionError(
                f"install(exclude={exclude!r}): not a pattern or a sequence of patterns; nothing "
                'was installed. Pass for example exclude="*_SERVICE", which is matched against the '
                "description and the name of each group."
            )
        rules = _rules(sets)
        if backends is None:
            return cls(None, smallest, world, patterns, rules)
        names = as_names(backends)
        if not names:
            why = "is not a name, or several" if names is None else "makes no group reloadable"
            raise InvalidOptionError(
                f"install(backends={backends!r}) {why}; nothing was installed. Pass None for "
                "every accelerator backend, or name at least one."
            )
        selection = cls(frozenset(names), smallest, world, patterns, rules)
        unknown = selection.unknown_backends()
        if unknown and not registered_later:
            known = ", ".join(sorted(tables.known_backends()))
            raise InvalidOptionError(
                f"install(backends=...): unknown backend {', '.join(unknown)}; nothing was "
                f"installed. Torch knows {known} here; register another with "
                "torch.distributed.Backend.register_backend first."
            )
        return selection

    def unknown_backends(self) -> list[str]:
        """List the names that torch does not know, each with the most similar known name."""
        known = tables.known_backends()
        unknown = sorted((self.backends or frozenset()) - known)
        return [f"{name}{did_you_mean(name, known - {'undefined'})}" for name in unknown]

    def __str__(self) -> str:
        backends = "None" if self.backends is None else sorted(self.backends)
        exclude = f", exclude={list(self.exclude)}" if self.exclude else ""
        sets = f", sets={dict(self.sets)}" if self.sets else ""
        return f"backends={backends}, min_size={self.min_size}, world={self.world}{exclude}{sets}"

    def decide(
        self, entry: tables.Entry, set_of: Callable[[], str | None], *, is_world: bool = False
    ) -> Selected | Bypass:
        """Return what becomes reloadable of a group, or why it bypasses. Local.

        Args:
            entry: the group.
            set_of: returns its set, None for no set; called last, for a group that is selected
                otherwise.
            is_world: whether it is the default group.
        """
        if is_world and not self.world:
            return Bypass("install(world=False)", "world=True")
        if self.exclude and (pattern := self._excluded_by(entry)):
            return Bypass(f"matches exclude {pattern!r}", f"exclude without {pattern!r}")
        size = len(entry.ranks)
        if size < self.min_size:
            few = f"{size} rank{'s' * (size != 1)}, fewer than min_size={self.min_size}"
            return Bypass(few, f"min_size={size}")
        devices = _released(self.backends, entry.config)
        if not devices:
            return self._of_other_backends(entry)
        set_name = set_of()
        return IN_NO_SET if set_name is None else Selected(devices, set_name)

    def _of_other_backends(self, entry: tables.Entry) -> Bypass:
        names = list(dict.fromkeys(entry.devices.values()))
        backends = ", ".join(names) or "none"
        remedy = f"backends={{{', '.join(map(repr, sorted(names)))}}}"
        if self.backends is None:
            return Bypass(f"backend {backends} serves no accelerator", remedy)
        return Bypass(f"backend {backends} is not in backends={sorted(self.backends)}", remedy)

    def _excluded_by(self, entry: tables.Entry) -> str:
        """Return the ``exclude`` pattern that matches the group, or an empty string."""
        for pattern in self.exclude:
            if fnmatchcase(entry.desc, pattern) or fnmatchcase(entry.name, pattern):
                return pattern
        return ""

    def set_now(self) -> str | None:
        """Return the set of a group that this thread creates now; None for a bypassed one.

        The innermost region decides; without one, the nearest caller that a rule matches.
        """
        if regions := open_regions.get():
            return regions[-1]
        for module in creators() if self.sets else ():
            set_name = _set_of(self.sets, module)
            if set_name is not _NO_RULE:
                return set_name
        return TRAINER

    @property
    def set_names(self) -> tuple[str, ...]:
        """The trainer's set, and the declared ones."""
        return (TRAINER, *[name for name, _ in self.sets if name])

    def refuse_undeclared(self, names: Iterable[str], call: str) -> None:
        """Refuse sets that ``install`` does not declare. Raises InvalidOptionError."""
        known = self.set_names
        for name in names:
            if name not in known:
                raise InvalidOptionError(
                    f"{call}({name!r}): install(sets=...) declares no such set"
                    f"{did_you_mean(name, known)}; nothing was changed. Declared: "
                    f"{', '.join(known)}. Pass sets=[{name!r}] to install(), on all ranks."
                )


@lru_cache(maxsize=256)  # a job has thousands of groups, and a few configurations
def _released(backends: frozenset[str] | None, config: str) -> tuple[str, ...]:
    """Return the device types whose backend is released; None is for all of an accelerator."""
    pairs = tables.devices_of(config).items()
    names: Collection[str] | None = backends
    if names is None:
        names = {name for device, name in pairs if device != "cpu" and name not in BYPASS}
    return tuple([device for device, name in pairs if name in names])


def _rules(
    sets: Mapping[str | None, Iterable[str] | str] | Iterable[str] | str | None,
) -> tuple[tuple[str | None, tuple[str, ...]], ...]:
    if sets is None:
        return ()
    if isinstance(sets, Mapping):
        given = {name: as_names(patterns) for name, patterns in sets.items()}
    else:
        names = as_names(sets)
        given = dict.fromkeys(("",) if names is None else names, ())
    rules: list[tuple[str | None, tuple[str, ...]]] = []
    for name, patterns in given.items():
        is_name = isinstance(name, str) and name and _GLOB.isdisjoint(name)
        if patterns is None or "" in patterns or not (is_name or name is None):
            raise InvalidOptionError(
                f"install(sets={sets!r}): not names of sets, and no mapping of sets to module "
                'patterns; nothing was installed. Pass for example sets=["engine"], or '
                'sets={"engine": "vllm.*"}.'
            )
        rules.append((name, patterns))
    return tuple(rules)


_GLOB = frozenset("*?[")
"""Characters of a pattern: as the name of a set they are a mistake."""

_NO_RULE = "\0"


@lru_cache(maxsize=1024)
def _set_of(rules: tuple[tuple[str | None, tuple[str, ...]], ...], module: str) -> str | None:
    """Return the set of the groups that a module creates, or ``_NO_RULE``."""
    for name, patterns in rules:
        for pattern in patterns:
            if fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*"):
                return name
    return _NO_RULE
