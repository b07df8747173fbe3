"""The proxy defines every name of the installed torch's ProcessGroup."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg import ReloadableProcessGroup
from reloadpg.groups import dispatch

pytestmark = pytest.mark.matrix


NAMES = frozenset(name for name in dir(ProcessGroup) if not name.startswith("__"))


def test_every_name_of_process_group_is_known():
    """A method that a new torch adds needs an entry in ``groups/dispatch.py``."""
    assert frozenset() == dispatch.UNKNOWN


def test_no_name_is_defined_that_the_installed_torch_lacks():
    """Torch checks whether some groups have a method, and calls it."""
    own = {name for name in vars(dispatch.Dispatch) if not name.startswith("__")}
    assert own - NAMES == {"_calls"}


@pytest.mark.parametrize("name", sorted(NAMES - dispatch.INHERITED))
def test_no_name_is_inherited_from_the_cpp_object(name):
    """In C++ it would find no backend, or be a cached C function."""
    owner = next(cls for cls in ReloadableProcessGroup.__mro__ if name in vars(cls))
    assert owner is not ProcessGroup
    assert inspect.isfunction(vars(owner)[name]) or isinstance(vars(owner)[name], property)


def test_the_proxy_has_no_attribute_that_torch_would_delegate_to():
    """From 2.13 new_group delegates to a default group that has a ``new_group``."""
    assert not hasattr(ReloadableProcessGroup, "new_group")
    assert "__getattr__" not in vars(ReloadableProcessGroup)


class _Silent(ProcessGroup):
    """An inner group that returns None, as NCCL's synchronous coalesced calls do."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.calls = []

    def getGroupName(self):
        return "silent"

    group_name = property(getGroupName)

    def getBackendName(self):
        return "silent"

    def _start_coalescing(self, device):
        pass


for _name in dispatch.COLLECTIVES & NAMES:

    def _answer(self, *args, _name=_name, **kwargs):
        self.calls.append(_name)

    setattr(_Silent, _name, _answer)


@pytest.mark.ranks(1)
def test_a_missing_work_of_the_inner_group_does_not_reach_cpp():
    """A synchronous coalesced NCCL call returns None since 2.8; C++ crashed on it (failure 3)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.Backend.register_backend(
        "silent", lambda *_: _Silent(0, 2), extended_api=True, devices=["cpu"]
    )
    reloadpg.install(backends={"silent"})
    group = dist.new_group([0, 1], backend="silent")
    silent = group.communicator
    tensor = torch.ones(4)
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce(tensor, "sum", group.group_name))
    for gathered in ops.all_gather_into_tensor_coalesced([tensor, tensor], 2, group.group_name):
        ops.wait_tensor(gathered)
    ops.wait_tensor(ops.broadcast(tensor, 0, group.group_name))
    with dist.distributed_c10d._coalescing_manager(group, tensor.device, async_ops=True) as work:
        dist.all_reduce(tensor, group=group)
    work.wait()
    asynchronous = dist.all_reduce(tensor, group=group, async_op=True)
    assert len(silent.calls) >= 5
    assert asynchronous.is_completed()
    work = dispatch.COMPLETED_WORK
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.get_future().wait() == []
