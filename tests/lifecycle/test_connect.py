"""reload(connect=...): none, eager, canary."""

from __future__ import annotations

from datetime import timedelta

import moments
import pytest
import torch
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.testing import run_ranks


def _start(**options):
    reloadpg.install(backends={worlds.BACKEND}, timeout=timedelta(seconds=15), **options)
    worlds.init()
    return dist.new_group([0, 1]), dist.new_group([2, 1])


def _collectives(log):
    """Record every all-reduce that a live group is asked for, by group name."""
    original = reloadpg.ReloadableProcessGroup.allreduce

    def allreduce(self, *args, **kwargs):
        log.append(self.group_name)
        return original(self, *args, **kwargs)

    reloadpg.ReloadableProcessGroup.allreduce = allreduce


def _connect(rank, world_size, how):
    _start()
    log = []
    _collectives(log)
    reloadpg.offload()
    report = reloadpg.reload(connect=how)
    order = [group.name for group in report.groups]
    return log, order


def test_every_rebuilt_group_is_checked_in_the_shared_order():
    """One small all-reduce a group, in the order of the rebuild (failure 17)."""
    for log, order in run_ranks(_connect, 3, args=("canary",)):
        assert log == order
        assert len(log) >= 2  # WORLD and a pair at least


@pytest.mark.parametrize("how", ["none", "eager"])
def test_no_collective_is_run_where_none_is_needed(how):
    """By default each connects in its first collective, as torch does it; gloo has connected."""
    for log, order in run_ranks(_connect, 3, args=(how,)):
        assert log == []
        assert order


def _corrupt(rank, world_size):
    moments.wait_for_answers()
    _start()
    reloadpg.offload()
    original = reloadpg.ReloadableProcessGroup.allreduce

    def wrong(self, tensors, *args, **kwargs):
        work = original(self, tensors, *args, **kwargs)
        work.wait()
        if rank == 1 and self.group_name == "1":
            tensors[0] += 1
        return work

    reloadpg.ReloadableProcessGroup.allreduce = wrong
    try:
        reloadpg.reload(connect="canary")
        error = None
    except reloadpg.ReloadpgError as caught:
        error = type(caught).__name__, str(caught)
    states = sorted({group.state for group in reloadpg.status().groups})
    reloadpg.ReloadableProcessGroup.allreduce = original
    reloadpg.reload(connect="canary")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return error, states, tensor.item(), reloadpg.status().state


def test_a_wrong_canary_fails_the_reload_on_all_ranks():
    """The rank that saw it says so, the others name it; a second reload completes."""
    results = run_ranks(_corrupt, 3)
    assert results[1][0][0] == "RebuildError"
    assert "canary" in results[1][0][1]
    for rank in (0, 2):
        assert results[rank][0][0] == "PeerFailedError"
        assert "rank 1 failed" in results[rank][0][1]
    for _, states, total, state in results:
        assert states == ["failed"]
        assert total == 3
        assert state == "live"


def test_an_unknown_way_is_refused():
    """With those that there are. Ranks that ask for different ways: see ``test_pending.py``."""
    with pytest.raises(reloadpg.InvalidOptionError, match=r"'perhaps'.*'canary'"):
        reloadpg.reload(connect="perhaps")
