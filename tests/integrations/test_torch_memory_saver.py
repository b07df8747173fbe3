"""Failure 28: the order between groups and a memory saver that pauses allocations.

slime#1690, #1786, #1895: releasing or rebuilding groups while torch_memory_saver has memory paused
leaves its account wrong, and its next call ends the process. The stand-in goes wrong by the same
rules; ``MemorySaver`` refuses a wrong order, and ``colocated`` keeps the right one.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.worlds import sums_right
from integrations.stand_ins import BYTES, StandInSaver

import reloadpg
from reloadpg.integrations import MemorySaver, colocated
from reloadpg.integrations.slime import (
    destroy_process_groups,
    monkey_patch_torch_dist,
    register_default_process_group,
    reload_process_groups,
)
from reloadpg.integrations.torch_memory_saver import MemorySaverError
from reloadpg.lifecycle.callbacks import callbacks
from reloadpg.testing import simulated

pytestmark = pytest.mark.matrix

CYCLES = 3
ACTIVE = 8 * BYTES + 8 * BYTES + 2 * BYTES
"""The trainer's two allocations and the communicators."""


def install() -> None:
    reloadpg.install(timeout=timedelta(seconds=20))


@contextmanager
def a_job(install: Callable[[], object] = install) -> Iterator[tuple[StandInSaver, Any]]:
    """A preloaded saver whose account has the trainer's memory; the communicators are connected."""
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    install()
    worlds.init("sim")
    group = dist.new_group([0, 1])
    bare = StandInSaver()
    bare.malloc("parameters", 8 * BYTES)
    bare.malloc("gradients", 8 * BYTES, tag="gradients")
    with bare.preloaded():
        assert sums_right(None, group)
        yield bare, group
    dist.destroy_process_group()


