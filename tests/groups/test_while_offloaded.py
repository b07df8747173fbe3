"""While groups are offloaded, every collective raises and every query returns."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.jobs import TIMEOUT, start
from helpers.op_table import ROWS, cases, run_row
from helpers.tables import expected_sum, lengths, summed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg import GroupOffloadedError
from reloadpg.errors import NotInstalledError
from reloadpg.groups import dispatch
from reloadpg.testing import run_ranks

RANKS = 4
SUBGROUP = (0, 2, 3)


# ---------------------------------------------------------------------------------------------
# collectives


def _table(rank, world_size):
    """Run every row in every way while offloaded, before and after a reload."""
    start()
    sub = dist.new_group(list(SUBGROUP), timeout=TIMEOUT)
    groups = {"world": (None, range(RANKS)), "sub": (sub, SUBGROUP)}
    outcomes = {}
    for cycle in range(2):
        reloadpg.offload()
        for row, key, case in cases(groups, rank, salt=cycle + 1):
            outcomes[(cycle, *key)] = run_row(row, case)
        reloadpg.reload()
        # The refused calls have changed nothing.
        assert summed(None, rank) == expected_sum(range(RANKS))
        if rank in SUBGROUP:
            assert summed(sub, rank) == expected_sum(SUBGROUP)
    return outcomes


@pytest.fixture(scope="module")
def table():
    return run_ranks(_table, RANKS, timeout=240)


IDLE = {
    # the third member and later ones have no part in it
    "batch_isend_irecv[partial]": lambda rank, group: rank >= 2
}
ASKS_CPP = {
    # these ask the C++ object of the group for its backend, and find none
    "ops.all_gather_into_tensor_out",
    "ops.batch_p2p_ops",
}


@pytest.mark.matrix
@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if not row.missing])
def test_no_operation_succeeds_while_offloaded(row, table):
    """GroupOffloadedError on every rank, on WORLD and a subgroup, sync and async, however called.

    Never a value, and never another group's (failure 4).
    """
    seen = 0
    for rank, outcomes in enumerate(table):
        for key, outcome in outcomes.items():
            if key[1] != row:
                continue
            if row in IDLE and IDLE[row](rank, key[3]) and not outcome.error:
                assert outcome.value is None
                continue
            seen += 1
            if row == "fc.permute_tensor" and key[2] == "name":
                assert outcome.error == "ValueError"  # torch takes no name there at any time
            elif row in ASKS_CPP and "No backend type" in outcome.message:
                assert outcome.error == "RuntimeError"
            else:
                assert outcome.error == GroupOffloadedError.__name__, (rank, key, outcome)
                assert "Call reloadpg.reload()" in outcome.message
    assert seen > 0


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_every_method_that_needs_a_communicator_raises():
    """The error names the operation and the group."""
    start()
    pair = dist.new_group([0, 1])
    reloadpg.offload()
    names = sorted(dispatch.DISPATCHED)
    assert len(names) > 25
    for group in (dist.group.WORLD, pair):
        for name in names:
            if name == "_get_backend":
                assert "OffloadedBackend" in repr(group._get_backend())
                continue
            arguments = (None, 0, 0) if name in ("send", "recv") else ()
            with pytest.raises(GroupOffloadedError) as caught:
                getattr(group, name)(*arguments)
            assert caught.value.operation == name
            assert caught.value.group == group.group_name


class _NotOurs:
    """In the place of a class of torchcomms, which is not installed."""


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_a_query_returns_a_backend_whose_every_use_raises(rank):
    """Torch queries all groups when it extends timeouts, sets one, or destroys another group.

    A timeout that is set while the group is offloaded holds after the reload.
    """
    start()
    gone, kept = dist.new_group([0, 1]), dist.new_group([0, 1])
    reloadpg.offload()
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=7))
    backend = kept._get_backend(worlds.device())
    for name, use in (
        ("allreduce", lambda: backend.allreduce([torch.ones(1)])),
        ("barrier", lambda: backend.barrier()),
        ("options", lambda: backend.options),
        ("abort", lambda: backend.abort()),
    ):
        with pytest.raises(GroupOffloadedError) as caught:
            use()
        assert caught.value.operation == name
    c10d._set_pg_timeout(timedelta(seconds=41), kept)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=42), kept)
    # With torchcomms installed, torch asks a group for its backends before it destroys it.
    c10d._TORCHCOMM_AVAILABLE, c10d._BackendWrapper = True, _NotOurs
    dist.destroy_process_group(gone)
    reloadpg.reload()
    after = kept._get_backend(worlds.device())
    assert after.options._timeout.total_seconds() == 42
    assert summed(kept, rank) == 3


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_refused_coalescing_does_not_postpone_later_collectives(rank):
    """Torch keeps the group in its table of open coalescings; later calls must not go there."""
    start()
    reloadpg.offload()
    for _ in range(2):
        manager = c10d._coalescing_manager(device=torch.device("cpu"))
        with pytest.raises(GroupOffloadedError) as caught, manager:
            dist.all_reduce(torch.ones(1))
        assert caught.value.operation == "_start_coalescing"
        with pytest.raises(GroupOffloadedError) as caught:
            dist.all_reduce(torch.ones(1))
        assert caught.value.operation == "allreduce"
    reloadpg.reload()
    assert summed(None, rank) == 3


# ---------------------------------------------------------------------------------------------
# queries


def _answers(group, mesh):
    ranks = dist.get_process_group_ranks(group)
    return {
        "get_rank": dist.get_rank(group),
        "get_world_size": dist.get_world_size(group),
        "ranks": ranks,
        "backend": dist.get_backend(group),
        "config": dist.get_backend_config(group),
        "group ranks": [dist.get_group_rank(group, rank) for rank in ranks],
        "global ranks": [dist.get_global_rank(group, i) for i in range(len(ranks))],
        "name": group.group_name,
        "c10d name": c10d._get_process_group_name(group),
        "desc": group.group_desc,
        "rank, size": (group.rank(), group.size()),
        "backend name": (group.name(), group._get_backend_name()),
        "devices": sorted(device.type for device in group._device_types),
        "object device": str(c10d._get_object_coll_device(group)),
        "default device": str(c10d._get_pg_default_device(group)),
        "bound": group.bound_device_id,
        "hooks": group._has_hooks(),
        "store": getattr(group, "get_group_store", int)() is not None,  # since torch 2.9
        "hash": hash(group),
        "equal": group == group,
        "known": group in c10d._world.pg_map,
        "pickled": pickle.loads(pickle.dumps(group)) is group,
        "copied": copy.deepcopy(group) is group,
        "outside": c10d._rank_not_in_group(group),
        "count": dist.get_pg_count(),
        "initialized": dist.is_initialized(),
        "global": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "WORLD": dist.group.WORLD is c10d._get_default_group(),
        # Hooks hold communicators, so they are removed while offloaded.
        "tables": {k: v for k, v in lengths().items() if k != "pg_flight_recorder_hooks"},
        "mesh": (
            *(mesh.get_rank(), mesh.get_local_rank("tp"), mesh.get_coordinate()),
            *(mesh.size(), mesh.size(0), mesh.shape, mesh.ndim, mesh.mesh_dim_names),
            *(mesh.device_type, mesh.mesh.tolist(), mesh["dp"].mesh.tolist(), hash(mesh)),
            mesh["tp"].get_group() is mesh.get_group("tp"),
            [group.group_name for group in mesh.get_all_groups()],
        ),
    }


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.xfail(
    worlds.WORLD == "nccl-bound" and TorchVersion(torch.__version__) < "2.15",
    reason="torch names a split by how many groups the rank is in, so members' names differ here",
    strict=True,
)
@pytest.mark.ranks(RANKS)
def test_every_query_returns_the_same_while_offloaded_and_after_the_reload(rank):
    """Rank, size, ranks, backend, names, tables, pickles and meshes.

    A subgroup's size is never WORLD's (failure 4).
    """
    start()
    sub = dist.new_group([3, 1, 0], group_desc="three")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {"WORLD": dist.group.WORLD, "tp": mesh.get_group("tp")}
    if rank != 2:
        groups["sub"] = sub
    assert {type(group) for group in groups.values()} == {reloadpg.ReloadableProcessGroup}
    found = []
    for step, state in (
        (lambda: None, "live generation 0>"),
        (reloadpg.offload, "offloaded generation 0>"),
        (reloadpg.reload, "live generation 1>"),
    ):
        step()
        found.append({label: _answers(group, mesh) for label, group in groups.items()})
        assert all(repr(group).endswith(f" {state}") for group in groups.values())
        if rank == 2:
            assert (dist.get_rank(sub), dist.get_world_size(sub)) == (-1, -1)
    live = found[0]
    assert found == [live] * 3
    assert (live["WORLD"]["get_world_size"], live["tp"]["get_world_size"]) == (4, 2)
    if rank != 2:
        assert (live["sub"]["ranks"], live["sub"]["desc"]) == ([0, 1, 3], "three")


# ---------------------------------------------------------------------------------------------
# calls with nothing to do (failure 23)


@pytest.mark.ranks(2)
def test_calls_before_install_raise_one_error_and_change_nothing(rank):
    worlds.init(timeout=TIMEOUT)
    for call in (
        reloadpg.offload,
        reloadpg.reload,
        lambda: reloadpg.offloaded().__enter__(),
    ):
        with pytest.raises(NotInstalledError, match=r"nothing was changed.*reloadpg\.install\(\)"):
            call()
    status = reloadpg.status()
    assert (status.installed, status.state, status.groups) == (False, "live", ())
    assert summed(None, rank) == 3


def _did(*reports):
    """Whether each operation changed something; one that did not has a note."""
    assert all(report.changed != bool(report.note) for report in reports)
    return [report.changed for report in reports]


@pytest.mark.matrix
@pytest.mark.ranks(2)
def test_repeated_and_early_calls_do_nothing(rank):
    """Before init, before an offload, a second time, after destroy: the report has a note."""
    reloadpg.install(backends={worlds.BACKEND}, timeout=TIMEOUT)
    assert _did(reloadpg.offload(), reloadpg.reload()) == [False, False]
    worlds.init(timeout=TIMEOUT)
    pair = dist.new_group([0, 1])
    inner = pair._managed.communicator
    assert _did(reloadpg.reload(), reloadpg.reload()) == [False, False]
    assert pair._managed.communicator is inner
    del inner
    assert _did(*(reloadpg.offload() for _ in range(3))) == [True, False, False]
    assert (reloadpg.status().state, pair.state) == ("offloaded", "offloaded")
    assert _did(reloadpg.reload(), reloadpg.reload()) == [True, False]
    assert (pair.generation, summed(pair, rank), summed(None, rank)) == (1, 3, 3)
    dist.destroy_process_group()
    assert _did(reloadpg.offload(), reloadpg.reload()) == [False, False]


@pytest.mark.ranks(2)
def test_callbacks_run_on_every_offload_that_releases_something(rank):
    """Also for a group created while the others are offloaded, whose buffers go first (18)."""
    start()
    called = []

    def callback():
        called.append(len(reloadpg.status().groups))

    _, remove = reloadpg.on_offload(callback), reloadpg.on_offload(callback)
    remove()  # of two equal registrations, one
    reloadpg.offload()
    late = dist.new_group([0, 1])
    assert _did(reloadpg.offload(), reloadpg.offload()) == [True, False]
    assert (called, late.state) == ([1, 2], "offloaded")
    reloadpg.reload()
    assert summed(late, rank) == 3


@pytest.mark.ranks(1)
@pytest.mark.parametrize("min_size", [2, 1])
def test_a_job_of_one_rank(rank, min_size):
    """Its groups bypass by default, and are reloadable with ``min_size=1`` (failures 21, 23)."""
    start(min_size=min_size)
    own, reloadable = dist.new_group([0]), min_size == 1
    assert isinstance(own, reloadpg.ReloadableProcessGroup) == reloadable
    for cycle in range(1, 3):
        assert reloadpg.offload().changed == reloadable
        if reloadable:
            with pytest.raises(GroupOffloadedError):
                summed(own, rank)
        else:
            assert summed(own, rank) == 1
        assert reloadpg.reload().changed == reloadable
        assert summed(own, rank) == summed(None, rank) == 1
        assert getattr(own, "generation", cycle) == cycle
