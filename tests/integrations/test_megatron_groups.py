"""``reloadpg.integrations.megatron``: nothing of the parallel state is left behind.

megatron-core is in the ``test`` extra; without it these tests fail, they are not skipped. What its
own getters, layers and schedules do through cycles is in ``tests/consumers/test_megatron.py``.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import weakref
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.worlds import sums_right
from integrations.stand_ins import BYTES

import reloadpg
from reloadpg.integrations import megatron
from reloadpg.testing import simulated

pytestmark = worlds.unbound_only

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "hybrid cp4": {
        "context_parallel_size": 4,
        "hybrid_context_parallel": True,
        "create_gloo_process_groups": False,
    },
}
HIERARCHY = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
"""Hierarchical context parallel groups; megatron-core builds them with another package
(einops), so they are put in place here."""


def known() -> list[str]:
    """Names of all groups in c10d's tables, in order."""
    return list(dist.distributed_c10d._world.pg_names.values())


def in_group(group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def left() -> dict[str, Any]:
    """What exists of groups, everywhere."""
    assert sums_right(None)  # WORLD connected, as at the start
    gc.collect()
    tables: Any = dist.distributed_c10d._world
    return {
        "c10d": known(),
        "ranks": sum(isinstance(group, dist.ProcessGroup) for group in tables.pg_group_ranks),
        "tags": sum(len(groups) for groups in tables.tags_to_pg.values()),
        "status": [group.name for group in reloadpg.status().groups],
        "memory": simulated.stats().held_bytes,
        "live": simulated.stats().live,
    }


def start() -> dict[str, Any]:
    """Begin a job on the simulated accelerator; return what exists of groups."""
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install()
    worlds.init("sim")
    return left()


def check_names(before: dict[str, Any]) -> None:
    """The groups in c10d's tables and in ``status`` are those of the start."""
    now = left()
    assert (now["c10d"], now["status"]) == (before["c10d"], before["status"])


def nothing_is_left_of_a_layout(rank: int, before: dict[str, Any]) -> None:
    """Its sums are right by value before and after a cycle.

    After the block c10d's tables, ``status`` and the device hold what they held before, and no
    reference to a group of the layout is left.
    """
    from megatron.core import parallel_state

    for name, options in LAYOUTS.items():
        with megatron.initialize_model_parallel(**options):
            if name == "hybrid cp4":
                parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = [
                    next(g for g in [parallel_state.create_group(r) for r in level] if in_group(g))
                    for level in HIERARCHY
                ]
            made = [*filter(None, parallel_state._global_process_group_list)]
            assert sums_right(*made)
            reloadpg.offload()
            reloadpg.reload()
            assert sums_right(*made)
            watched = [weakref.ref(group) for group in made]
            del made
        assert left() == before
        assert watched
        assert [ref() for ref in watched] == [None] * len(watched)


def a_layout_that_is_destroyed_while_offloaded_or_that_fails_leaves_only_world(
    rank: int, before: dict[str, Any]
) -> None:
    """An error in megatron-core's function, or in the block, is raised. A second layout is refused
    with the call to make."""
    megatron.initialize_model_parallel(tensor_model_parallel_size=2)
    said = r"Call reloadpg.integrations.megatron.destroy_model_parallel\(\)"
    with pytest.raises(reloadpg.ReloadpgError, match=said):
        megatron.initialize_model_parallel()
    reloadpg.offload()
    megatron.destroy_model_parallel()
    megatron.destroy_model_parallel()
    assert known() == before["c10d"]
    assert len(reloadpg.reload().groups) == 1

    def embedding(*args: Any) -> list[int]:
        raise KeyError("half-way")

    with pytest.raises(KeyError, match="half-way"):
        megatron.initialize_model_parallel(
            tensor_model_parallel_size=2,
            get_embedding_ranks=embedding,
            create_gloo_process_groups=False,  # they meet in their creation, and nowhere else here
        )
    check_names(before)
    with (
        pytest.raises(KeyError, match="body"),
        megatron.initialize_model_parallel(pipeline_model_parallel_size=2),
    ):
        assert sums_right(None)  # no rank is still creating groups
        raise KeyError("body")
    check_names(before)


class DeepepBuffer:
    """DeepEP's ``Buffer`` or ``HybridEPBuffer``: it uses the communicator of its creation.

    Its end is a barrier of the group, as DeepEP's is.
    """

    alive: ClassVar[list[DeepepBuffer]] = []

    explicitly_destroy = True

    def __init__(self, group: Any, *sizes: int, **_: Any) -> None:
        self.group, self.generation = group, group.generation
        self.num_nvl_bytes, self.num_rdma_bytes = sizes or (0, 0)
        self.alive.append(self)
        group.barrier().wait()

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden, size: hidden * size,
            get_rdma_buffer_size_hint=lambda hidden, size: 0,
        )

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        assert self.generation == self.group.generation
        self.group.barrier().wait()
        self.alive.remove(self)


