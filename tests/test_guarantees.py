"""What the README guarantees, a test or two for each of its bullets.

Each test is a small program of two or three ranks, on gloo, which needs no GPU.
"""

from __future__ import annotations

import copy
import io
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import all_gather_into_tensor as bound_early

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = [pytest.mark.guarantees, pytest.mark.matrix]

GLOO = {"backends": {"gloo"}}
"""Options of install: without a GPU, gloo groups are made reloadable."""


# -- Identity -------------------------------------------------------------------------------------


def keep_every_reference(rank, size):
    reloadpg.install(**GLOO)
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1], group_desc="tp")
    before = id(group), hash(group), group.group_name, group.rank(), group.size()
    dist.distributed_c10d._get_process_group_store(group).set("mine", "1")
    copies = {group: "found by its hash"}

    reloadpg.offload()
    assert copy.deepcopy({"group": group})["group"] is group
    reloadpg.reload()

    assert isinstance(group, dist.ProcessGroup)
    assert (id(group), hash(group), group.group_name, group.rank(), group.size()) == before
    assert copies[group] == "found by its hash"
    assert dist.distributed_c10d._get_process_group_store(group).get("mine") == b"1"
    assert pickle.loads(pickle.dumps(group)) is group
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert dist.group.WORLD is dist.distributed_c10d._get_default_group()


def test_identity_a_group_is_the_same_object_after_a_reload():
    run_ranks(keep_every_reference, 2)


def save_a_model_that_holds_a_group(rank, size):
    reloadpg.install(**GLOO)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    model.group = dist.new_group([0, 1])
    file = io.BytesIO()
    with reloadpg.offloaded():
        torch.save(model, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).group is model.group


def test_identity_a_pickle_holds_the_name():
    run_ranks(save_a_model_that_holds_a_group, 2)


# -- Replay ---------------------------------------------------------------------------------------


def replay_the_arguments(rank, size):
    reloadpg.install(**GLOO)
    dist.init_process_group("gloo")
    ranks = [0, 1]
    group = dist.new_group(ranks, timedelta(minutes=120), group_desc="data parallel")
    ranks.append(99)  # the record does not change with the caller's list
    device = torch.device("cpu")

    for _ in range(2):
        reloadpg.offload()
        reloadpg.reload()
        assert group._get_backend(device).options._timeout == timedelta(minutes=120)
        assert group.group_desc == "data parallel"
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2

    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=7), group)
    with reloadpg.offloaded():
        pass
    assert group._get_backend(device).options._timeout == timedelta(minutes=7)


def test_replay_timeouts_and_descriptions_survive():
    run_ranks(replay_the_arguments, 2)


def use_groups_of_some_ranks(rank, size):
    reloadpg.install(**GLOO)
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    with reloadpg.offloaded():
        pass
    if rank == 2:
        assert pair is dist.GroupMember.NON_GROUP_MEMBER
    else:
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=pair)
        assert total.item() == 3
    return reloadpg.status().generation


def test_replay_only_members_take_part():
    assert run_ranks(use_groups_of_some_ranks, 3) == [1, 1, 1]


# -- No silent use --------------------------------------------------------------------------------


def use_groups_while_offloaded(rank, size):
    reloadpg.install(**GLOO)
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    tensor, both = torch.ones(2), torch.empty(4)
    uses = {
        "the default group": lambda: dist.all_reduce(tensor),
        "a group": lambda: dist.all_reduce(tensor, group=group),
        "asynchronously": lambda: dist.all_reduce(tensor, group=group, async_op=True),
        "a name bound before install": lambda: bound_early(both, tensor, group=group),
        "a functional collective": lambda: functional.all_reduce(tensor, "sum", group),
        "objects": lambda: dist.all_gather_object([None, None], "mine", group=group),
        "DDP, in C++": lambda: torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(1, 1), process_group=group
        ),
    }
    with reloadpg.offloaded():
        for name, use in uses.items():
            with pytest.raises(reloadpg.GroupOffloadedError):
                use()
                pytest.fail(f"{name}: no error")
        assert dist.get_rank(group) == rank
        assert dist.get_world_size(group) == 2
    assert tensor.tolist() == [1, 1]  # no collective ran, on WORLD neither


def test_no_silent_use_every_path_raises_while_offloaded():
    run_ranks(use_groups_while_offloaded, 2)


# -- Agreement ------------------------------------------------------------------------------------


def offload_different_sets(rank, size):
    reloadpg.install(**GLOO, sets=["engine"])
    dist.init_process_group("gloo")
    with pytest.raises(reloadpg.DisagreementError) as raised:
        reloadpg.offload("trainer" if rank == 0 else "engine")
    assert "trainer" in str(raised.value)
    assert "engine" in str(raised.value)
    total = torch.ones(1)
    dist.all_reduce(total)  # nothing was changed
    assert total.item() == 2


def test_agreement_a_difference_raises_on_all_ranks():
    run_ranks(offload_different_sets, 2)


# -- Timeouts -------------------------------------------------------------------------------------


def wait_for_a_rank_that_is_late(rank, size):
    reloadpg.install(**GLOO, timeout=2.0)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("rank 0 has given up")
        return ""
    begun = time.monotonic()
    with pytest.raises(reloadpg.RendezvousTimeoutError) as raised:
        reloadpg.offload()
    assert time.monotonic() - begun < 50
    assert raised.value.missing == (1,)
    store.set("rank 0 has given up", "1")
    return str(raised.value)


def test_timeouts_a_missing_rank_is_named():
    grace = {"RELOADPG_GRACE_S": "1"}  # how long a rank that is alive may be silent after a failure
    assert "rank 1" in run_ranks(wait_for_a_rank_that_is_late, 2, env=grace)[0]


# -- Reversible -----------------------------------------------------------------------------------


def install_and_uninstall(rank, size):
    names = ("new_group", "split_group", "init_process_group", "batch_isend_irecv")
    before = [getattr(dist, name) for name in names]
    functions = {n: f for n, f in vars(dist.distributed_c10d).items() if callable(f)}
    with reloadpg.install(**GLOO):
        assert dist.new_group is not before[0]
        dist.init_process_group("gloo")
        group = dist.new_group([0, 1])
        with reloadpg.offloaded():
            pass
    assert [getattr(dist, name) for name in names] == before
    now = vars(dist.distributed_c10d)
    assert [name for name, function in functions.items() if now[name] is not function] == []
    total = torch.ones(1)
    dist.all_reduce(total, group=group)  # existing groups keep working
    assert total.item() == 2
    assert type(dist.new_group([0, 1])) is dist.ProcessGroup


def test_reversible_uninstall_restores_every_function():
    run_ranks(install_and_uninstall, 2)
