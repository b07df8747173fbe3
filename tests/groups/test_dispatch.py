"""The proxy defines every name of the installed torch's ProcessGroup, and calls the inner group."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import reloadpg
from reloadpg import ReloadableProcessGroup
from reloadpg.errors import GroupDestroyedError
from reloadpg.groups import dispatch

pytestmark = pytest.mark.matrix


NAMES = frozenset(name for name in dir(ProcessGroup) if not name.startswith("__"))


def test_every_name_of_process_group_is_known():
    """A method that a new torch adds needs an entry in ``groups/dispatch.py``."""
    assert frozenset() == dispatch.UNKNOWN


def test_no_name_is_defined_that_the_installed_torch_lacks():
    """Torch checks whether some groups have a method, and calls it."""
    own = {name for name in vars(dispatch.Dispatch) if not name.startswith("__")}
    assert own - NAMES == {"_coalescing"}


def test_the_proxy_is_a_process_group_and_nothing_else():
    """Beyond torch's names it has two attributes, and an override of one method of C++."""
    public = {name for name in dir(ReloadableProcessGroup) if not name.startswith("_")}
    assert public - NAMES == {"generation", "state", "getGroupName"}


def test_torch_looks_up_the_overrides_by_their_names_in_cpp():
    """Without a backend, C++ has no name of the group. A description of it is set."""
    group = type("Plain", (ProcessGroup,), {"__init__": lambda self: _init(self, 0, 2)})()
    with pytest.raises(RuntimeError, match="name not set"):
        ProcessGroup.group_name.fget(group)
    group._set_group_desc("of C++")
    assert ProcessGroup.group_desc.fget(group) == "of C++"
    names = {"getRank": 5, "getSize": 7, "getGroupName": "a name"}
    methods = {name: lambda self, value=value: value for name, value in names.items()}
    group = type("Overriding", (type(group),), methods)()
    found = ProcessGroup.rank(group), ProcessGroup.size(group), ProcessGroup.group_name.fget(group)
    assert found == (5, 7, "a name")


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


_init = ProcessGroup.__init__


class _Inner(ProcessGroup):
    """An inner group that records its calls and returns None, as NCCL's coalesced calls do.

    Its backend coalesces. It has a completion hook, which of torch's backends only NCCL's has.
    """

    def __init__(self, *_):
        super().__init__(0, 2)
        self.calls = []

    def getGroupName(self):
        return "inner"

    group_name = property(getGroupName)
    getBackendName = getGroupName

    def _get_backend(self, device):
        return SimpleNamespace(supports_coalescing=True)


RECORDED = {"shutdown", "abort", "_wait_for_pending_works", "_register_on_completion_hook"}
RECORDED |= {"_start_coalescing", "_end_coalescing", "_enable_collectives_timing"}

for _name in (dispatch.COLLECTIVES & NAMES) | RECORDED:

    def _record(self, *args, _name=_name, **kwargs):
        self.calls.append(_name)

    setattr(_Inner, _name, _record)


def _start():
    """A fake job of two ranks in which groups of the backend ``inner`` are reloadable."""
    dist.Backend.register_backend("inner", _Inner, extended_api=True, devices=["cpu"])
    reloadpg.install(backends={"inner"})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


@pytest.mark.ranks(1)
def test_a_missing_work_of_the_inner_group_does_not_reach_cpp():
    """A synchronous coalesced NCCL call returns None since 2.8; C++ crashed on it (failure 3)."""
    _start()
    group = dist.new_group([0, 1], backend="inner")
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
    assert len(group._managed.communicator.calls) >= 5
    assert asynchronous.is_completed()
    work = dispatch.COMPLETED_WORK
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.get_future().wait() == []


