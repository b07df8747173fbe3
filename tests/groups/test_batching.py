"""batch_isend_irecv on a reloadable group is one coalesced operation, as on a plain group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg.groups import dispatch

pytestmark = pytest.mark.matrix


class _Coalescing(ProcessGroup):
    """An inner group whose backend coalesces, as NCCL's does; it records the calls."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.calls = []

    def _get_backend(self, device):
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device):
        self.calls.append("start")

    def _end_coalescing(self, device=None):
        self.calls.append("end")
        return dispatch.COMPLETED_WORK

    def send(self, tensors, peer, tag):
        self.calls.append(f"send {peer}")
        return dispatch.COMPLETED_WORK

    def recv(self, tensors, peer, tag):
        self.calls.append(f"recv {peer}")
        return dispatch.COMPLETED_WORK


def _batch(group):
    return [
        dist.P2POp(dist.isend, torch.ones(1), 1, group),
        dist.P2POp(dist.irecv, torch.ones(1), 1, group),
    ]


@pytest.mark.ranks(1)
def test_a_batch_on_a_reloadable_group_is_coalesced():
    """Issued one by one, two NCCL ranks that both send first wait for each other; torch 2.8 and
    2.13 look at the group's type (failure 15). A batch on an offloaded group leaves no coalescing
    open, and ``uninstall`` restores torch's function.
    """
    early = dist.batch_isend_irecv
    dist.Backend.register_backend(
        "coalescing", lambda *_: _Coalescing(0, 2), extended_api=True, devices=["cpu"]
    )
    reloadpg.install(backends={"coalescing"})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.new_group([0, 1], backend="coalescing")
    for work in dist.batch_isend_irecv(_batch(group)):
        work.wait()
    assert group.communicator.calls == ["start", "send 1", "recv 1", "end"]
    for wrong in ([], "ops", [1]):  # type and message of the error are torch's
        with pytest.raises(Exception) as plain:
            early(wrong)
        with pytest.raises(plain.type) as patched:
            dist.batch_isend_irecv(wrong)
        assert str(patched.value) == str(plain.value)
    batch = _batch(group)
    reloadpg.offload()
    with pytest.raises(reloadpg.GroupOffloadedError):
        dist.batch_isend_irecv(batch)
    assert len(distributed_c10d._world.pg_coalesce_state) == 0
    reloadpg.reload()
    assert len(dist.batch_isend_irecv(_batch(group))) >= 1
    reloadpg.uninstall()
    assert dist.batch_isend_irecv is early
