"""Order of the steps of a cycle."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.jobs import start

import reloadpg
from reloadpg.c10d import devices
from reloadpg.testing import faults, simulated


@pytest.mark.ranks(2)
def test_the_steps_of_a_cycle_are_in_order():
    """Callbacks release other libraries' buffers before the communicators (failure 18).

    The device has finished all work, also that of callbacks, before the first release. The caching
    allocator frees memory before the rebuild (failure 29). WORLD is released last and rebuilt
    first. A collective makes one Python call of the library, which forwards it (failure 30).
    """
    simulated.register()
    simulated.configure(eager=True)
    reloadpg.install(timeout=timedelta(seconds=20))
    worlds.init(simulated.NAME)
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.new_group([0, 1], group_desc="another")
    log = []
    for at, name in (("release", "release"), ("create", "rebuild")):
        faults.inject(faults.Fault(at, "call", times=None, call=lambda _, n=name: log.append(n)))
    empty, synchronize = devices.empty_cache, devices.synchronize
    devices.empty_cache = lambda: (log.append("empty cache"), empty())[1]
    devices.synchronize = lambda: (log.append("synchronize"), synchronize())[1]
    reloadpg.on_offload(lambda: log.append("on_offload"))
    reloadpg.on_reload(lambda: log.append("on_reload"))
    released, rebuilt = _groups_of_a_cycle()
    called = []

    def profile(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and "reloadpg" in module and "reloadpg.testing" not in module:
            called.append(frame.f_code.co_name)

    tensor = torch.ones(1)
    sys.setprofile(profile)
    dist.all_reduce(tensor)
    sys.setprofile(None)
    first = {name: log.index(name) for name in log}
    assert first["on_offload"] < first["synchronize"] < first["release"]
    assert first["release"] < first["empty cache"] < first["rebuild"]
    assert log[::-1].index("on_reload") < log[::-1].index("rebuild")
    assert rebuilt == ["default_pg", "pair", "another"]
    assert released[-1] == "default_pg"
    assert sorted(released) == sorted(rebuilt)
    assert pair.generation == 1
    assert (called, tensor.item()) == (["allreduce"], 2)


@pytest.mark.ranks(2)
def test_with_parallelism_1_groups_are_released_in_reverse_order_of_the_rebuild():
    """All ranks use this order."""
    start(parallelism=1)
    for index in range(6):
        dist.new_group([0, 1], group_desc=f"{index}")
    released, rebuilt = _groups_of_a_cycle()
    assert rebuilt == ["default_pg", "0", "1", "2", "3", "4", "5"]
    assert released == rebuilt[::-1]


def _groups_of_a_cycle():
    """The groups that an offload releases and a reload rebuilds, in the order of the reports."""
    return [[group.desc for group in step().groups] for step in (reloadpg.offload, reloadpg.reload)]
