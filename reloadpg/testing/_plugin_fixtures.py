"""Fixtures of the plugin as context managers: made in the test's process, or in each rank."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from reloadpg import c10d
from reloadpg.groups.proxy import ReloadableProcessGroup

__all__ = ["GroupCensus", "assert_no_group_leaks", "made", "simulated_accelerator"]

_SIM_BYTES = 1 << 20
_SIM = "reloadpg.testing.simulated"
_NUMBERS = 64
"""Numbers are what torch names most groups: at least so many are looked up by name."""


def made(name: str, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """The context manager behind the fixture of that name."""
    managers: dict[str, Callable[..., AbstractContextManager[Any]]] = {
        "simulated_accelerator": simulated_accelerator,
        "assert_no_group_leaks": _around_test,
    }
    return managers[name](**settings)


@contextmanager
def simulated_accelerator(**settings: Any) -> Iterator[Any]:
    """Register and set up the simulated accelerator; take everything back at the end.

    Raises:
        AssertionError: the body passed, and communicators that it made still exist or were
            dropped without being released.
    """
    from reloadpg.testing import simulated

    simulated.register()
    state: Any = simulated._state
    kept = state.bytes_per_communicator, state.eager
    simulated.configure(**{"bytes_per_communicator": _SIM_BYTES, **settings})
    before, leaked = _communicators(), simulated.stats().leaked
    try:
        yield simulated
        gc.collect()
        left = [name for serial, name in _communicators().items() if serial not in before]
        dropped = simulated.stats().leaked - leaked
        problems = []
        if left:
            problems.append(f"{len(left)} communicators still exist: {', '.join(left)}")
        if dropped:
            problems.append(f"{dropped} communicators were dropped without shutdown or abort")
        if problems:
            raise AssertionError(
                f"the simulated accelerator: {'; '.join(problems)}. Destroy the groups that the "
                "test makes, at the end torch.distributed.destroy_process_group()."
            )
    finally:
        simulated.clear_faults()
        state.bytes_per_communicator, state.eager = kept


@dataclass(frozen=True)
class GroupCensus:
    """The process groups of this process at one moment.

    Attributes:
        groups: the groups in c10d's tables, by name, as text.
        tables: entries of each of c10d's tables.
        registered: names under which C++ finds a group.
        reloadable: names of the reloadable groups that exist, in the tables or not.
        communicators: names of the simulated accelerator's communicators, by a number of each.
    """

    groups: dict[str, str]
    tables: dict[str, int]
    registered: frozenset[str]
    reloadable: frozenset[str]
    communicators: dict[int, str]

    @classmethod
    def taken(cls, also: frozenset[str] = frozenset()) -> GroupCensus:
        """Count now. Local; runs a garbage collection.

        Args:
            also: names to look up in the C++ registry besides those that are known here; it
                cannot be listed.
        """
        gc.collect()
        groups = {c10d.name_of(group): _shown(group) for group in c10d.known_groups()}
        proxies = frozenset(
            one.group_name
            for one in gc.get_objects()
            if type(one) is ReloadableProcessGroup and one.state.value != "destroyed"
        )
        numbers = frozenset(str(number) for number in range(_NUMBERS))
        names = {*groups, *proxies, *also, *numbers}
        return cls(groups, c10d.table_sizes(), c10d.registered(names), proxies, _communicators())

    def left_since(self, before: GroupCensus) -> list[str]:
        """What is here now and was not before, in words; empty if nothing is."""
        found = [
            f"group {name!r} ({shown}) is still in c10d's tables"
            for name, shown in self.groups.items()
            if name not in before.groups
        ]
        found += [
            f"c10d's table {table} has {size} entries, {before.tables.get(table, 0)} before"
            for table, size in self.tables.items()
            if size > before.tables.get(table, 0)
        ]
        found += [
            f"C++ still finds a group by the name {name!r}"
            for name in sorted(self.registered - before.registered)
        ]
        found += [
            f"reloadable group {name!r} is not destroyed"
            for name in sorted(self.reloadable - before.reloadable)
        ]
        found += [
            f"the simulated accelerator still holds a communicator of group {name!r}"
            for serial, name in self.communicators.items()
            if serial not in before.communicators
        ]
        return found


@contextmanager
def assert_no_group_leaks() -> Iterator[None]:
    """No process group is left by this block. Local; for the fixture of that name, and without.

    Raises:
        AssertionError: the block passed and left something; the message lists it.
    """
    before = GroupCensus.taken()
    yield
    left = GroupCensus.taken(also=frozenset(before.groups)).left_since(before)
    if left:
        lines = "\n".join(f"  {one}" for one in left)
        raise AssertionError(
            f"process groups were left behind:\n{lines}\nDestroy them with "
            "torch.distributed.destroy_process_group(group); without an argument it destroys all."
        )


@contextmanager
def _around_test() -> Iterator[Any]:
    with assert_no_group_leaks():
        yield assert_no_group_leaks


def _communicators() -> dict[int, str]:
    simulated = sys.modules.get(_SIM)
    if simulated is None:
        return {}
    records: dict[int, Any] = simulated._state.ledger._live
    return {serial: record.name for serial, record in list(records.items())}


def _shown(group: Any) -> str:
    kind = "reloadable, " if isinstance(group, ReloadableProcessGroup) else ""
    ranks = c10d.ranks_of(group)
    members = list(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return f"{kind}{c10d.backend_of(group)}, ranks {members}"
