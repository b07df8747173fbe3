"""A library that keeps the communicator of a group, over torch's NCCL engines on the stand-ins.

``deep_ep`` is a stand-in that caches by group as DeepEP V2 does. The stand-in for NCCL records each
use of a communicator after its release, which fails the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.nccl_job import CAN_SUSPEND, on_engines, start, summed

import reloadpg
from reloadpg.errors import BorrowedError
from reloadpg.integrations.megatron import follow_expert_parallel
from reloadpg.testing import standins

pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
]

PACKAGES = Path(__file__).parent / "packages"


def deep_ep() -> Any:
    sys.path.insert(0, str(PACKAGES))
    import deep_ep

    return deep_ep


def buffer_of(group: Any) -> Any:
    return deep_ep().ElasticBuffer(group, explicitly_destroy=True)


def trained(rank: int, create: Callable[[Any], Any], cycles: int = 2) -> list[str]:
    """Create a buffer before each step, use it, and offload; the strategies of the offloads."""
    group = dist.new_group([0, 1])
    found = []
    for _ in range(cycles):
        assert summed(group, rank) == 3.0
        found.append(create(group).dispatch())
        report = reloadpg.offload()
        found += [one.strategy for one in report.groups if one.name == group.group_name]
        reloadpg.reload()
    return [str(one) for one in [*found, create(group).dispatch()]]


@on_engines(2)
def test_by_default_the_offload_is_refused(engine: str, rank: int) -> None:
    """Also if only one rank knows the holder, which the others' error names. Nothing was changed,
    and the buffer works.
    """
    start(rank)
    group = dist.new_group([0, 1])
    assert summed(group, rank) == 3.0
    buffer = buffer_of(group) if rank == 1 else None
    if rank == 0:
        group.barrier().wait()  # the one in the constructor
    error = BorrowedError if rank == 1 else reloadpg.PeerFailedError
    with pytest.raises(error, match=r"taken by deep_ep.utils.comm \(comm.py:.*on_offload"):
        reloadpg.offload()
    assert reloadpg.status().state == "live"
    assert summed(group, rank) == 3.0
    assert buffer is None or buffer.dispatch() == 2


@pytest.mark.skipif(not CAN_SUSPEND, reason="this torch cannot suspend")
@on_engines(2)
def test_suspended_groups_keep_what_was_borrowed(engine: str, rank: int) -> None:
    """The pointer stays valid, so nothing is refused. No released communicator is used."""
    start(rank, strategy="suspend")
    assert trained(rank, buffer_of) == ["2", "suspend", "2", "suspend", "2"]
    (one,) = [one for one in reloadpg.status().borrowed if one.raw]
    assert (one.by, one.ended, one.generation) == ("deep_ep.utils.comm", False, 0)


@pytest.mark.skipif(not CAN_SUSPEND, reason="this torch cannot suspend")
@on_engines(2)
def test_an_obstacle_on_one_rank_refuses_what_another_one_has_borrowed(
    engine: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups would be recreated. Nothing is changed on any rank."""
    start(rank, strategy="suspend")
    group = dist.new_group([0, 1])
    assert summed(group, rank) == 3.0
    if rank == 0:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    else:
        pointer = group._get_backend(torch.device("cuda"))._comm_ptr()  # type: ignore
        assert pointer
    error = BorrowedError if rank == 1 else reloadpg.PeerFailedError
    with pytest.raises(error, match=r"communicator pointer taken by"):
        reloadpg.offload()
    assert reloadpg.status().state == "live"
    assert summed(group, rank) == 3.0


