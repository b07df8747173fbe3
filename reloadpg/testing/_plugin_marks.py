"""What the plugin's marks say, checked before anything is started. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest

__all__ = ["PHASES", "RANKS", "PhasesMark", "RanksMark", "phases_mark", "ranks_mark"]

RANKS = "ranks"
PHASES = "reload_each_phase"

T = TypeVar("T")


@dataclass(frozen=True)
class RanksMark:
    """``@pytest.mark.ranks(...)``: the test's body runs on real ranks.

    Attributes:
        world_size: number of ranks.
        timeout: seconds until ranks that still run are ended and the test fails.
        backend: the default group is made with it before the body and destroyed afterwards;
            None leaves that to the body.
        env: variables set in the ranks; None removes one.
        start_method, store: as for ``reloadpg.testing.run_ranks``.
    """

    world_size: int
    timeout: float | None = None
    backend: str | None = None
    env: Mapping[str, str | None] | None = None
    start_method: Literal["forkserver", "spawn"] | None = None
    store: Literal["parent", "rank0"] = "parent"

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int):
            raise TypeError(f"world_size={self.world_size!r} is not a number of ranks")
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size} must be at least 1")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r} must be positive seconds")


@dataclass(frozen=True)
class PhasesMark:
    """``@pytest.mark.reload_each_phase(...)``: once as it is, once with reloads between.

    Attributes:
        every_group: whether a collective of any group begins a phase, and not only one of a
            group of all ranks.
        options: what ``reloadpg.install`` is given where the body does not call it itself; None
            makes the groups of every backend reloadable.
    """

    every_group: bool = False
    options: Mapping[str, Any] | None = None


def ranks_mark(node: pytest.Item) -> RanksMark | None:
    """The test's ``ranks`` mark; None if it has none.

    Raises:
        pytest.UsageError: the mark cannot be used as it is written.
    """
    return _read(node, RANKS, RanksMark, "ranks(2, timeout=60)")


def phases_mark(node: pytest.Item) -> PhasesMark | None:
    """The test's ``reload_each_phase`` mark; None if it has none.

    Raises:
        pytest.UsageError: the mark cannot be used as it is written.
    """
    return _read(node, PHASES, PhasesMark, "reload_each_phase")


def _read(node: pytest.Item, name: str, kind: Callable[..., T], example: str) -> T | None:
    mark = node.get_closest_marker(name)
    if mark is None:
        return None
    try:
        return kind(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(
            f"{node.nodeid}: the mark {name} cannot be used: {error}; nothing was run. Write for "
            f"example @pytest.mark.{example}."
        ) from None
