"""Backends of other accelerators: registered under ``PrivateUse1``, as their packages do.

Each is the simulated accelerator's under another name, so names, selection and order are shown, not
the vendors' libraries.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg import StrategyPolicy
from reloadpg.errors import InvalidOptionError
from reloadpg.extend import managed
from reloadpg.testing import simulated

pytestmark = pytest.mark.matrix

MIB = 1 << 20
PAIRS = [[0, 1], [1, 2]]


class Accelerator(types.ModuleType):
    """What torch and the library ask an accelerator's module: it is not in use."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


class Runtime:
    """A runtime that breaks when the last communicator of the process is destroyed (failure 39)."""

    def __init__(self, create: Any) -> None:
        self._create = create
        self.broken = False

    def create(self, received: Any, options: object) -> Any:
        if self.broken:
            raise RuntimeError("the runtime's state is gone with its last communicator")
        return self._create(received, options)

    def after_release(self, info: object) -> None:
        connected = [one for one in simulated.groups() if one.state == "connected"]
        self.broken = self.broken or not connected


def plug_in(device: str, backend: str) -> Runtime:
    """Register a backend as a vendor's package does."""
    simulated.register()
    simulated.configure(bytes_per_communicator=MIB)
    runtime = Runtime(dist.Backend._plugins["SIM"].creator_fn)
    torch.utils.rename_privateuse1_backend(device)
    torch._register_device_module(device, Accelerator(f"torch.{device}"))
    dist.Backend.register_backend(backend, runtime.create, extended_api=True, devices=[device])
    released = simulated.Fault(
        "release", "call", times=None, moment="after", call=runtime.after_release
    )
    simulated.inject(released)
    return runtime


def summed(group: Any, rank: int) -> float:
    tensor = torch.tensor([2.0**rank])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def groups_of(rank: int) -> dict[str, Any]:
    """WORLD and the pairs of which a rank is a member, all used."""
    made = {"world": dist.group.WORLD}
    for pair in PAIRS:
        group = dist.new_group(pair, group_desc=f"pair{pair[0]}")
        if rank in pair:
            made[f"pair{pair[0]}"] = group
    for group in made.values():
        summed(group, rank)
    return made


def sums(made: dict[str, Any], rank: int) -> dict[str, float]:
    return {name: summed(group, rank) for name, group in made.items()}


def expected(made: dict[str, Any]) -> dict[str, float]:
    members = {name: dist.get_process_group_ranks(group) for name, group in made.items()}
    return {name: sum(2.0**one for one in ranks) for name, ranks in members.items()}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("device", "backend"), [("npu", "hccl"), ("musa", "mccl")])
@pytest.mark.parametrize("by_name", [False, True])
def test_groups_of_an_out_of_tree_backend_are_reloadable(
    device: str, backend: str, by_name: bool, rank: int
) -> None:
    """Without an option, since it serves an accelerator, and by its name in ``backends``."""
    runtime = plug_in(device, backend)
    reloadpg.install(backends={backend} if by_name else None)
    dist.init_process_group(backend)
    made = groups_of(rank)
    assert all(type(one) is reloadpg.ReloadableProcessGroup for one in made.values())
    for _ in range(2):
        report = reloadpg.offload()
        assert [one.strategy for one in report.groups] == ["recreate"] * len(made)
        assert {one.backend for one in report.groups} == {backend}
        assert simulated.stats().held_bytes == 0
        runtime.broken = False  # this runtime does not care
        reloadpg.reload()
        assert sums(made, rank) == expected(made)


@pytest.mark.ranks(3)
def test_a_runtime_that_breaks_without_an_anchor() -> None:
    """So that the test below proves something (failure 39)."""
    plug_in("npu", "hccl")
    reloadpg.install()
    dist.init_process_group("hccl")
    summed(None, 0)
    reloadpg.offload()
    with pytest.raises(reloadpg.ReloadpgError, match="state is gone"):
        reloadpg.reload()


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", ["recreate", "suspend"])
@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("*", [["pair0"], ["pair0", "pair1"], ["pair1"]]),
        ("pair0", [["pair0"], ["pair0"], []]),
        ("default_pg", [["world"]] * 3),
    ],
)
def test_an_anchor_stays_alive_on_each_rank(
    strategy: str, pattern: str, kept: list[list[str]], rank: int
) -> None:
    """The smallest used group of each rank that matches; all of its members keep it.

    An anchor refuses collectives until the reload, like the others. It is reported with the reason;
    a rank without one has a warning. The runtime that breaks is whole in every cycle where each
    rank has one (failure 39).
    """
    runtime = plug_in("npu", "hccl")
    reloadpg.install(strategy=StrategyPolicy(strategy, anchor=pattern))
    dist.init_process_group("hccl")
    made = groups_of(rank)
    names = {group.group_name: name for name, group in made.items()}
    never_used = dist.new_group([0, 1, 2], group_desc="unused")
    inner = {name: weakref.ref(managed(group).communicator) for name, group in made.items()}
    for cycle in range(1, 3):
        report = reloadpg.offload()
        stayed = [names[one.name] for one in report.groups if "stays alive" in one.reason]
        assert sorted(stayed) == kept[rank]
        if strategy == "recreate":
            assert simulated.stats().held_bytes == MIB * len(stayed)
        missing = [text for text in report.warnings if "no communicator of this rank" in text]
        assert len(missing) == (not stayed)
        for group in made.values():
            with pytest.raises(reloadpg.GroupOffloadedError):
                summed(group, rank)
        if not stayed:
            runtime.broken = False  # what the warning is about
        reloadpg.reload()
        assert sums(made, rank) == expected(made)
        for name, group in made.items():
            same = name in kept[rank] or strategy == "suspend"
            assert (managed(group).communicator is inner[name]()) == same  # type: ignore[union-attr]
            assert group.generation == (0 if same else cycle)
    assert summed(never_used, rank) == 7.0


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_the_anchor_disagree(rank: int) -> None:
    """Nothing is changed then."""
    plug_in("npu", "hccl")
    reloadpg.install(strategy=StrategyPolicy(anchor="*" if rank else ""))
    dist.init_process_group("hccl")
    summed(None, rank)
    with pytest.raises(reloadpg.DisagreementError, match="strategy is"):
        reloadpg.offload()
    assert summed(None, rank) == 3.0


def test_an_anchor_is_a_pattern() -> None:
    with pytest.raises(InvalidOptionError, match="nothing was installed"):
        StrategyPolicy(anchor=3)  # type: ignore[arg-type]
    assert str(StrategyPolicy("suspend", anchor="*")) == "suspend (anchor '*')"
