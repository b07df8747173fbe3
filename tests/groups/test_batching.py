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
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix


class _Coalescing(ProcessGroup):
    """An inner group whose backend coalesces, as NCCL's does; it records what it is asked."""

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


def _program(rank, world_size):
    early = dist.batch_isend_irecv
    namespace = SimpleNamespace()
    dist.Backend.register_backend(
        "coalescing", lambda *_: _Coalescing(0, 2), extended_api=True, devices=["cpu"]
    )
    reloadpg.install(backends={"coalescing"})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.new_group([0, 1], backend="coalescing")
    for work in dist.batch_isend_irecv(_batch(group)):
        work.wait()
    namespace.calls = list(group.communicator.calls)
    errors = []
    for wrong in ([], "ops", [1]):
        found = []
        for function in (dist.batch_isend_irecv, early):
            try:
                function(wrong)
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        errors.append(found)
    batch = _batch(group)
    reloadpg.offload()
    try:
        dist.batch_isend_irecv(batch)
        refused = False
    except reloadpg.GroupOffloadedError:
        refused = True
    left = len(distributed_c10d._world.pg_coalesce_state)
    reloadpg.reload()
    works = len(dist.batch_isend_irecv(_batch(group)))
    reloadpg.uninstall()
    return namespace.calls, errors, refused, left, works, dist.batch_isend_irecv is early


@pytest.fixture(scope="module")
def result():
    return run_ranks(_program, 1)[0]


def test_a_batch_on_a_proxy_is_coalesced(result):
    """Issued alone, two NCCL ranks that both send first wait for each other; torch 2.8 and 2.13
    look at the group's type (failure 15)."""
    assert result[0] == ["start", "send 1", "recv 1", "end"]


def test_what_is_no_batch_gets_torchs_own_error(result):
    """An empty list, a text, a list of other things: type and message are torch's."""
    for patched, plain in result[1]:
        assert patched == plain


def test_a_batch_on_an_offloaded_group_is_refused_and_leaves_nothing_open(result):
    """GroupOffloadedError, no coalescing left behind, and it works again after the reload."""
    _, _, refused, left, works, _ = result
    assert refused
    assert left == 0
    assert works >= 1


def test_uninstall_restores_it(result):
    """The original object is back."""
    assert result[5]
