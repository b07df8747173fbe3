"""A job on the simulated accelerator whose groups can be suspended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.testing import simulated

MIB = 1 << 20
HELD = 32 * MIB
"""Bytes of each communicator; an eighth of them stays when it is suspended."""
STAYS = HELD // 8


class Job:
    """WORLD and overlapping subgroups, each used once."""

    def __init__(
        self,
        strategy: Any,
        *,
        subgroups: Sequence[Sequence[int]] = ((0, 1), (1, 2), (0, 1, 2)),
        bound: float = 20,
        used: bool = True,
        **configuration: Any,
    ) -> None:
        simulated.register()
        simulated.configure(bytes_per_communicator=HELD, **configuration)
        reloadpg.install(strategy=strategy, timeout=timedelta(seconds=bound))
        worlds.init("sim")
        self.rank = dist.get_rank()
        made = {
            f"g{i}": dist.new_group(list(r), group_desc=f"g{i}") for i, r in enumerate(subgroups)
        }
        mine = {
            name: group for name, group in made.items() if self.rank in subgroups[int(name[1:])]
        }
        self.groups: dict[str, Any] = {"WORLD": dist.group.WORLD, **mine}
        if used:
            self.sums()

    def sums(self, *names: str) -> bool:
        """Whether groups, all or those named, sum over their own members."""
        chosen = [group for name, group in self.groups.items() if not names or name in names]
        return worlds.sums_right(*chosen)

    def refused(self) -> bool:
        """Whether every group refuses a collective."""
        for group in self.groups.values():
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except reloadpg.GroupOffloadedError:
                continue
            return False
        return True

    def facts(self) -> dict[str, tuple[str, int]]:
        """State and generation, by group."""
        return {n: (str(g.state), g.generation) for n, g in self.groups.items()}


def chosen(report: Any) -> dict[str, str]:
    """The strategy of each group, by its description; that of WORLD by "WORLD"."""
    return {group.desc.replace("default_pg", "WORLD"): group.strategy for group in report.groups}


def reasons(report: Any) -> dict[str, str]:
    return {group.desc.replace("default_pg", "WORLD"): group.reason for group in report.groups}
