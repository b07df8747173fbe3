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
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
import worlds
from stand_ins import BYTES, StandInSaver, attempt
from worlds import sums_right

import reloadpg
from reloadpg.groups.registry import registry
from reloadpg.integrations import MemorySaver, colocated
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.matrix

CYCLES = 3


def fresh(group: Any) -> StandInSaver:
    """A saver whose account has the trainer's memory; the communicators are connected."""
    saver = StandInSaver()
    saver.malloc("parameters", 8 * BYTES)
    saver.malloc("gradients", 8 * BYTES, tag="gradients")
    return saver


def connected(group: Any) -> None:
    """Communicators that a preloaded saver has seen coming."""
    reloadpg.offload()
    reloadpg.reload()
    assert sums_right(None, group)


def ordered(group: Any, tags: list[str] | None) -> dict[str, Any]:
    """Three rollouts with weight updates, each update twice and once within another."""
    bare = fresh(group)
    seen: dict[str, Any] = {"asleep": [], "update": [], "awake": []}
    with bare.preloaded():
        connected(group)
        saver = MemorySaver(bare, tags=tags)
        rollout = colocated(saver=saver)
        seen["too early"] = attempt(rollout.groups_live().__enter__)
        for _ in range(CYCLES):
            with rollout:
                held = simulated.stats().held_bytes
                seen["asleep"].append((held, bare.active_bytes, saver.paused))
                for _ in range(2):
                    with rollout.groups_live():
                        with rollout.groups_live():
                            pass
                        seen["update"].append(sums_right(None, group))
                        bare.malloc("a block that the caching allocator keeps", BYTES)
                    seen["update"].append(simulated.stats().held_bytes == 0)
            seen["awake"].append((sums_right(None, group), bare.active_bytes, saver.paused))
        saver.close()
    seen["calls"] = bare.calls
    return seen


def refused(group: Any) -> dict[str, Any]:
    """Each wrong order through MemorySaver, and that the job goes on."""
    bare = fresh(group)
    seen: dict[str, Any] = {}
    with bare.preloaded():
        connected(group)
        saver = MemorySaver(bare)
        seen["pause"] = attempt(saver.pause)
        seen["untouched"] = bare.calls == [] and sums_right(None, group)
        reloadpg.offload()
        bare.fail.append("pause")
        seen["failed"] = attempt(saver.pause_all), saver.paused
        saver.pause_all()
        seen["reload"] = attempt(reloadpg.reload)
        seen["state"] = reloadpg.status().state
        saver.resume_all()
        reloadpg.reload()
        seen["end"] = sums_right(None, group), saver.paused, bare.active_bytes
        seen["calls"] = bare.calls
        saver.close()
    return seen


def paused_first(group: Any) -> dict[str, Any]:
    """One rank has paused before there were groups."""
    saver = MemorySaver(fresh(group))
    if dist.get_rank() == 1:
        saver._switch(None, saver._saver.pause, "pause")
    assert sums_right(None, group)
    seen = {"offload": attempt(reloadpg.offload)}
    seen["still"] = sums_right(None, group), reloadpg.status().state
    saver.resume()
    reloadpg.offload()
    saver.close()
    return seen


def forgotten(group: Any) -> list[tuple[str, str]]:
    """A MemorySaver that nobody holds watches no more."""
    callbacks = registry.callbacks
    before = len(callbacks.offload), len(callbacks.before_reload)
    saver = MemorySaver(StandInSaver())
    during = len(callbacks.offload), len(callbacks.before_reload)
    del saver
    gc.collect()
    return [before, during, (len(callbacks.offload), len(callbacks.before_reload))]