CASES: dict[str, tuple[list[str] | None, list[str]]] = {
    "all memory": (None, ["pause", "resume"]),
    "tags": (
        ["gradients", "default"],
        ["pause gradients", "pause default", "resume default", "resume gradients"],
    ),
    "one tag": (
        ["default"],
        ["pause gradients", "pause default", "resume default", "resume gradients"],
    ),
}
"""By case: the tags of the saver, and the calls of a cycle. Tags are resumed in reverse order.

With one tag the program pauses the other one itself, while the groups are live.
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_failure_28_three_rollouts_with_weight_updates_keep_the_right_order(case: str) -> None:
    """Sums are right by value, and between updates neither communicators nor tags hold memory.

    Each update happens twice and once within another. Outside a rollout ``groups_live`` is refused.
    """
    tags, calls = CASES[case]
    with a_job() as (bare, group):
        saver = MemorySaver(bare, tags=tags)
        rollout = colocated(saver=saver)
        with pytest.raises(reloadpg.ReloadpgError, match=r"within the colocated\(\) block"):
            rollout.groups_live().__enter__()
        for _ in range(CYCLES):
            if case == "one tag":
                saver.pause("gradients")
                assert sums_right(None, group)
            with rollout:
                assert (simulated.stats().held_bytes, bare.active_bytes) == (0, 0)
                assert saver.paused == (tuple(tags) if tags else ("*",))
                for _ in range(2):
                    with rollout.groups_live():
                        with rollout.groups_live():
                            pass
                        assert sums_right(None, group)
                        bare.malloc("a block that the caching allocator keeps", BYTES)
                    assert simulated.stats().held_bytes == 0
            if case == "one tag":
                saver.resume("gradients")
            assert sums_right(None, group)
            assert (bare.active_bytes, saver.paused) == (ACTIVE, ())
        assert bare.calls == calls * CYCLES
        saver.close()


@worlds.unbound_only
@pytest.mark.ranks(2)
def test_miles_keeps_the_parameters_until_the_weights_are_sent() -> None:
    """``--rematerialize-param-from-master-weight``, with what its actor changes for MemorySaver.

    Two errors name the changes: the reload for the update is ``outside_account()``, and memory is
    resumed by ``resume_all()``. The pause of ``param_buffer`` while groups are live is in place:
    it is not among the tags in which communicators allocate.
    """
    with a_job(monkey_patch_torch_dist) as (bare, group):
        register_default_process_group(timedelta(minutes=10))
        bare.malloc("parameters of miles", 2 * BYTES, tag="param_buffer")
        saver = MemorySaver(bare, tags=["gradients", "default"])
        for _ in range(CYCLES):
            destroy_process_groups()  # sleep()
            saver.pause("gradients")
            saver.pause("default")
            with pytest.raises(reloadpg.ReloadpgError, match=r"paused.*resume_all\(\)"):
                reload_process_groups()
            with saver.outside_account():  # update_weights()
                reload_process_groups()
                assert sums_right(group)
                saver.pause("param_buffer")
                destroy_process_groups()
            assert (bare.active_bytes, simulated.stats().held_bytes) == (0, 0)
            with pytest.raises(MemorySaverError, match=r"Call resume\(tag\) for each tag"):
                saver.resume()
            saver.resume_all()  # wake_up()
            saver.resume("param_buffer")
            reload_process_groups()
            assert sums_right(None, group)
            assert bare.active_bytes == ACTIVE + 2 * BYTES


@pytest.mark.ranks(2)
def test_failure_28_a_wrong_order_is_refused_with_the_call_to_make() -> None:
    """A pause with live groups and a reload with paused memory; the job continues afterwards.

    After a pause that failed the next one continues where it stopped.
    """
    with a_job() as (bare, group):
        saver = MemorySaver(bare)
        said = r"(?s)2 groups are live.*Call reloadpg.offload\(\) on all ranks first"
        with pytest.raises(MemorySaverError, match=said):
            saver.pause()
        said = r"pass the trainer's other tags: MemorySaver\(tags=\[...\]\)"
        for tags in (None, ["default", "param_buffer"]):
            with pytest.raises(MemorySaverError, match=said):
                MemorySaver(bare, tags=tags).pause("param_buffer")
        assert bare.calls == []
        assert sums_right(None, group)
        reloadpg.offload()
        bare.fail.append("pause")
        failed = r"pause\(tag=None\): the memory saver failed: RuntimeError"
        with pytest.raises(MemorySaverError, match=failed):
            saver.pause_all()
        assert saver.paused == ()
        saver.pause_all()
        said = r"(?s)reload while \* is paused.*Call resume_all\(\) first"
        with pytest.raises(reloadpg.ReloadpgError, match=said):
            reloadpg.reload()
        assert reloadpg.status().state == "offloaded"
        saver.resume_all()
        reloadpg.reload()
        assert sums_right(None, group)
        assert (saver.paused, bare.active_bytes) == ((), ACTIVE)
        assert bare.calls == ["pause", "resume"]
        saver.close()


@pytest.mark.ranks(2)
def test_failure_28_an_offload_while_one_rank_is_paused_fails_on_all_ranks(rank: int) -> None:
    """Before a group is touched."""
    with a_job() as (_, group):
        saver = MemorySaver(StandInSaver())
        if rank == 1:
            saver._everything = True  # as after a pause in a wrong order
        with pytest.raises(reloadpg.ReloadpgError, match=r"offload while \* is paused") as caught:
            reloadpg.offload()
        assert isinstance(caught.value, reloadpg.PeerFailedError) == (rank == 0)
        assert sums_right(None, group)
        assert reloadpg.status().state == "live"
        saver.resume()
        reloadpg.offload()
        saver.close()


def test_a_memory_saver_without_a_reference_registers_no_callbacks() -> None:
    """It registers one on each side, and both are removed with it."""

    def counts() -> tuple[int, int]:
        return len(callbacks.offload), len(callbacks.before_reload)

    before = counts()
    saver = MemorySaver(StandInSaver())
    assert counts() == (before[0] + 1, before[1] + 1)
    del saver
    gc.collect()
    assert counts() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"saver": object()}, "it has no pause()"),
        ({"saver": StandInSaver(), "tags": "default"}, "not a sequence of tags"),
        ({"saver": StandInSaver(), "tags": []}, "not a sequence of tags"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, Any], said: str) -> None:
    """A saver that cannot pause, and tags that are not tags, with what to pass."""
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=re.escape(said)):
        MemorySaver(**arguments)


def test_pausing_all_memory_while_one_tag_is_paused_is_refused() -> None:
    """It would end the process. Pausing by tag works."""
    bare = StandInSaver()
    for tag in ("a", "b"):
        bare.malloc(tag, 1, tag)
    saver = MemorySaver(bare, tags=["a", "b"])
    saver.pause("a")
    with pytest.raises(reloadpg.ReloadpgError, match=r"the tags \['a'\] are paused"):
        saver.pause()
    with pytest.raises(reloadpg.ReloadpgError, match=r"Call resume\(tag\) for each tag"):
        saver.resume()
    saver.pause("b")
    saver.resume("a")
    saver.resume("a")
    saver.resume("b")
    assert (bare.calls, saver.paused) == (["pause a", "pause b", "resume a", "resume b"], ())
    saver.pause()
    saver.resume("a")
    assert (saver.paused, saver.is_paused("b"), saver.is_paused("a")) == (("b",), True, False)
    saver.resume_all()
    assert saver.paused == ()


def test_other_methods_and_settings_are_those_of_the_saver() -> None:
    """They are read from the saver itself, and set on it."""
    bare = StandInSaver()
    saver = MemorySaver(bare)
    saver.memory_margin_bytes = 7
    assert vars(bare)["memory_margin_bytes"] == saver.memory_margin_bytes == 7
    assert saver.disable == bare.disable
    with pytest.raises(AttributeError, match="_nothing"):
        saver._nothing  # noqa: B018 - the look-up is what is tested


@pytest.mark.slow
def test_importing_the_package_imports_no_framework() -> None:
    """Its names load when they are used.

    Without torch_memory_saver, ``MemorySaver()`` says what to install.
    """
    program = """
import sys
import reloadpg.integrations as integrations
heavy = {"torch", "megatron", "ray", "torch_memory_saver", "vllm", "sglang"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert callable(integrations.colocated)
assert set(integrations.__all__) <= set(dir(integrations))
assert not (heavy - {"torch"}) & set(sys.modules)
sys.modules["torch_memory_saver"] = None
try:
    integrations.MemorySaver()
except ImportError as error:
    assert "pip install torch_memory_saver" in str(error), error
else:
    raise SystemExit("no error")
import reloadpg.integrations.slime, reloadpg.integrations.megatron
assert "megatron" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=280)
