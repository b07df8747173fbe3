"""Runs a program on real ranks twice: with torch alone, and with reloadpg and cycles.

A program is a module-level function ``program(run) -> results``. It creates its groups, computes,
and calls ``run.cycle()`` between its steps. In a plain run that does nothing; in a reloaded run it
offloads and reloads, and checks both.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from torch.utils._pytree import tree_flatten

import reloadpg
from reloadpg.testing import run_ranks

TIMEOUT = 280.0
"""Time limit of one launch, in seconds. Most take 10 s, compiled ones 60 s, on two cores."""


@dataclass
class Outcome:
    """The results of one rank, facts about its run, and the number of groups in each cycle."""

    results: Any
    facts: dict[str, Any]
    cycles: list[int]


@dataclass
class Run:
    """The context of a program on one rank."""

    rank: int
    world_size: int
    reloadable: bool
    facts: dict[str, Any] = field(default_factory=dict)
    cycles: list[int] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return worlds.device()

    def cycle(self, inside: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Offload, call ``inside()``, and reload with these options.

        In a plain run, only call ``inside()``. While groups are offloaded, their communicators are
        gone, and a collective raises. After the n-th reload each group is live in generation n,
        and c10d's tables hold the same objects and no inner group.
        """
        if not self.reloadable:
            return inside() if inside is not None else None
        groups, before = managed(), {id(group) for group in tables().pg_map}
        assert self.cycles or "default_pg" in {group.group_desc for group in groups}
        inner = {group.group_name: weakref.ref(group._managed.communicator) for group in groups}
        released = reloadpg.offload()
        assert len(released.groups) == len(groups)
        assert [name for name, ref in inner.items() if ref() is not None] == []
        for group in groups:
            assert str(group.state) == "offloaded"
            with pytest.raises(reloadpg.GroupOffloadedError):
                dist.all_reduce(torch.ones(1), group=group)
        result = inside() if inside is not None else None
        rebuilt = reloadpg.reload(**options)
        assert len(rebuilt.groups) >= len(groups)
        self.cycles.append(len(groups))
        for group in groups:
            assert (str(group.state), group.generation) == ("live", len(self.cycles))
            assert resolve(group.group_name) is group
            assert group in tables().pg_map
            assert group._managed.communicator not in tables().pg_map
        added = [group for group in tables().pg_map if id(group) not in before]
        assert len(added) == len(rebuilt.groups) - len(released.groups)
        return result


def managed() -> list[reloadpg.ReloadableProcessGroup]:
    """The reloadable groups that c10d's tables hold in this process."""
    return [g for g in tables().pg_map if isinstance(g, reloadpg.ReloadableProcessGroup)]


def tables() -> Any:
    return dist.distributed_c10d._world


def resolve(name: str) -> Any:
    """Look up a group by name, as compiled code and device meshes do."""
    return dist.distributed_c10d._resolve_process_group(name)


def run_program(
    rank: int, world_size: int, program: Callable[[Run], Any], reloadable: bool
) -> Outcome:
    """Run one rank of a program."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    if reloadable:
        reloadpg.install(backends={worlds.BACKEND})
    worlds.init()
    run = Run(rank, world_size, reloadable)
    results = program(run)
    assert reloadpg.is_installed() == reloadable
    dist.destroy_process_group()
    return Outcome(plain_values(results), run.facts, run.cycles)


def plain_values(value: Any) -> Any:
    """Replace tensors by detached CPU copies, which can be sent to the test process."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"return plain tensors, not {type(value).__qualname__}")
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return value


def same_results(
    program: Callable[[Run], Any], world_size: int, *, groups: int = 1, cycles: int = 3
) -> list[Outcome]:
    """Check that a program has the results that it has with torch alone, to the last bit.

    All groups take part in each cycle, which :meth:`Run.cycle` checks, and none survives an offload
    (failure 32).

    Args:
        program: see the module.
        world_size: number of ranks.
        groups: minimum number of reloadable groups per rank at the first cycle.
        cycles: number of cycles.

    Returns:
        The outcomes with cycles, in rank order.
    """
    plain, reloaded = (
        run_ranks(
            run_program,
            world_size,
            args=(program, reloadable),
            timeout=TIMEOUT,
            preload=getattr(sys.modules[program.__module__], "PRELOAD", ()),
        )
        for reloadable in (False, True)
    )
    for rank, (one, other) in enumerate(zip(plain, reloaded, strict=True)):
        leaves, kind = tree_flatten(one.results)
        others, other_kind = tree_flatten(other.results)
        assert kind == other_kind, f"rank {rank}"
        for left, right in zip(leaves, others, strict=True):
            if isinstance(left, torch.Tensor):
                torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
            else:
                assert left == right, f"rank {rank}"
        assert len(other.cycles) == cycles
        assert other.cycles[0] >= groups
    return reloaded
