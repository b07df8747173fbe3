"""The kinds of operations: a kind is a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RebuildError, ReleaseError, ReloadpgError


@dataclass(frozen=True)
class Kind:
    """What distinguishes offload, reload and recover for an :class:`~.operation.Operation`.

    Attributes:
        name: name of the function that users call.
        barriers: the barriers of an operation, in order, by strategy.
        touching: the barriers before which groups change: if an operation ends at one of them, the
            groups have failed.
        error: raised for a group that fails on this rank.
        releases: whether groups lose their communicators; otherwise they get new ones.
        whole: whether it replaces all communicators, whatever the state of their groups.
    """

    name: str
    barriers: Mapping[str, tuple[str, ...]]
    touching: frozenset[str]
    error: type[ReloadpgError]
    releases: bool = False
    whole: bool = False


OFFLOAD = Kind(
    "offload",
    {
        "recreate": ("enter", "released"),
        "suspend": ("enter", "quiesced", "suspended", "released"),
    },
    frozenset({"suspended", "released"}),
    ReleaseError,
    releases=True,
)

RELOAD = Kind(
    "reload",
    {"recreate": ("enter", "done"), "suspend": ("enter", "room", "resumed", "done")},
    frozenset({"resumed", "done"}),
    RebuildError,
)

RECOVER = Kind(
    "recover",
    {"recreate": ("enter", "done")},
    frozenset({"enter", "done"}),
    RebuildError,
    whole=True,
)
