"""Backends of other accelerators: registered under ``PrivateUse1``, as their packages do.

Each is the simulated accelerator's under another name, so names, selection and order are shown, not
the vendors' libraries.
"""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import sums_right

import reloadpg
from reloadpg.testing import simulated

pytestmark = pytest.mark.matrix


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


def plug_in(device: str, backend: str) -> None:
    """Register a backend as a vendor's package does."""
    simulated.register()
    simulated.configure(bytes_per_communicator=1 << 20)
    torch.utils.rename_privateuse1_backend(device)
    torch._register_device_module(device, Accelerator(f"torch.{device}"))
    create = dist.Backend._plugins["SIM"].creator_fn
    dist.Backend.register_backend(backend, create, extended_api=True, devices=[device])


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("device", "backend"), [("npu", "hccl"), ("musa", "mccl")])
@pytest.mark.parametrize("by_name", [False, True])
def test_groups_of_an_out_of_tree_backend_are_reloadable(
    device: str, backend: str, by_name: bool, rank: int
) -> None:
    """Without an option, since it serves an accelerator, and by its name in ``backends``."""
    plug_in(device, backend)
    reloadpg.install(backends={backend} if by_name else None)
    dist.init_process_group(backend)
    pairs = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [1, 2])]
    groups = [dist.group.WORLD, *(pair for ranks, pair in pairs if rank in ranks)]
    assert all(type(one) is reloadpg.ReloadableProcessGroup for one in groups)
    assert sums_right(*groups)
    for _ in range(2):
        report = reloadpg.offload()
        assert [one.strategy for one in report.groups] == ["recreate"] * len(groups)
        assert {one.backend for one in report.groups} == {backend}
        assert simulated.stats().held_bytes == 0
        reloadpg.reload()
        assert sums_right(*groups)
