"""Communicators that a failed operation leaves are aborted as one."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

import reloadpg
from reloadpg import c10d
from reloadpg.testing import run_ranks


class _Nccl:
    """Stands for torch's NCCL backend, which a CPU build does not have."""

    def __init__(self, log):
        self.log = log

    def _group_start(self):
        self.log.append("start")

    def _group_end(self):
        self.log.append("end")

    def abort(self):
        self.log.append("abort")


def test_nccl_communicators_are_aborted_inside_one_bracket(monkeypatch):
    """One by one they hang each other (failure 19); shown for the calls, not on real NCCL."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", _Nccl, raising=False)
    log = []
    parts = [_Nccl(log), _Nccl(log), _Nccl(log)]
    with c10d.together(parts):
        for part in parts:
            part.abort()
    assert log == ["start", "abort", "abort", "abort", "end"]


class _Stuck:
    """Stands for a live NCCL group with a completion hook, which needs a GPU."""

    def __init__(self):
        self.log = []

    def _has_hooks(self):
        return True

    def _wait_for_pending_works(self):
        self.log.append("wait")

    def shutdown(self):
        self.log.append("shutdown")

    def abort(self):
        self.log.append("abort")


def _ends(rank, world_size, how):
    reloadpg.install(backends={"gloo"}, min_size=1)
    dist.init_process_group("gloo")
    group, stuck = dist.new_group([0]), _Stuck()
    group._inner, inner = stuck, group._inner
    getattr(group, how)()
    inner.shutdown()
    return stuck.log, str(group.state)


def test_only_a_shutdown_waits_for_pending_work():
    """An abort of what is stuck must not wait for it, as torch's does not."""
    assert run_ranks(_ends, 1, args=("shutdown",)) == [(["wait", "shutdown"], "destroyed")]
    assert run_ranks(_ends, 1, args=("abort",)) == [(["abort"], "destroyed")]
