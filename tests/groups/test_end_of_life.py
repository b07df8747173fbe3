"""The end of a group with pending work."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import worlds

import reloadpg


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


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("how", "calls"), [("shutdown", ["wait", "shutdown"]), ("abort", ["abort"])]
)
@pytest.mark.skipif(
    worlds.BOUND or worlds.SPLITS_EVERY_GROUP,
    reason="torch asks every new group for one of the device",
)
def test_a_shutdown_waits_for_pending_work_and_an_abort_does_not(how, calls):
    """The pending work may be what the abort is to end; torch's abort does not wait either."""
    dist.Backend.register_backend("stuck", lambda *_: _Stuck(), extended_api=True, devices=["cpu"])
    reloadpg.install(backends={"stuck"}, min_size=1)
    worlds.init()
    group = dist.new_group([0], backend="stuck")
    stuck = group.communicator
    group._register_on_completion_hook(lambda _: None)
    getattr(group, how)()
    assert (stuck.log, group.state) == (calls, "destroyed")
