"""The end of a group: what waits for pending work, and what does not."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import worlds

import reloadpg
from reloadpg.testing import run_ranks


class _Stuck(dist.ProcessGroup):
    """A live group with a completion hook, which of torch's own backends only NCCL's has."""

    def __init__(self):
        super().__init__(0, 1)
        self.log = []

    def getGroupName(self):
        return "stuck"

    group_name = property(getGroupName)

    def getBackendName(self):
        return "stuck"

    def _register_on_completion_hook(self, hook):
        pass

    def _wait_for_pending_works(self):
        self.log.append("wait")

    def shutdown(self):
        self.log.append("shutdown")

    def abort(self):
        self.log.append("abort")


def _ends(rank, world_size, how):
    dist.Backend.register_backend("stuck", lambda *_: _Stuck(), extended_api=True, devices=["cpu"])
    reloadpg.install(backends={"stuck"}, min_size=1)
    worlds.init()
    group = dist.new_group([0], backend="stuck")
    stuck = group.communicator
    group._register_on_completion_hook(lambda _: None)
    getattr(group, how)()
    return stuck.log, str(group.state)


@pytest.mark.skipif(
    worlds.BOUND or worlds.SPLITS_EVERY_GROUP,
    reason="torch asks every new group for one of the device",
)
def test_only_a_shutdown_waits_for_pending_work():
    """An abort of what is stuck must not wait for it, as torch's does not."""
    assert run_ranks(_ends, 1, args=("shutdown",)) == [(["wait", "shutdown"], "destroyed")]
    assert run_ranks(_ends, 1, args=("abort",)) == [(["abort"], "destroyed")]
