"""A reload calls the creating functions with the caller's arguments, on members only."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from helpers import worlds
from helpers.jobs import TIMEOUT, install
from helpers.tables import expected_sum, resolves_to, summed
from torch.distributed import distributed_c10d as c10d

import reloadpg
from reloadpg import GroupOffloadedError
from reloadpg.testing import simulated


class _Recorder:
    """Replaces a function of torch by one that records its arguments and calls it."""

    def __init__(self, name):
        self.name = name
        self.original = getattr(c10d, name)
        self.calls = []
        self.signature = inspect.signature(self.original)

        @functools.wraps(self.original)
        def record(*args, **kwargs):
            self.calls.append((_frozen(args), _frozen(kwargs)))
            return self.original(*args, **kwargs)

        for module in (c10d, dist):
            if getattr(module, name, None) is self.original:
                setattr(module, name, record)

    def take(self):
        calls, self.calls = self.calls, []
        return calls

    def bound(self, call):
        """Arguments by name, without the name of the group, which is new in each generation."""
        arguments = dict(self.signature.bind(*call[0], **call[1]).arguments)
        arguments.pop("group_name", None)
        arguments.pop("store", None)
        return arguments


def _frozen(value):
    """Rank lists as they are now; every other object as it is."""
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_frozen(item) for item in value)
    return value


# ---------------------------------------------------------------------------------------------
# what the creating functions receive

OPTIONS = SimpleNamespace(is_high_priority_stream=True, hints=("a", "b"))
WITH_OPTIONS = ("both", "options by position")

CALLS = {
    "positional": (([0, 1], timedelta(seconds=41), "gloo", None, False, "first"), {}),
    "keyword": (
        (),
        {
            "ranks": [0, 1],
            "timeout": timedelta(seconds=42),
            "backend": "gloo",
            "group_desc": "second",
        },
    ),
    "both": (([0, 1], timedelta(seconds=43)), {"backend": "sim", "pg_options": OPTIONS}),
    "options by position": (([1, 0], None, "sim", OPTIONS), {}),
    "backend of WORLD": (([0, 1],), {}),
    "tuple": (((0, 1),), {"backend": "gloo"}),
    "range": ((range(2),), {"backend": "gloo"}),
    "None": ((None,), {"backend": "gloo"}),
    "nothing": ((), {}),
    "local": (([0, 1],), {"backend": "gloo", "use_local_synchronization": True}),
    "device backends": (([0, 1],), {"backend": "cpu:gloo"}),
    "upper case": (([0, 1],), {"backend": "GLOO"}),
}


@worlds.unbound_only
@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_creating_functions_receive_the_callers_arguments(rank):
    """Positional stays positional and keywords keywords, at first and at every reload.

    Timeout, pg_options, description and backend among them; the options are the caller's object
    (failures 9, 10). For WORLD, a helper of torch gets those of ``init_process_group``.
    """
    simulated.register()
    new_group, helper = _Recorder("new_group"), _Recorder("_new_process_group_helper")
    install(backends={"gloo", "sim"}, parallelism=1)  # so that calls are seen in order
    worlds.init("sim", timeout=timedelta(seconds=51), pg_options=OPTIONS)
    world = helper.bound(helper.take()[0])
    assert (world["timeout"], str(world["backend"])) == (timedelta(seconds=51), "sim")
    groups, first = {}, {}
    for label, (args, kwargs) in CALLS.items():
        groups[label] = dist.new_group(*args, **kwargs)
        ((call,), (inner,)) = new_group.take(), helper.take()
        assert call == (args, kwargs), label
        first[label] = call, helper.bound(inner)
    order = sorted(groups, key=lambda label: groups[label]._managed.construction.order)
    for _ in range(2):
        reloadpg.offload()
        assert new_group.take() == helper.take() == []
        reloadpg.reload()
        again, *inner = map(helper.bound, helper.take())
        replayed = dict(zip(order, zip(new_group.take(), inner, strict=True), strict=True))
        for label in CALLS:
            assert replayed[label] == first[label], label
        for what in ("timeout", "group_size", "group_rank"):
            assert again[what] == world[what]
        assert str(again["backend"]) == "sim"
        assert list(again["global_ranks_in_group"]) == list(world["global_ranks_in_group"])
        given = [again, *(replayed[label][1] for label in WITH_OPTIONS)]
        assert all(arguments["backend_options"] is OPTIONS for arguments in given)
    assert {summed(group, rank) for group in groups.values()} == {3}
    assert groups["keyword"].group_desc == "second"


# ---------------------------------------------------------------------------------------------
# what was changed on the live group


SYMMETRIC_MEMORY = hasattr(dist.ProcessGroup, "use_pg_for_symm_mem_rendezvous")
"""Whether the installed torch lets symmetric memory use a group."""


def _timeout(group):
    backend = group._get_backend(worlds.device_of(group))
    return backend.options._timeout.total_seconds()


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_what_was_set_on_the_live_group_holds():
    """Timeouts, as Megatron changes them with _set_pg_timeout, are read from the rebuilt backend
    (failure 9); description, and the use of the group by symmetric memory.
    """
    install()
    worlds.init(timeout=timedelta(seconds=61))
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=62), group_desc="before")
    kept = dist.new_group([0, 1], timeout=timedelta(seconds=63))
    groups = (dist.group.WORLD, pair, kept)
    assert [_timeout(group) for group in groups] == [61, 62, 63]
    c10d._set_pg_timeout(timedelta(seconds=71), dist.group.WORLD)
    c10d._set_pg_timeout(timedelta(seconds=72), pair)
    pair._set_group_desc("after")
    if SYMMETRIC_MEMORY:
        pair.use_pg_for_symm_mem_rendezvous = True
    assert [_timeout(group) for group in groups] == [71, 72, 63]
    for cycle in range(3):
        c10d._set_pg_timeout(timedelta(seconds=80 + cycle), kept)
        reloadpg.offload()
        assert [entry.timeout_s for entry in reloadpg.status().groups] == [71, 72, 80 + cycle]
        assert pair.group_desc == "after"
        assert not SYMMETRIC_MEMORY or pair.use_pg_for_symm_mem_rendezvous
        reloadpg.reload()
        assert [_timeout(group) for group in groups] == [71, 72, 80 + cycle]
        assert pair._managed.communicator.group_desc == "after"
        assert not SYMMETRIC_MEMORY or pair._managed.communicator.use_pg_for_symm_mem_rendezvous


# ---------------------------------------------------------------------------------------------
# which ranks take part


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.parametrize(
    "in_callback",
    [
        pytest.param(False, marks=pytest.mark.ranks(3)),
        *(
            pytest.param(one, marks=pytest.mark.ranks(3, env={"TORCH_DIST_INIT_BARRIER": "1"}))
            for one in (False, True)
        ),
    ],
)
def test_only_members_replay(rank, in_callback):
    """A reload calls the creating function on members only.

    With TORCH_DIST_INIT_BARRIER=1 each creation is a barrier of the job; a replay is not. A group
    that its members destroyed before the reload, or in a callback before it rebuilds anything, is
    not replayed (failures 5, 12).
    """
    new_group = _Recorder("new_group")
    install()
    worlds.init(timeout=TIMEOUT)
    made = [[0, 1], [1, 2], [0, 1, 2], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in made]
    doomed = dist.new_group([0, 1], group_desc="doomed")
    new_group.take()
    mine = [ranks for ranks in made if rank in ranks]
    for cycle in range(2):
        reloadpg.offload()
        if cycle == 1 and rank < 2:
            if in_callback:
                reloadpg.on_reload(lambda: dist.destroy_process_group(doomed), before=True)
            else:
                dist.destroy_process_group(doomed)
        reloadpg.reload()
        # Groups are rebuilt in parallel, in any order.
        replayed = sorted(call[0][0] for call in new_group.take())
        assert replayed == sorted(mine + [[0, 1]] * (cycle == 0 and rank < 2))
    for ranks, group in zip(made, groups, strict=True):
        assert rank not in ranks or summed(group, rank) == expected_sum(ranks)


# ---------------------------------------------------------------------------------------------
# mixed groups


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_the_cpu_backend_of_a_mixed_group_is_kept(rank):
    """Only the selected backend is released and recreated. Gloo works throughout, with the same
    object, while the released backend raises GroupOffloadedError.
    """
    created = []

    def create(store, place, size, timeout):
        created.append(place)
        return c10d.ProcessGroupGloo(store, place, size, timeout)

    dist.Backend.register_backend("second", create, devices=["meta"])
    install(backends={"second"})
    dist.init_process_group("cpu:gloo,meta:second", timeout=TIMEOUT)
    pair = dist.new_group([0, 1], backend="cpu:gloo,meta:second")
    positional = dist.new_group([0, 1], None, "cpu:gloo,meta:second", None)
    groups = (dist.group.WORLD, pair, positional, dist.new_group([0, 1]))
    cpu, meta = torch.device("cpu"), torch.device("meta")
    kept = [group._get_backend(cpu) for group in groups]
    old = [group._get_backend(meta) for group in groups]
    for _ in range(2):
        created.clear()
        reloadpg.offload()
        for group, backend in zip(groups, kept, strict=True):
            assert group.state == "offloaded"
            assert summed(group, rank) == 3
            gathered = [None] * 2
            dist.all_gather_object(gathered, rank, group=group)
            assert gathered == [0, 1]
            assert (fc.all_reduce(torch.ones(1), "sum", group.group_name) + 0).item() == 2
            assert group._get_backend(cpu) is backend
            with pytest.raises(GroupOffloadedError) as caught:
                group._get_backend(meta).allreduce([torch.ones(2)])
            assert caught.value.operation == "allreduce"
        assert created == []
        reloadpg.reload()
        assert len(created) == len(groups)
        for group, backend, released in zip(groups, kept, old, strict=True):
            assert group._get_backend(cpu) is backend
            assert group._get_backend(meta) is not released
            tensor = torch.ones(2)
            group._get_backend(meta).allreduce([tensor]).wait()
            assert tensor.tolist() == [2.0, 2.0]
            assert summed(group, rank) == 3
            assert sorted(device.type for device in group._device_types) == ["cpu", "meta"]
            assert {*dist.get_backend_config(group).split(",")} >= {"cpu:gloo", "meta:second"}
            assert resolves_to(group.group_name) is group
        old = [group._get_backend(meta) for group in groups]
    assert len({dist.get_backend(group) for group in groups}) == 1
