"""The marks of the pytest plugin, and their arguments. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import pytest

from ..settings import as_flag, as_integer, as_names, as_timedelta

RANKS = "ranks"
PHASES = "reload_each_phase"
POINT = "reload_point"

T = TypeVar("T")


@dataclass(frozen=True)
class RanksMark:
    """``@pytest.mark.ranks(...)``: the body of the test runs on real ranks.

    Attributes:
        world_size: number of ranks.
        timeout: time after which running ranks are ended and the test fails; a timedelta, or
            seconds.
        backend: backend of the default group that is created before the body and destroyed
            afterwards; None creates no group.
        env: variables set in the ranks; None removes one.
        preload, start_method, store, standins: as for ``reloadpg.testing.run_ranks``.
    """

    world_size: int
    timeout: timedelta | float | None = None
    backend: str | None = None
    env: Mapping[str, str | None] | None = None
    preload: Sequence[str] = ()
    start_method: Literal["forkserver", "spawn"] | None = None
    store: Literal["parent", "rank0"] = "parent"
    standins: bool | None = None

    def __post_init__(self) -> None:
        size = as_integer(self.world_size)
        if size is None:
            raise TypeError(f"world_size={self.world_size!r} is not a number of ranks")
        if size < 1:
            raise ValueError(f"world_size={self.world_size} must be at least 1")
        if self.timeout is not None:
            as_timedelta(self.timeout, "timeout")
        if not isinstance(self.backend, str | None):
            raise TypeError(f"backend={self.backend!r} is not the name of a backend")
        if not isinstance(self.env, Mapping | None):
            raise TypeError(f"env={self.env!r} is not a mapping of variables to values")
        if isinstance(self.preload, str) or as_names(self.preload) is None:
            raise TypeError(f"preload={self.preload!r} is not a sequence of names of modules")
        if self.start_method not in (None, "forkserver", "spawn"):
            raise ValueError(f"start_method={self.start_method!r} is not 'forkserver' or 'spawn'")
        if self.store not in ("parent", "rank0"):
            raise ValueError(f"store={self.store!r} is not 'parent' or 'rank0'")
        if self.standins is not None:
            as_flag(self.standins, "standins")


@dataclass(frozen=True)
class PhasesMark:
    """``@pytest.mark.reload_each_phase(...)``: run unchanged, and with reloads between phases.

    Attributes:
        every_group: whether a collective of any group begins a phase, and not only one of a
            group of all ranks.
        options: options of ``reloadpg.install`` if the body does not call it; None makes the
            groups of every backend reloadable.
    """

    every_group: bool = False
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        as_flag(self.every_group, "every_group")
        if not isinstance(self.options, Mapping | None):
            raise TypeError(f"options={self.options!r} is not a mapping of options of install")


def mark_of(node: pytest.Item, kind: type[T]) -> T | None:
    """The test's mark of this kind; None if it has none."""
    name, example = (RANKS, "ranks(2, timeout=60)") if kind is RanksMark else (PHASES, PHASES)
    mark = node.get_closest_marker(name)
    if mark is None:
        return None
    try:
        return kind(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        why = str(error).replace(f"{kind.__name__}.__init__()", "it").partition("; nothing")[0]
        raise failed(
            f"the mark {name} cannot be used: {why}; nothing was run. Write for example "
            f"@pytest.mark.{example}."
        ) from None


def failed(message: str) -> BaseException:
    """Return pytest's exception for a failure that is one message, without source."""
    return pytest.fail.Exception(message, pytrace=False)
