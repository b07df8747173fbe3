"""DeepEP's buffers of V1 and HybridEP, with a stand-in that caches and exchanges as DeepEP does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import reloadpg
from reloadpg.errors import InvalidOptionError
from reloadpg.integrations.deep_ep import keep

PACKAGES = Path(__file__).parents[1] / "helpers" / "packages"

pytestmark = pytest.mark.matrix


def deep_ep() -> Any:
    sys.path.insert(0, str(PACKAGES))
    import deep_ep

    return deep_ep


def start() -> None:
    reloadpg.install(backends={"gloo"}, timeout=60)
    dist.init_process_group("gloo")


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_buffers_are_freed_before_the_offload_and_created_after_the_reload(rank: int) -> None:
    """On all members in one order: each of V1's exchanges handles with the others."""
    start()
    module = deep_ep()
    groups = [dist.group.WORLD, dist.new_group([0, 1, 2]), dist.new_group([1, 2])]
    mine = [group for group in groups if isinstance(group, dist.ProcessGroup)]

    def make(group: Any) -> Any:
        return lambda: module.Buffer(group, explicitly_destroy=True)

    kept = [keep(group, make(group)) for group in mine]
    hybrid = keep(mine[0], lambda: module.HybridEPBuffer(mine[0]))
    for _ in range(2):
        assert len(module.buffers.alive) == len(mine) + 1
        assert all(one.buffer.runtime == list(range(one.buffer.group.size())) for one in kept)
        module.buffers.events.clear()
        reloadpg.offload()
        assert module.buffers.alive == []
        assert [one.buffer for one in (*kept, hybrid)] == [None] * (len(mine) + 1)
        reloadpg.reload()
    ends = ["buffer destroyed"] * len(mine) + ["hybrid destroyed"]
    begins = ["buffer created", "hybrid created", *["buffer created"] * (len(mine) - 1)]
    assert module.buffers.events == ends + begins


@pytest.mark.ranks(2)
def test_a_buffer_that_cannot_be_freed_is_refused(rank: int) -> None:
    """Without explicitly_destroy at once; one that is referenced elsewhere, in the offload."""
    start()
    module = deep_ep()
    group = dist.group.WORLD
    with pytest.raises(InvalidOptionError, match="Pass explicitly_destroy=True"):
        keep(group, lambda: module.Buffer(group))
    kept = keep(group, lambda: module.HybridEPBuffer(group))
    other = kept.buffer
    with pytest.raises(reloadpg.ReloadpgError, match="still referenced"):
        reloadpg.offload()
    assert reloadpg.status().state == "live"
    del other
    reloadpg.offload()
    reloadpg.reload()
    assert kept.buffer is not None