@pytest.mark.ranks(1)
@pytest.mark.parametrize("call", ["abort", "shutdown", "offload"])
def test_a_coalescing_is_ended_on_the_group_on_which_it_was_started(call):
    """Torch 2.15 aborts all groups within a coalescing of the default group, and then ends it
    (failure 36).
    """
    _start()
    group = dist.new_group([0, 1], backend="inner")
    inner, cpu = group._managed.communicator, torch.device("cpu")
    with dist.distributed_c10d._coalescing_manager(group, cpu):
        {"offload": reloadpg.offload}.get(call, lambda: getattr(group, call)())()
    assert [one for one in inner.calls if "coalescing" in one] == [
        "_start_coalescing",
        "_end_coalescing",
    ]
    with pytest.raises((reloadpg.GroupOffloadedError, GroupDestroyedError)):
        group._end_coalescing(cpu)


@pytest.mark.ranks(1)
def test_an_install_within_a_coalescing_of_the_default_group_leaves_it_to_torch():
    """Torch ends it on the group on which it was started."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with distributed_c10d._coalescing_manager(dist.group.WORLD, torch.device("cpu")):
        reloadpg.install(backends={"fake"})
    assert type(dist.group.WORLD) is ReloadableProcessGroup
    assert len(distributed_c10d._world.pg_coalesce_state) == 0


def _batch(group):
    return [dist.P2POp(kind, torch.ones(1), 1, group) for kind in (dist.isend, dist.irecv)]


@pytest.mark.ranks(1)
def test_a_batch_on_a_reloadable_group_is_coalesced():
    """Issued one by one, two NCCL ranks that both send first wait for each other; torch 2.8 and
    2.13 look at the group's type (failure 15). A batch on an offloaded group leaves no coalescing
    open, and ``uninstall`` restores torch's function.
    """
    early = dist.batch_isend_irecv
    _start()
    group = dist.new_group([0, 1], backend="inner")
    for work in dist.batch_isend_irecv(_batch(group)):
        work.wait()
    assert group._managed.communicator.calls == [
        "_start_coalescing",
        "send",
        "recv",
        "_end_coalescing",
    ]
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


@pytest.mark.ranks(1)
def test_hooks_and_timing_of_the_live_group_are_set_on_each_generation():
    _start()
    group = dist.new_group([0, 1], backend="inner")
    group._enable_collectives_timing()
    group._register_on_completion_hook(lambda _: None)
    for _ in range(2):
        before = group._managed.communicator.calls
        reloadpg.offload()
        reloadpg.reload()
        assert group._managed.communicator.calls is not before
        assert group._managed.communicator.calls == [
            "_enable_collectives_timing",
            "_register_on_completion_hook",
        ]


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="torch has these hooks since 2.15"
)
@pytest.mark.ranks(2)
def test_hooks_of_collectives_are_registered_on_each_generation():
    """Until they are removed, also while the group is offloaded: torch ignores a number that it
    does not know.
    """
    reloadpg.install(backends={"gloo"})
    dist.init_process_group("gloo")
    group, seen = dist.new_group([0, 1]), []

    def used():
        seen.clear()
        dist.all_reduce(torch.ones(1), group=group)
        return seen

    group.register_pre_hook(1, lambda _: seen.append("before"))
    group.register_pre_hook(hook_id=2, hook=lambda _: seen.append("removed"))
    group.register_post_hook(1, lambda _: seen.append("after"))
    assert sorted(used()) == ["after", "before", "removed"]
    group.unregister_pre_hook(2)
    for _ in range(2):
        assert used() == ["before", "after"]
        reloadpg.offload()
        reloadpg.reload()
    reloadpg.offload()
    group.unregister_post_hook(hook_id=1)
    assert [getattr(group, name)(7) for name in dispatch.REMOVALS] == [None] * 3
    reloadpg.reload()
    assert used() == ["before"]


@pytest.mark.ranks(1)
def test_a_shutdown_waits_for_pending_work_and_an_abort_does_not():
    """The abort may be what ends the pending work; torch's abort does not wait either."""
    _start()
    for how, calls in (("shutdown", ["_wait_for_pending_works", "shutdown"]), ("abort", ["abort"])):
        group = dist.new_group([0, 1], backend="inner")
        inner = group._managed.communicator
        group._register_on_completion_hook(lambda _: None)
        inner.calls.clear()
        getattr(group, how)()
        assert (inner.calls, group.state) == (calls, "destroyed")
