"""The end of a group: what waits for pending work, and what does not."""

from __future__ import annotations

import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.testing import run_ranks


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
    worlds.init("gloo")
    group, stuck = dist.new_group([0]), _Stuck()
    group._settings.calls.append(("_register_on_completion_hook", (), {}))
    group._inner, inner = stuck, group._inner
    getattr(group, how)()
    inner.shutdown()
    return stuck.log, str(group.state)


def test_only_a_shutdown_waits_for_pending_work():
    """An abort of what is stuck must not wait for it, as torch's does not."""
    assert run_ranks(_ends, 1, args=("shutdown",)) == [(["wait", "shutdown"], "destroyed")]
    assert run_ranks(_ends, 1, args=("abort",)) == [(["abort"], "destroyed")]
