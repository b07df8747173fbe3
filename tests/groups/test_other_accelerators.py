"""Backends of other accelerators: registered under ``PrivateUse1``, as their packages do.

Each is the simulated accelerator's under another name, so names, selection and order are shown, not
the vendors' libraries.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.testing import faults, simulated

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
    released = faults.Fault(
        "release", "call", times=None, moment="after", call=runtime.after_release
    )
    faults.inject(released)
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
@pytest.mark.parametrize("excluded", [False, True])
def test_a_runtime_that_breaks_with_its_last_communicator(excluded: bool, rank: int) -> None:
    """A group that bypasses keeps the process's state, and works all the time (failure 39)."""
    plug_in("npu", "hccl")
    reloadpg.install(exclude="anchor" if excluded else None)
    dist.init_process_group("hccl")
    anchor = dist.new_group([0, 1, 2], group_desc="anchor")
    for group in (None, anchor):
        summed(group, rank)
    reloadpg.offload()
    if not excluded:
        with pytest.raises(reloadpg.ReloadpgError, match="state is gone"):
            reloadpg.reload()
        return
    assert summed(anchor, rank) == 7.0
    reloadpg.reload()
    assert summed(None, rank) == 7.0
