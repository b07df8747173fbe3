"""Tests of every consumer: results equal those without reloadpg, and each cycle took place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from consumer_run import (
    PLAIN,
    RELOADED,
    Cycle,
    Outcome,
    Run,
    Setting,
    assert_identical,
    outcomes,
    sockets_of_splits,
)

import reloadpg

STORE_SOCKETS = 2
"""Connections to the store: torch's own, and the one on which reloadpg's rendezvous waits."""

CREATORS = inspect.signature(reloadpg.install).parameters["parallelism"].default
"""Threads that create groups, each with a connection to the store."""


@dataclass(frozen=True)
class Consumer:
    """A program and how many ranks run it."""

    program: Callable[[Run], Any]
    world_size: int
    plain: Setting = PLAIN
    reloaded: Setting = RELOADED
    groups: int = 1
    """Reloadable groups that each rank holds at its first cycle, at least."""
    cycles: int = 3
    kept_sockets: int = 0
    """Sockets of earlier gloo communicators that the consumer itself keeps open, at most."""

    def without(self) -> list[Outcome]:
        return outcomes(self.program, self.world_size, self.plain)

    def with_cycles(self) -> list[Outcome]:
        return outcomes(self.program, self.world_size, self.reloaded)

    def each_cycle(self) -> list[tuple[int, Cycle]]:
        """Every cycle of every rank, with its number from 1."""
        return [
            (number, cycle)
            for outcome in self.with_cycles()
            for number, cycle in enumerate(outcome.cycles, 1)
        ]


class ConsumerTests:
    """Tests of a ``consumer``, which a subclass names; all of them read the same two launches."""

    consumer: ClassVar[Consumer]

    def test_results_equal_the_run_without(self) -> None:
        """Losses, parameters and outputs are bit-identical to those of torch alone."""
        plain, reloaded = self.consumer.without(), self.consumer.with_cycles()
        assert not any(outcome.facts["reloadpg installed"] for outcome in plain)
        assert all(outcome.facts["reloadpg installed"] for outcome in reloaded)
        for rank, (one, other) in enumerate(zip(plain, reloaded, strict=True)):
            assert_identical(one.results, other.results, f"rank {rank}")

    def test_every_group_is_rebuilt_in_every_cycle(self) -> None:
        """Each group, WORLD included, is live in generation n after the n-th reload."""
        for outcome in self.consumer.with_cycles():
            assert len(outcome.cycles) == self.consumer.cycles
            assert len(outcome.cycles[0].groups) >= self.consumer.groups
            assert "default_pg" in {group.desc for group in outcome.cycles[0].groups}
        for number, cycle in self.consumer.each_cycle():
            assert [g.generation_after for g in cycle.groups] == [number] * len(cycle.groups)
            assert {g.state_after for g in cycle.groups} == {"live"}
            assert cycle.released == len(cycle.groups)
            assert cycle.rebuilt >= len(cycle.groups)

    def test_old_communicators_are_gone_while_offloaded(self) -> None:
        """No inner group survives an offload, and its sockets are closed (failure 32)."""
        assert self.consumer.each_cycle()
        for _, cycle in self.consumer.each_cycle():
            assert [g.name for g in cycle.groups if not g.inner_gone] == []
            store = STORE_SOCKETS + min(CREATORS, len(cycle.groups))
            allowed = store + cycle.sockets_bypassed + self.consumer.kept_sockets
            allowed += sockets_of_splits(len(cycle.groups), cycle.bypassed)
            assert cycle.sockets_offloaded <= allowed

    def test_a_reload_opens_what_the_groups_need_and_no_more(self) -> None:
        """The sockets of one communicator for each group."""
        for _, cycle in self.consumer.each_cycle():
            assert cycle.sockets_after - cycle.sockets_offloaded == cycle.sockets_owned

    def test_every_collective_is_refused_while_offloaded(self) -> None:
        """On any path, and without a fallback to WORLD (failure 4)."""
        for _, cycle in self.consumer.each_cycle():
            for group in cycle.groups:
                assert group.state_offloaded == "offloaded"
                assert set(group.refused.values()) == {"GroupOffloadedError"}, group
                assert group.untouched

    def test_tables_hold_the_same_objects_after_a_reload(self) -> None:
        """c10d finds the same objects, by object and by name, and no inner group."""
        for _, cycle in self.consumer.each_cycle():
            assert [g.name for g in cycle.groups if not (g.in_tables and g.found_by_name)] == []
            assert cycle.strangers == cycle.rebuilt - cycle.released
