"""The installation in this process: its options, its patches, and the variables that were set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ..groups.loans import Loans
from ..groups.patches import Patches
from ..groups.registry import registry
from ..groups.selection import Selection


@dataclass(frozen=True)
class Options:
    """The arguments of ``install``; equal ones make a second ``install`` a no-op."""

    selection: Selection = field(default_factory=Selection)
    strategy: str = "recreate"
    timeout: timedelta = timedelta(minutes=5)
    parallelism: int | None = None
    recoverable: bool = False
    borrowed: str = "refuse"

    @property
    def threads(self) -> int:
        """Number of groups that a rank processes in parallel, for backends with known locks."""
        return 8 if self.parallelism is None else self.parallelism

    def settings(self) -> dict[str, Any]:
        """Return the options by name, as plain values."""
        selection = self.selection
        named = selection.backends
        return {
            "backends": "accelerators" if named is None else sorted(named),
            "min_size": selection.min_size,
            "world": selection.world,
            "strategy": self.strategy,
            "timeout_s": self.timeout.total_seconds(),
            "parallelism": "default" if self.parallelism is None else self.parallelism,
            "exclude": list(selection.exclude),
            "sets": dict(selection.sets),
            "recoverable": self.recoverable,
            "borrowed": self.borrowed,
        }


class Installation:
    """The installation of this process. One instance: :data:`installation`.

    Attributes:
        options: the options; None if nothing is installed.
        patches: the patches; None if nothing is installed.
    """

    def __init__(self) -> None:
        self.options: Options | None = None
        self.patches: Patches | None = None
        self._variables: Mapping[str, tuple[str, str | None]] = {}

    def begin(
        self, options: Options, patches: Patches, variables: Mapping[str, tuple[str, str | None]]
    ) -> None:
        """Put it in place: the patches are applied. ``variables`` have their earlier values."""
        self.options, self.patches, self._variables = options, patches, variables
        registry.select(options.selection)
        Loans.record(options.borrowed != "ignore")
        os.environ.update({name: value for name, (value, _) in variables.items()})

    def reselect(self, selection: Selection) -> None:
        """Replace the selection of the options. Local."""
        if self.options is not None:
            self.options = replace(self.options, selection=selection)
            registry.select(selection)

    def end(self) -> None:
        """Undo all of it, and the patches. Local."""
        if self.patches is not None:
            self.patches.undo()
        variables, self._variables = self._variables, {}
        for name, (value, before) in variables.items():
            if os.environ.get(name) == value:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before
        self.options = self.patches = None
        registry.select(None)


installation = Installation()