def saver_job(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install(timeout=timedelta(seconds=20))
    worlds.init("sim")
    group = dist.new_group([0, 1])
    seen: dict[str, Any] = {"paused": paused_first(group)}
    for name, scenario in {
        "ordered": lambda group: ordered(group, None),
        "tags": lambda group: ordered(group, ["gradients", "default"]),
        "one tag": lambda group: ordered(group, ["default"]),
        "refused": refused,
        "forgotten": forgotten,
    }.items():
        seen[name] = scenario(group)
        reloadpg.reload()  # whatever a wrong order has left behind
        assert sums_right(None, group)
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(saver_job, 2, timeout=280)


class TestFailure28RightOrder:
    """With MemorySaver, the same saver never goes wrong, and the memory is really gone."""

    @pytest.mark.parametrize("case", ["ordered", "tags", "one tag"])
    def test_three_cycles(self, ranks: list[dict[str, Any]], case: str) -> None:
        """Three rollouts with weight updates: sums are right by value, and between the updates
        neither communicators nor paused tags hold memory."""
        left = 8 * BYTES if case == "one tag" else 0
        paused = {"ordered": ("*",), "tags": ("gradients", "default"), "one tag": ("default",)}
        for seen in ranks:
            found = seen[case]
            assert found["asleep"] == [(0, left, paused[case])] * CYCLES
            assert found["update"] == [True] * (4 * CYCLES)
            assert found["awake"] == [(True, 18 * BYTES, ())] * CYCLES

    def test_groups_are_live_only_within_a_rollout(self, ranks: list[dict[str, Any]]) -> None:
        """Outside it they are live anyway, and nothing may offload them: refused."""
        for seen in ranks:
            assert seen["ordered"]["too early"][0] == "ReloadpgError"
            assert "within the colocated() block" in seen["ordered"]["too early"][1]
            assert seen["ordered"]["calls"] == ["pause", "resume"] * CYCLES

    def test_tags_are_resumed_in_reverse(self, ranks: list[dict[str, Any]]) -> None:
        """Tags are paused in the order given and resumed in the reverse; others are left alone."""
        for seen in ranks:
            assert seen["tags"]["calls"] == [
                "pause gradients",
                "pause default",
                "resume default",
                "resume gradients",
            ] * (CYCLES)
            assert seen["one tag"]["calls"] == ["pause default", "resume default"] * CYCLES


class TestFailure28Refused:
    """A wrong order through MemorySaver is an error that says what to call, on all ranks."""

    def test_pause_with_live_groups(self, ranks: list[dict[str, Any]]) -> None:
        """pause() while groups are live changes nothing."""
        for seen in ranks:
            kind, text = seen["refused"]["pause"]
            assert kind == "MemorySaverError"
            assert "2 groups are live" in text
            assert "Call reloadpg.offload() on all ranks first" in text
            assert seen["refused"]["untouched"]

    def test_reload_while_paused(self, ranks: list[dict[str, Any]]) -> None:
        """reloadpg.reload() itself fails while memory is paused, and works once it is resumed."""
        for seen in ranks:
            kind, text = seen["refused"]["reload"]
            assert kind in ("ReloadpgError", "PeerFailedError")
            assert "reload while * is paused" in text
            assert "Call resume_all() first" in text
            assert seen["refused"]["state"] == "offloaded"
            assert seen["refused"]["end"] == (True, (), 18 * BYTES)

    def test_a_saver_that_fails_is_named(self, ranks: list[dict[str, Any]]) -> None:
        """A pause that fails says what is paused, and a second one goes on where it stopped."""
        for seen in ranks:
            (kind, text), paused = seen["refused"]["failed"]
            assert (kind, paused) == ("MemorySaverError", ())
            assert "pause(tag=None): the memory saver failed: RuntimeError" in text
            assert seen["refused"]["calls"] == ["pause", "resume"]

    def test_offload_while_one_rank_is_paused(self, ranks: list[dict[str, Any]]) -> None:
        """reloadpg.offload() fails on all ranks before a group is touched."""
        assert [seen["paused"]["offload"][0] for seen in ranks] == [
            "PeerFailedError",
            "ReloadpgError",
        ]
        for seen in ranks:
            assert "offload while * is paused" in seen["paused"]["offload"][1]
            assert seen["paused"]["still"] == (True, "live")


def test_a_saver_that_nobody_holds_is_forgotten(ranks: list[dict[str, Any]]) -> None:
    """A MemorySaver registers one callback on each side, and both go with it."""
    for seen in ranks:
        before, during, after = seen["forgotten"]
        assert during == (before[0] + 1, before[1] + 1)
        assert after == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"saver": object()}, "it has no pause()"),
        ({"saver": StandInSaver(), "tags": "default"}, "not a sequence of tags"),
        ({"saver": StandInSaver(), "tags": []}, "not a sequence of tags"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], said: str) -> None:
    """A saver that cannot pause, and tags that are none, are refused with what to pass."""
    with pytest.raises(reloadpg.InvalidOptionError, match=re.escape(said)):
        MemorySaver(**arguments)


def test_mixed_tags_are_not_paused_at_once() -> None:
    """All memory asked for while one tag is paused would end the process: refused, by tag works."""
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


def test_all_else_is_the_savers_own() -> None:
    """Other methods and settings are read from and set on the saver itself."""
    bare = StandInSaver()
    saver = MemorySaver(bare)
    saver.memory_margin_bytes = 7
    assert vars(bare)["memory_margin_bytes"] == saver.memory_margin_bytes == 7
    assert saver.disable == bare.disable
    with pytest.raises(AttributeError, match="_nothing"):
        saver._nothing  # noqa: B018 - the look-up is what is tested


def test_importing_the_package_imports_no_framework() -> None:
    """``reloadpg.integrations`` loads neither torch nor a framework; its names load when used, and
    without torch_memory_saver ``MemorySaver()`` says what to install."""
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
