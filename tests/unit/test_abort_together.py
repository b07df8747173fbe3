"""Communicators that a failed operation leaves are aborted as one."""

from __future__ import annotations

from torch.distributed import distributed_c10d

from reloadpg import c10d


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
