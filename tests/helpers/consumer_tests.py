"""Tests of every consumer: its results equal those without reloadpg, and each cycle ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from helpers.consumer_run import (
    PLAIN,
    RELOADED,
    Outcome,
    Run,
    Setting,
    assert_identical,
    outcomes,
)


@dataclass(frozen=True)
class Consumer:
    """A program and its number of ranks."""

    program: Callable[[Run], Any]
    world_size: int
    plain: Setting = PLAIN
    reloaded: Setting = RELOADED
    groups: int = 1
    """Minimum number of reloadable groups per rank at the first cycle."""
    cycles: int = 3
    kept_sockets: int = 0
    """Maximum number of sockets of earlier gloo communicators that the consumer keeps open."""

    def without(self) -> list[Outcome]:
        return outcomes(self.program, self.world_size, self.plain)

    def with_cycles(self) -> list[Outcome]:
        setting = replace(self.reloaded, kept_sockets=self.kept_sockets)
        return outcomes(self.program, self.world_size, setting)


class ConsumerTests:
    """Tests of the ``consumer`` that a subclass names; all of them share two launches."""

    consumer: ClassVar[Consumer]

    def test_results_equal_the_run_without(self) -> None:
        """Losses, parameters and outputs are bit-identical to those of torch alone."""
        plain, reloaded = self.consumer.without(), self.consumer.with_cycles()
        assert not any(outcome.facts["reloadpg installed"] for outcome in plain)
        assert all(outcome.facts["reloadpg installed"] for outcome in reloaded)
        for rank, (one, other) in enumerate(zip(plain, reloaded, strict=True)):
            assert_identical(one.results, other.results, f"rank {rank}")

    def test_each_cycle_releases_and_rebuilds_every_group(self) -> None:
        """All groups take part in each cycle, which :meth:`Run.cycle` checks.

        No inner group survives an offload (failure 32), and every collective raises on any path,
        without a fallback to WORLD (failure 4).
        """
        for outcome in self.consumer.with_cycles():
            assert len(outcome.cycles) == self.consumer.cycles
            assert outcome.cycles[0] >= self.consumer.groups