@on_engines(2)
def test_a_callback_of_the_group_says_that_its_pointer_is_dropped(engine: str, rank: int) -> None:
    """The recipe for DeepEP: its buffer is destroyed before the generation ends, while the group is
    live, and created when the next one is. After a recovery nothing is called before.
    """
    start(rank)
    group = dist.new_group([0, 1])
    summed(group, rank)
    module, kept = deep_ep(), [buffer_of(group)]

    def destroy(group: Any, backend: Any) -> None:
        kept.pop().destroy()
        sys.modules["deep_ep.utils.comm"]._storage.pop(group)

    def create(group: Any, backend: Any) -> None:
        if kept:  # a recovery: the communicator of the buffer has ended
            kept.pop()
            sys.modules["deep_ep.utils.comm"]._storage.pop(group)
        summed(group, rank)  # connects the communicator
        kept.append(buffer_of(group))

    reloadpg.on_offload(destroy, group=group, package="deep_ep")
    reloadpg.on_reload(create, group=group, package="deep_ep")
    for cycle in range(3):
        assert (kept[0].dispatch(), summed(group, rank)) == (2, 3.0)
        report = reloadpg.offload()
        assert (kept, module.buffers.alive) == ([], [])
        assert standins.communicators() == 0
        assert {one.strategy for one in report.groups} == {"recreate"}
        reloadpg.reload()
        assert group.generation == cycle + 1  # type: ignore[union-attr]
    reloadpg.recovery.recover("a test")
    assert kept[0].dispatch() == 2
    assert module.buffers.alive == ["elastic"]
    reloadpg.offload()
    assert standins.uses_after_release() == []


@on_engines(2)
def test_megatrons_expert_parallel_state_follows_its_group(engine: str, rank: int) -> None:
    """Megatron creates DeepEP's buffer and NCCL's context again, on the group's next communicator.

    Without the one call the offload is refused. After a recovery the buffer is dropped, and the
    context cannot be ended: the error says to restart.
    """
    start(rank)
    group = dist.new_group([0, 1])
    summed(group, rank)
    deep_ep()
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    layers = [token_dispatcher._NCCLEPManager(group) for _ in range(2)]

    def step() -> list[int]:
        return [fused_a2a.get_elastic_buffer(group).dispatch(), *(one.dispatch() for one in layers)]

    assert step() == [2, 2, 2]
    with pytest.raises(reloadpg.ReloadpgError, match=r"(deep_ep|transformer_engine).*on_offload"):
        reloadpg.offload()
    remove = follow_expert_parallel(group)
    for _ in range(2):
        reloadpg.offload()
        assert (deep_ep().buffers.alive, standins.communicators()) == ([], 0)
        reloadpg.reload(connect="eager")
        assert step() == [2, 2, 2]
    remove()
    with pytest.raises(reloadpg.ReloadpgError, match="on_offload"):
        reloadpg.offload()
    follow_expert_parallel(group)
    with pytest.raises(reloadpg.ReloadpgError, match="Restart this process"):
        reloadpg.recovery.recover("a test")
    assert fused_a2a._elastic_buffer is None
    assert standins.uses_after_release() == []


@pytest.mark.skipif(not CAN_SUSPEND, reason="this torch has no NCCL backend for it")
@on_engines(2)
def test_a_tensor_of_symmetric_memory_is_known_by_its_rendezvous(engine: str, rank: int) -> None:
    """torch keeps the communicator in C++ by the group's name, and nothing drops it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    start(rank)
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    for one in (group, other):
        summed(one, rank)
    symmetric_memory.set_backend("NCCL")
    tensor = symmetric_memory.empty(16, device=torch.device("cuda", rank))
    assert reloadpg.status().borrowed == ()
    handle = symmetric_memory.rendezvous(tensor, group.group_name)  # type: ignore[union-attr]
    assert handle.world_size == 2
    (row,) = reloadpg.status().borrowed
    assert (row.group, row.what, row.by) == (group.group_name, "symmetric memory", __name__)  # type: ignore[union-attr]
    assert row.raw
    with pytest.raises((BorrowedError, reloadpg.PeerFailedError), match="symmetric memory"):
        reloadpg.offload()
    assert summed(group, rank) == 3.0
