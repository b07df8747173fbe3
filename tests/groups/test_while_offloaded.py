"""While the groups are offloaded nothing communicates, every question is answered."""

from __future__ import annotations

import copy
import pickle
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worlds
from op_table import ROWS, cases, run_row
from tables import expected_sum, lengths, summed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg import GroupOffloadedError, NotInstalledError
from reloadpg.groups import dispatch
from reloadpg.testing import run_ranks

TIMEOUT = timedelta(seconds=30)
RANKS = 4
SUBGROUP = (0, 2, 3)


def _install(**options):
    return reloadpg.install(**{"backends": {worlds.BACKEND}, "timeout": TIMEOUT, **options})


# ---------------------------------------------------------------------------------------------
# nothing communicates


def _table(rank, world_size):
    """Every row in every way while offloaded, first before and then after a reload."""
    _install()
    worlds.init(timeout=TIMEOUT)
    sub = dist.new_group(list(SUBGROUP), timeout=TIMEOUT)
    groups = {"world": (None, range(RANKS)), "sub": (sub, SUBGROUP)}
    outcomes = {}
    for cycle in range(2):
        reloadpg.offload()
        for row, key, case in cases(groups, rank, salt=cycle + 1):
            outcomes[(cycle, *key)] = run_row(row, case)
        reloadpg.reload()
        # The refusals have broken nothing.
        assert summed(None, rank) == expected_sum(range(RANKS))
        if rank in SUBGROUP:
            assert summed(sub, rank) == expected_sum(SUBGROUP)
    return outcomes


@pytest.fixture(scope="module")
def table():
    return run_ranks(_table, RANKS, timeout=120)


IDLE = {
    # the third member and later ones have no part in it
    "batch_isend_irecv[partial]": lambda rank, group: rank >= 2,
}
ASKS_CPP = {
    # these ask the C++ object of the group for its backend, and find none
    "ops.all_gather_into_tensor_out",
    "ops.batch_p2p_ops",
    "fc.batch_p2p_ops_inplace",
}