def expert_parallel_buffers_follow_their_group(rank: int, before: dict[str, Any]) -> None:
    """megatron-core's own functions create each again, although its group is the same object.

    Without ``follow_expert_parallel`` they return the buffer of an ended communicator. The buffers
    are destroyed while the group is live, and before ``destroy_model_parallel`` ends it.
    """
    deep_ep: Any = ModuleType("deep_ep")
    deep_ep.Buffer = deep_ep.HybridEPBuffer = DeepepBuffer
    deep_ep.utils = sys.modules["deep_ep.utils"] = ModuleType("deep_ep.utils")
    deep_ep.utils.EventHandle = deep_ep.utils.EventOverlap = object
    sys.modules["deep_ep"] = deep_ep
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a

    importlib.reload(fused_a2a)
    assert fused_a2a.HAVE_DEEP_EP
    megatron.initialize_model_parallel(expert_model_parallel_size=2)
    group: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
    for follows in (False, True):
        stop = megatron.follow_expert_parallel() if follows else (lambda: None)
        first = fused_a2a.get_buffer(group, 64)
        fused_a2a.init_hybrid_ep_buffer(group, 64, 8, 2, 1, 1, False)
        assert fused_a2a.get_buffer(group, 64) is first
        reloadpg.offload()
        assert len(DeepepBuffer.alive) == (0 if follows else 2)
        assert (fused_a2a._hybrid_ep_buffer is None) == follows
        reloadpg.reload()
        again = fused_a2a.get_buffer(group, 64)
        assert (again is first) != follows
        assert (again.generation == group.generation) == follows
        if not follows:  # what such a program does by hand
            DeepepBuffer.alive.clear()
            fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None
    reloadpg.recovery.recover("a test")
    assert fused_a2a._buffer is None
    DeepepBuffer.alive.clear()
    assert fused_a2a.get_buffer(group, 64).generation == group.generation
    stop()
    megatron.destroy_model_parallel()
    assert (DeepepBuffer.alive, fused_a2a._buffer) == ([], None)
    check_names(before)


def destroy_model_parallel_ends_the_groups_that_megatron_has_built_itself(
    rank: int, before: dict[str, Any]
) -> None:
    """It bypasses a user's group. megatron-core's own function leaves ten or more groups."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    mine = dist.new_group([0, 1, 2, 3], group_desc="a user's own")
    assert megatron.destroy_model_parallel() >= 10
    assert [name for name in known() if name != mine.group_name] == before["c10d"]
    assert sums_right(mine)
    dist.destroy_process_group(mine)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert sums_right(None)
    parallel_state.destroy_model_parallel()
    assert len(known()) - 1 >= 10


def a_rank_that_does_not_come_to_destroy_model_parallel_is_named(
    rank: int, before: dict[str, Any]
) -> None:
    """Nothing is destroyed, and the next call on all ranks succeeds.

    Rank 3 comes when the others have given up. A rank that is slower than those raises with them.
    """
    from megatron.core import parallel_state

    os.environ |= worlds.SILENCE
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = known()
    if rank == 3:
        assert sums_right(None)
    with pytest.raises(reloadpg.RendezvousTimeoutError, match="destroy_model_parallel") as caught:
        megatron.destroy_model_parallel(timedelta(seconds=1))
    assert 3 in caught.value.missing
    if rank != 3:
        assert sums_right(None)
    assert known() == groups
    megatron.destroy_model_parallel()
    check_names(before)


def test_without_megatron_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match=r"pip install 'reloadpg\[megatron\]'"):
        megatron.initialize_model_parallel()


@pytest.mark.slow
@pytest.mark.ranks(4, preload=["megatron.core"])
def test_the_groups_of_megatron_on_four_ranks(rank: int) -> None:
    """One behaviour after the other, in one job: importing megatron-core is what takes long.

    Without a default group, ``initialize_model_parallel`` says so before megatron-core fails.
    """
    with pytest.raises(reloadpg.ReloadpgError, match="no default group"):
        megatron.initialize_model_parallel()
    before = start()
    for behaviour in (
        expert_parallel_buffers_follow_their_group,
        nothing_is_left_of_a_layout,
        a_layout_that_is_destroyed_while_offloaded_or_that_fails_leaves_only_world,
        a_rank_that_does_not_come_to_destroy_model_parallel_is_named,
        destroy_model_parallel_ends_the_groups_that_megatron_has_built_itself,
    ):
        behaviour(rank, before)
