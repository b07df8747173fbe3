"""Orders of a switch between training and generation, on a device with little room.

The communicators' memory is in a preloaded memory saver's record, and the stand-in for it ends the
program where torch_memory_saver would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.worlds import sums_right
from integrations.stand_ins import BYTES, Device, OutOfMemory, StandInSaver, VllmEngine

import reloadpg
from reloadpg.integrations import MemorySaver, MemorySaverError, colocated
from reloadpg.integrations.slime import (
    destroy_process_groups,
    monkey_patch_torch_dist,
    register_default_process_group,
    reload_process_groups,
)
from reloadpg.testing import simulated

pytestmark = worlds.unbound_only

CYCLES = 3


@contextmanager
def a_saver(**memory: int) -> Iterator[tuple[StandInSaver, Any]]:
    """A trainer's allocations by tag, and a connected group of two ranks."""
    bare = StandInSaver()
    for tag, size in memory.items():
        bare.malloc(f"its {tag}", size, tag=tag)
    with bare.preloaded():
        group = dist.new_group([0, 1])
        assert sums_right(None, group)
        yield bare, group
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_groups_stay_until_the_weights_are_sent() -> None:
    """One cycle in each iteration, where an update within the rollout makes two.

    The optimizer's memory goes first, by a separate tag, while the groups are live: without that
    the engine's weights have no room.
    """
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install(timeout=timedelta(seconds=60))
    worlds.init("sim")
    with a_saver(default=2 * BYTES, optimizer=4 * BYTES) as (bare, group):
        device = Device(8 * BYTES, bare)
        bare.room = device.need
        engine = VllmEngine(device, log := [])
        saver = MemorySaver(bare, tags=["default"])
        rollout = colocated(engine, saver=saver, wake_tags=["kv_cache"])
        with pytest.raises(OutOfMemory):
            engine.wake_up(["weights"])
        log.clear()
        for cycle in range(CYCLES):
            saver.pause("optimizer")
            engine.wake_up(["weights"])
            assert sums_right(None, group)  # the update of weights
            with rollout:
                assert engine.generate() == "sample"
                assert (simulated.stats().held_bytes, bare.active_bytes) == (0, 0)
            saver.resume("optimizer")
            assert sums_right(None, group)
            assert reloadpg.status().generation == cycle + 1
            assert bare.active_bytes == 8 * BYTES
        assert log == ["wake_up weights", "wake_up kv_cache", "generate", "sleep 1"] * CYCLES


@pytest.mark.ranks(2)
def test_miles_keeps_the_parameters_until_the_weights_are_sent() -> None:
    """``--rematerialize-param-from-master-weight``, with what its actor changes for MemorySaver.

    Two errors name the changes: the reload for the update is ``outside_account()``, and memory is
    resumed by ``resume_all()``. The pause of ``param_buffer`` while groups are live is in place:
    it is not among the tags in which communicators allocate.
    """
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    monkey_patch_torch_dist()
    worlds.init("sim")
    register_default_process_group(timedelta(minutes=10))
    memory = {"default": 4 * BYTES, "grad_buffer": 2 * BYTES, "param_buffer": 2 * BYTES}
    with a_saver(**memory) as (bare, group):
        saver = MemorySaver(bare, tags=["grad_buffer", "default"])
        for _ in range(CYCLES):
            destroy_process_groups()  # sleep()
            saver.pause("grad_buffer")
            saver.pause("default")
            with pytest.raises(reloadpg.ReloadpgError, match=r"paused.*resume_all\(\)"):
                reload_process_groups()
            with saver.outside_account():  # update_weights()
                reload_process_groups()
                sent = torch.ones(1)
                dist.broadcast(sent, 0, group=group)
                saver.pause("param_buffer")
                destroy_process_groups()
            assert (bare.active_bytes, simulated.stats().held_bytes) == (0, 0)
            with pytest.raises(MemorySaverError, match=r"Call resume\(tag\) for each tag"):
                saver.resume()
            saver.resume_all()  # wake_up()
            saver.resume("param_buffer")
            reload_process_groups()
            assert sums_right(None, group)
            assert bare.active_bytes == 10 * BYTES
        with pytest.raises(MemorySaverError, match=r"groups are live.*reloadpg.offload\(\)"):
            saver.pause("default")