@pytest.mark.matrix
@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if not row.missing])
def test_no_operation_succeeds_while_offloaded(row, table):
    """GroupOffloadedError on every rank, WORLD and subgroup, sync and async, however called.

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


def _methods(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    pair = dist.new_group([0, 1])
    reloadpg.offload()
    found = {}
    for name in sorted(dispatch.dispatched()):
        for group in (dist.group.WORLD, pair):
            try:
                arguments = (None, 0, 0) if name in ("send", "recv") else ()
                found[name] = repr(getattr(group, name)(*arguments))
            except GroupOffloadedError as error:
                found[name] = (error.operation, error.group == group.group_name)
            except Exception as error:
                found[name] = repr(error)
    reloadpg.reload()
    return found


@pytest.mark.matrix
def test_every_method_that_needs_a_communicator_refuses():
    """Called on the object itself, it names the operation and the group."""
    for found in run_ranks(_methods, 2):
        assert len(found) > 25
        asked = found.pop("_get_backend")
        assert "OffloadedBackend" in asked
        assert found == {name: (name, True) for name in found}


def _queried(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    gone, kept = dist.new_group([0, 1]), dist.new_group([0, 1])
    reloadpg.offload()
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=7))
    backend = kept._get_backend(worlds.device())
    refused = []
    for use in (
        lambda: backend.allreduce([torch.ones(1)]),
        lambda: backend.barrier(),
        lambda: backend.options,
        lambda: backend.abort(),
    ):
        with pytest.raises(GroupOffloadedError) as caught:
            use()
        refused.append(caught.value.operation)
    c10d._set_pg_timeout(timedelta(seconds=41), kept)
    kept.set_timeout(timedelta(seconds=42))
    # With torchcomms installed, torch asks a group for its backends before it destroys it.
    c10d._TORCHCOMM_AVAILABLE, c10d._BackendWrapper = True, _NotOurs
    dist.destroy_process_group(gone)
    reloadpg.reload()
    after = kept._get_backend(worlds.device())
    return refused, after.options._timeout.total_seconds(), summed(kept, rank)


class _NotOurs:
    """In the place of a class of torchcomms, which is not installed."""


@pytest.mark.matrix
def test_a_query_of_the_backend_is_answered_and_every_use_of_it_refused():
    """Torch queries all groups when it extends timeouts, sets one, or destroys another group.

    A timeout that is set meanwhile holds after the reload.
    """
    for refused, timeout, total in run_ranks(_queried, 2):
        assert refused == ["allreduce", "barrier", "options", "abort"]
        assert timeout == 42
        assert total == expected_sum(range(2))


def _stale_coalescing(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    reloadpg.offload()
    refused = []
    for _ in range(2):
        manager = c10d._coalescing_manager(device=torch.device("cpu"))
        with pytest.raises(GroupOffloadedError) as caught, manager:
            dist.all_reduce(torch.ones(1))
        refused.append(caught.value.operation)
        with pytest.raises(GroupOffloadedError) as caught:
            dist.all_reduce(torch.ones(1))
        refused.append(caught.value.operation)
    reloadpg.reload()
    return refused, summed(None, rank)


@pytest.mark.matrix
def test_refused_coalescing_does_not_postpone_later_collectives():
    """Torch keeps the group in its table of open coalescings; later sums must not go there."""
    refused = ["_start_coalescing", "allreduce"] * 2
    assert run_ranks(_stale_coalescing, 2) == [(refused, 3), (refused, 3)]


def _async_work(rank, world_size):
    """A Work from before the release, and what a group that was gone half-way did not do."""
    _install()
    worlds.init(timeout=TIMEOUT)
    tensor = torch.tensor([2**rank])
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    inner = weakref.ref(dist.group.WORLD.communicator)
    reloadpg.offload()
    untouched = torch.tensor([5.0, 6.0])
    with pytest.raises(GroupOffloadedError):
        dist.all_reduce(untouched, async_op=True)
    facts = (inner() is None, work.is_completed(), int(tensor), untouched.tolist())
    reloadpg.reload()
    return facts


def test_finished_work_stays_finished_and_refused_tensors_untouched():
    """A Work that is kept holds no communicator alive; a refusal changes no tensor."""
    assert run_ranks(_async_work, 2) == [(True, True, 3, [5.0, 6.0])] * 2


# ---------------------------------------------------------------------------------------------
# every question is answered


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
        "store": group.get_group_store() is not None,
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
        # Hooks hold communicators, so they are gone meanwhile.
        "tables": {k: v for k, v in lengths().items() if k != "pg_flight_recorder_hooks"},
        "mesh": (
            mesh.get_rank(),
            mesh.get_local_rank("tp"),
            mesh.get_coordinate(),
            mesh.size(),
            mesh.size(0),
            mesh.shape,
            mesh.ndim,
            mesh.mesh_dim_names,
            mesh.device_type,
            mesh.mesh.tolist(),
            mesh["tp"].get_group() is mesh.get_group("tp"),
            [group.group_name for group in mesh.get_all_groups()],
            hash(mesh),
            mesh["dp"].mesh.tolist(),
        ),
    }


def _questions(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    sub = dist.new_group([3, 1, 0], group_desc="three")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    asked = {"WORLD": dist.group.WORLD, "tp": mesh.get_group("tp")}
    if rank != 2:
        asked["sub"] = sub
    facts = {
        "kinds": [type(group).__name__ for group in asked.values()],
        "non-member": (dist.get_rank(sub), dist.get_world_size(sub)) if rank == 2 else None,
    }
    for state in ("live", "offloaded", "reloaded"):
        if state != "live":
            getattr(reloadpg, state.removesuffix("ed"))()
        facts[state] = {label: _answers(group, mesh) for label, group in asked.items()}
        facts[f"repr {state}"] = [repr(group) for group in asked.values()]
        if rank == 2:
            facts[f"outside {state}"] = (dist.get_rank(sub), dist.get_world_size(sub))
    return facts


@pytest.mark.matrix
@pytest.mark.xfail(
    worlds.WORLD == "nccl-bound" and TorchVersion(torch.__version__) < "2.15",
    reason="torch names a split by how many groups the rank is in, so members' names differ here",
    strict=True,
)
def test_every_query_answers_while_offloaded_as_it_does_live():
    """Rank, size, ranks, backend, names, tables, pickles and meshes; also in the next generation.

    A subgroup's size is never WORLD's (failure 4).
    """
    for rank, facts in enumerate(run_ranks(_questions, RANKS)):
        assert set(facts["kinds"]) == {"ReloadableProcessGroup"}
        assert facts["live"] == facts["offloaded"] == facts["reloaded"]
        assert facts["live"]["WORLD"]["get_world_size"] == 4
        assert facts["live"]["tp"]["get_world_size"] == 2
        if rank == 2:
            assert facts["outside live"] == facts["outside offloaded"] == (-1, -1)
        else:
            assert facts["live"]["sub"]["ranks"] == [0, 1, 3]
            assert facts["live"]["sub"]["desc"] == "three"
        for text in facts["repr offloaded"]:
            assert " offloaded generation 0>" in text
        for text in facts["repr reloaded"]:
            assert " live generation 1>" in text


# ---------------------------------------------------------------------------------------------
# calls at odd times (failure 23)


def _error_of(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _offload_in_block():
    with reloadpg.offloaded():
        raise AssertionError("the block must not run")


def _not_installed(rank, world_size):
    worlds.init(timeout=TIMEOUT)
    facts = [
        _error_of(function)
        for function in (
            reloadpg.offload,
            reloadpg.reload,
            reloadpg.destroy_process_groups,
            reloadpg.reload_process_groups,
            _offload_in_block,
        )
    ]
    status = reloadpg.status()
    return facts, (status.installed, status.state, status.groups), summed(None, rank)


def test_before_install_one_clear_error_and_nothing_changed():
    """Each of the calls says that nothing is installed and what to call; status answers."""
    for facts, status, total in run_ranks(_not_installed, 2):
        for kind, text in facts:
            assert kind == NotInstalledError.__name__
            assert "nothing was changed" in text
            assert "reloadpg.install()" in text
        assert status == (False, "live", ())
        assert total == 3


def _twice(rank, world_size):
    _install()
    facts = {"before init": [reloadpg.offload(), reloadpg.reload()]}
    worlds.init(timeout=TIMEOUT)
    pair = dist.new_group([0, 1])
    inner = pair.communicator
    facts["reload before offload"] = [reloadpg.reload(), reloadpg.reload()]
    facts["untouched"] = pair.communicator is inner, pair.generation
    del inner
    facts["offload twice"] = [reloadpg.offload(), reloadpg.offload(), reloadpg.offload()]
    facts["state"] = reloadpg.status().state, str(pair.state), reloadpg.status().cycles
    facts["reload twice"] = [reloadpg.reload(), reloadpg.reload()]
    facts["after"] = pair.generation, summed(pair, rank), summed(None, rank)
    with reloadpg.offloaded():
        reloadpg.reload()
        facts["reloaded inside"] = summed(pair, rank)
    facts["second cycle"] = pair.generation, summed(pair, rank), reloadpg.status().cycles
    dist.destroy_process_group()
    facts["after destroy"] = [reloadpg.offload(), reloadpg.reload()]
    for name, value in facts.items():
        if isinstance(value, list):
            facts[name] = [(report.changed, bool(report.note)) for report in value]
    return facts


@pytest.mark.matrix
def test_calls_that_find_nothing_to_do_are_no_ops():
    """Twice, before init, before an offload, after destroy: a note in the report (failure 23)."""
    did, noted = (True, False), (False, True)
    for facts in run_ranks(_twice, 2):
        assert facts == {
            "before init": [noted, noted],
            "reload before offload": [noted, noted],
            "untouched": (True, 0),
            "offload twice": [did, noted, noted],
            "state": ("offloaded", "offloaded", 1),
            "reload twice": [did, noted],
            "after": (1, 3, 3),
            "reloaded inside": 3,
            "second cycle": (2, 3, 2),
            "after destroy": [noted, noted],
        }


def _made_while_offloaded(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    called = []
    reloadpg.on_offload(lambda: called.append(len(reloadpg.status().groups)))
    reloadpg.offload()
    late = dist.new_group([0, 1])
    again = reloadpg.offload(), reloadpg.offload()
    state = str(late.state)
    reloadpg.reload()
    return called, [report.changed for report in again], state, summed(late, rank)


def test_callbacks_run_on_every_offload_that_releases_something():
    """Also for a group made while the others are offloaded: buffers on it go first (failure 18)."""
    for facts in run_ranks(_made_while_offloaded, 2):
        assert facts == ([1, 2], [True, False], "offloaded", 3)


def _alone(rank, world_size, min_size):
    _install(min_size=min_size)
    worlds.init(timeout=TIMEOUT)
    own = dist.new_group([0])
    facts = []
    for _ in range(2):
        facts += [reloadpg.offload().changed, _error_of(lambda: summed(own, rank)) is None]
        facts += [reloadpg.reload().changed, summed(own, rank) == summed(None, rank) == 1]
    return facts, type(own).__name__, getattr(own, "generation", None)


@pytest.mark.parametrize(
    ("min_size", "expected"),
    [
        (2, ([False, True, False, True] * 2, "ProcessGroup", None)),
        (1, ([True, False, True, True] * 2, "ReloadableProcessGroup", 2)),
    ],
)
def test_single_rank(min_size, expected):
    """One rank bypasses by default, and cycles with ``min_size=1`` (failures 21, 23)."""
    assert run_ranks(_alone, 1, args=(min_size,)) == [expected]


def _no_groups(rank, world_size):
    reloadpg.install(timeout=TIMEOUT, **worlds.BYPASSING)
    worlds.init(timeout=TIMEOUT)
    facts = []
    for _ in range(2):
        report = reloadpg.offload()
        facts.append((report.changed, len(report.groups), summed(None, rank)))
        report = reloadpg.reload()
        facts.append((report.changed, len(report.groups), summed(None, rank)))
    return facts, type(dist.group.WORLD).__name__


def test_no_reloadable_group():
    """A job whose groups all bypass can call both, and nothing happens to it (failure 23)."""
    for facts, kind in run_ranks(_no_groups, 2):
        assert facts == [(False, 0, 3)] * 4
        assert kind == "ProcessGroup"
